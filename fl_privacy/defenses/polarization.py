"""SPN's private head: features polarized towards secret binary codes."""

import torch
from torch import Tensor, nn


class PolarizationHead(nn.Module):
    """A fully connected layer on the features, and the codes that its outputs are drawn to (SPN, section 3.1).

    Attributes:
        weight: (K, F).
        bias: (K,).
        codes: (C, K) of -1 and 1, one random code for each class.

    Args:
        features: F.
        bits: K.
        classes: C.
        bound: weights and bias start from U(-bound, bound).
        rng: the only source of its values.
    """

    codes: Tensor

    def __init__(self, *, features: int, bits: int, classes: int, bound: float, rng: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.uniform_(torch.empty(bits, features), -bound, bound, generator=rng))
        self.bias = nn.Parameter(nn.init.uniform_(torch.empty(bits), -bound, bound, generator=rng))
        self.register_buffer("codes", 2.0 * torch.randint(2, (classes, bits), generator=rng) - 1.0)

    def forward(self, features: Tensor) -> Tensor:
        """(B, F) -> v (B, K)."""
        return nn.functional.linear(features, self.weight, self.bias)


def polarization_loss(outputs: Tensor, codes: Tensor, labels: Tensor, margin: float) -> Tensor:
    """Mean over the batch of sum_k max(m - v_k t_k, 0), t the code of the example's class (SPN, Eq. 5).

    Args:
        outputs: v, (B, K).
        codes: (C, K) of -1 and 1.
        labels: (B,) class indices, or (B, C) probabilities, which weight the classes' losses.
        margin: m.
    """
    if labels.dim() == 1:
        return (margin - outputs * codes[labels]).relu().sum(1).mean()
    of_classes = (margin - outputs[:, None] * codes).relu().sum(2)
    return (labels * of_classes).sum(1).mean()
