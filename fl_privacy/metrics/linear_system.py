"""How well the linear system of a fully connected layer can be solved for its input, by SPN's theorems."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LinearSystem:
    """B x = W of a layer, with what a defense added: B + E_B and W + E_W (SPN, Theorem 2.2).

    B is diagonal: each entry b_i of the bias gradient, once for each input. Norms are spectral, of W Euclidean.

    Attributes:
        condition: kappa(B), largest over smallest |b_i|.
        contraction: ||B^-1 E_B||, the largest |e_i / b_i|.
        error_bound: on ||x* - x|| / ||x||; infinite where the condition of the theorem does not hold.
    """

    condition: float
    contraction: float
    error_bound: float

    @property
    def solvable(self) -> bool:
        """Whether ||B^-1 E_B|| < 1, the condition under which the theorem says that x can be determined."""
        return self.contraction < 1


def linear_system(
    clean: tuple[Tensor, Tensor], seen: tuple[Tensor, Tensor], *, rows: int | None = None
) -> LinearSystem:
    """The system of a layer before and after the defense.

    Args:
        clean: gradient of weight (M, N) and bias (M,) without defense.
        seen: as uploaded.
        rows: take the so many rows with the largest bias gradient that was seen, as an attacker would; ``None`` takes
            all whose bias gradient is not zero.

    Returns:
        The diagnostic; a condition and contraction of infinity where a row that is taken has no gradient.
    """
    (weight, bias), (seen_weight, seen_bias) = (_double(*clean), _double(*seen))
    chosen = bias.nonzero().flatten() if rows is None else seen_bias.abs().topk(min(rows, len(bias))).indices
    w, b = weight[chosen], bias[chosen].abs()
    if not len(chosen) or not b.all():
        return LinearSystem(condition=math.inf, contraction=math.inf, error_bound=math.inf)
    e_w, e_b = (seen_weight - weight)[chosen], (seen_bias - bias)[chosen].abs()
    condition, contraction = float(b.max() / b.min()), float((e_b / b).max())
    relative = float(e_b.max() / b.max()) + float(e_w.norm() / w.norm())
    bound = condition / (1 - contraction) * relative if contraction < 1 else math.inf
    return LinearSystem(condition=condition, contraction=contraction, error_bound=bound)


def _double(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return weight.detach().to(torch.float64), bias.detach().to(torch.float64)
