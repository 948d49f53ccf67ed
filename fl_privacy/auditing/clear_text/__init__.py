"""Search for client data that replies hold in the clear."""
