"""A Flower app with clients of the older kind, ``NumPyClient``; see README.md."""
