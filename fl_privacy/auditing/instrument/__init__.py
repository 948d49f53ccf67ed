"""Observation of third-party training code through PyTorch's hooks: data, model, loss and steps, without Flower."""
