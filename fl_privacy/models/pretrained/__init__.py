"""Networks trained beforehand and kept in files: Refiner's evaluation network, and image generators."""
