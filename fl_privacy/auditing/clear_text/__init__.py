"""What leaves a client in clear: found by looking at a reply beside what the client loaded, without any attack."""
