"""Inputs that the gradient of a fully connected layer holds, by solving for them."""
