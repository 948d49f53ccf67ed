"""A Flower app that measures what its uploads leak; see README.md."""
