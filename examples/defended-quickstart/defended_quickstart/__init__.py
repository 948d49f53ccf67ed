"""A Flower app whose clients clip their uploads and add noise; see README.md."""
