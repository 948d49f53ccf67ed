"""Scaling an update down to a norm."""

from typing import Literal

import torch

from fl_privacy.types import Tensors

Scope = Literal["layer", "global"]
"""``layer``: each parameter tensor by itself (as in Opacus' per-layer clipping); ``global``: all as one vector."""


def clip_by_norm(tensors: Tensors, norm: float, *, scope: Scope = "global") -> Tensors:
    """``tensors`` scaled by min(1, norm / l2 norm); directions and what lies within ``norm`` stay.

    Args:
        tensors: gradient or delta by name.
        norm: the largest l2 norm that stays, above 0; of each tensor if ``scope`` is ``layer``.
        scope: over what the norm is taken.
    """
    if not tensors:
        return {}
    norms = torch.stack([torch.linalg.vector_norm(t) for t in tensors.values()])
    if scope == "global":
        norms = torch.linalg.vector_norm(norms).expand(len(tensors))
    factors = (norm / norms).clamp(max=1.0)  # norm / 0 = inf is clamped too
    return {name: t * factor.to(t.dtype) for (name, t), factor in zip(tensors.items(), factors, strict=True)}
