"""Pretrained networks in files: Refiner's evaluation network, and image generators."""
