"""Which words the texts of an update consist of, in no order: what the rows of the embeddings give away."""
