"""How often each class is in a batch, from the gradient of the output layer and its values."""

import torch
from torch import Tensor

_SOUND = 1e-3
"""Share of the largest bias gradient below which a row's ratio is rounding."""


def class_counts(gradient: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor], batch_size: int) -> Tensor:
    """(K,) how often each class occurs, not yet rounded (iLRG, Ma et al. 2023, section 4).

    The ratio of a class's weight and bias gradient is about the mean of what entered the layer for its examples: of
    those p - y has most weight. From these the layer gives the probabilities P (K, K) that the model has for an example
    of each class, and with them the bias gradient is linear in the counts: ``B b = (P^T - I) n``, where n sums to B.

    Args:
        gradient: of weight (K, F) and bias (K,), of the mean loss of the batch, unscaled.
        values: of weight and bias.
        batch_size: B.
    """
    rows, bias = (part.double() for part in gradient)
    weight, offset = (part.double() for part in values)
    sound = bias.abs() > _SOUND * bias.abs().max()
    if not bool(sound.any()):
        return torch.full_like(bias, torch.nan)
    entered = rows / torch.where(sound, bias, 1.0)[:, None]
    entered = torch.where(sound[:, None], entered, entered[sound].mean(0))
    probabilities = (entered @ weight.T + offset).softmax(1)
    system = probabilities.T - torch.eye(len(bias)).to(probabilities)
    system = torch.cat([system, torch.ones_like(system[:1])])
    wanted = batch_size * torch.cat([bias, torch.ones_like(bias[:1])])
    return torch.linalg.lstsq(system, wanted[:, None]).solution[:, 0]
