"""An ordinary Flower app that trains a small network on images; see README.md."""
