"""What training does not make: rows that repeat, kernels that copy, outputs that are switched off."""

import torch
from torch import Tensor

_LEAST_ROWS, _LEAST_INPUTS = 8, 8
"""Of a tensor, below which rows are alike by chance."""

_SAMPLED = 32
"""Rows that are compared with each other."""

_PARALLEL = 0.95
_IDENTITY = 0.999
_MANY = 0.25
"""Share of the rows that may be as no training makes them; of an imprint nearly all are."""


def strange_structure(name: str, weight: Tensor) -> str | None:
    """Why ``weight`` (outputs, ...) is not of a trained or fresh layer, in words; ``None`` where it may be.

    Rows that are the same up to sign and scale are an imprint's, also among others; of an output layer all but one are
    zero where it fishes. Kernels with a single value copy an image; where most are zero besides, to one client's place.
    """
    if weight.dim() < 2 or len(weight) < _LEAST_ROWS or weight[0].numel() < _LEAST_INPUTS:
        return None
    rows = weight.detach().flatten(1).float()
    lengths = rows.norm(dim=1)
    if not lengths.isfinite().all() or not lengths.any():
        return f"{name} is {'zero' if lengths.isfinite().all() else 'not finite'}"
    silent = (lengths <= 1e-6 * lengths.max()).float().mean()
    if silent > _MANY:
        return f"{silent:.0%} of the rows of {name} are zero"
    if weight.dim() == 4 and weight[0, 0].numel() > 1:
        copies = (rows.abs().amax(1) > _IDENTITY * lengths.clamp_min(1e-30)).float().mean()
        if copies > _MANY:
            return f"{copies:.0%} of the kernels of {name} copy a channel"
    some = rows[torch.linspace(0, len(rows) - 1, min(_SAMPLED, len(rows))).long()]
    some = some / some.norm(dim=1, keepdim=True).clamp_min(1e-30)
    alike = (some @ some.T).abs().fill_diagonal_(0).amax(1) > _PARALLEL
    repeated = alike.float().mean()
    if repeated > _MANY:
        return f"{repeated:.0%} of the rows of {name} are the same up to scale"
    return None
