"""How far a defended update is from the clean one."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.types import Tensors


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """A defended update beside the clean one.

    Attributes:
        signal_to_perturbation: ||B|| / ||E||, clean norm over the norm of the difference; infinite if nothing changed.
        cosine: of the angle between both, in [-1, 1]; NaN if one of them is zero.
        zeros: share of the clean update's elements that are zero or withheld in the defended one.
    """

    signal_to_perturbation: float
    cosine: float
    zeros: float


def perturbation(clean: Tensors, defended: Tensors) -> Perturbation:
    """Compare ``defended`` with the update ``clean`` of the same client, batch and model.

    Args:
        clean: gradient or delta by name.
        defended: the same names and shapes; a name that is missing was withheld and counts as zeros.

    Raises:
        UserError: ``defended`` has a name or shape that ``clean`` has not.
    """
    for name, t in defended.items():
        if name not in clean or clean[name].shape != t.shape:
            expected = f"shape {tuple(clean[name].shape)}" if name in clean else f"a name among {sorted(clean)}"
            raise UserError(f"Both updates are expected to match, but {name} has {tuple(t.shape)}, not {expected}.")
    b = _flat(clean)
    d = _flat({name: defended.get(name, torch.zeros_like(t)) for name, t in clean.items()})
    signal, error, size = (float(torch.linalg.vector_norm(v)) for v in (b, d - b, d))
    return Perturbation(
        signal_to_perturbation=signal / error if error > 0 else math.inf,
        cosine=float(b @ d) / (signal * size) if signal > 0 and size > 0 else math.nan,
        zeros=float((d == 0).double().mean()),
    )


def _flat(tensors: Tensors) -> Tensor:
    """(n,) float64."""
    return torch.cat([t.detach().flatten().double() for t in tensors.values()])
