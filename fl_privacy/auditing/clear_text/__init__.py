"""Client data in the clear, found by comparing a reply with the loaded data, without any attack."""
