"""Choosing elements of an update, and adding what was dropped to the next one."""

from collections.abc import Callable

import torch
from torch import Tensor

from fl_privacy.defenses.defense import ClientState
from fl_privacy.effects import Scope
from fl_privacy.types import Tensors


def keep_largest(scores: Tensors, *, drop: float, scope: Scope) -> Tensors:
    """Boolean masks, true at all but the floor(drop * n) smallest scores.

    Args:
        scores: by name; larger is kept. Among equals, which ones stay is not specified.
        drop: share of the elements in [0, 1), so that at least one stays.
        scope: ``layer`` counts n within each tensor, ``global`` over all.
    """
    if scope == "layer":
        return {name: _mask(s.flatten(), drop).view(s.shape) for name, s in scores.items()}
    mask = _mask(torch.cat([s.flatten() for s in scores.values()]), drop) if scores else torch.empty(0)
    parts = torch.split(mask, [s.numel() for s in scores.values()])
    return {name: part.view(s.shape) for (name, s), part in zip(scores.items(), parts, strict=True)}


def random_scores(tensors: Tensors, rng: torch.Generator) -> Tensors:
    """Uniform scores in the shapes of ``tensors``: keeping the largest of them chooses at random."""
    return {n: torch.rand(t.shape, generator=rng, device=rng.device).to(t.device) for n, t in tensors.items()}


def _mask(scores: Tensor, drop: float) -> Tensor:
    """(n,) scores -> (n,) booleans; NaN counts as large, so that a broken update stays visibly broken."""
    dropped = int(drop * len(scores) + 1e-6)  # 0.29 * 100 is 28.999999999999996
    if dropped == 0:
        return torch.ones_like(scores, dtype=torch.bool)
    threshold = scores.kthvalue(dropped).values
    mask = ~(scores <= threshold)
    ties = (scores == threshold).nonzero().squeeze(1)
    return mask.index_fill_(0, ties[: len(scores) - dropped - int(mask.sum())], True)


def compress_with_feedback(
    compress: Callable[[Tensors], Tensors], tensors: Tensors, state: ClientState, *, owner: str
) -> Tensors:
    """``compress(tensors + residual)``; the new residual is kept in ``state`` under ``owner``.

    Over T rounds the compressed updates then sum to the clean ones up to the last residual. What is added for
    privacy does not belong into ``compress``: the residual would take it back in the next round.
    """

    def key(name: str) -> str:
        return f"{owner}/residual/{name}"

    corrected = {
        name: t + state.tensors[key(name)].to(t.device) if key(name) in state.tensors else t
        for name, t in tensors.items()
    }
    compressed = compress(corrected)
    state.tensors.update({key(name): t - compressed[name] for name, t in corrected.items()})
    return compressed
