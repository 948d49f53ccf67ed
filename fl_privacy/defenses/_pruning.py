"""Uploading only some elements of the update.

Choosing elements of an update, and adding what was dropped to the next one.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from fl_privacy import checks
from fl_privacy.defenses._dp_noise import Distribution, dp_noise, noise_std, sample_noise
from fl_privacy.defenses.defense import ClientState, Defense, LocalStep, compose
from fl_privacy.effects import Part, Scope, Sparse
from fl_privacy.types import Tensors


def keep_largest(scores: Tensors, *, drop: float, scope: Scope) -> Tensors:
    """Return boolean masks, true at all but the floor(drop * n) smallest scores.

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
    """Draw uniform scores in the shapes of ``tensors``: keeping the largest of them chooses at random."""
    return {n: torch.rand(t.shape, generator=rng, device=rng.device).to(t.device) for n, t in tensors.items()}


def _mask(scores: Tensor, drop: float) -> Tensor:
    """Turn scores (n,) into booleans (n,); NaN counts as large, so that a broken update stays visibly broken."""
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
    """Return ``compress(tensors + residual)``; the new residual is kept in ``state`` under ``owner``.

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


def pruning(
    *,
    rate: float = 0.9,
    by: Literal["gradient", "weight", "product", "random"] = "gradient",
    scope: Scope = "layer",
    error_feedback: bool = False,
) -> Defense:
    """Zero the floor(rate * n) elements of the least importance (DLG section 5.2; Refiner Table 1).

    Args:
        rate: share of the elements set to zero, in [0, 1).
        by: importance of an element: ``gradient`` is its magnitude in what is uploaded, ``random`` a uniform draw;
            ``weight`` (the magnitude of its parameter) and ``product`` (|parameter x gradient|) prune the gradient
            of every local step, where the parameters are at hand.
        scope: ``layer`` prunes the share of each parameter tensor, ``global`` of the whole update.
        error_feedback: add what was pruned to the next update.
    """
    checks.number("defense.rate", rate, at_least=0, below=1, example=0.9)
    checks.one_of("defense.by", by, ("gradient", "weight", "product", "random"))
    checks.one_of("defense.scope", scope, ("layer", "global"))
    checks.one_of("defense.error_feedback", error_feedback, (True, False))

    def prune(tensors: Tensors, scores: Callable[[Tensors], Tensors], state: ClientState) -> Tensors:
        def compress(update: Tensors) -> Tensors:
            masks = keep_largest(scores(update), drop=rate, scope=scope)
            return {name: t.masked_fill(~masks[name], 0.0) for name, t in update.items()}

        if error_feedback:
            return compress_with_feedback(compress, tensors, state, owner="pruning")
        return compress(tensors)

    def on_upload(tensors: Tensors, state: ClientState, rng: torch.Generator) -> Tensors:
        if by == "random":
            return prune(tensors, lambda update: random_scores(update, rng), state)
        return prune(tensors, lambda update: {name: t.abs() for name, t in update.items()}, state)

    def on_gradient(tensors: Tensors, step: LocalStep) -> Tensors:
        weights = {name: step.sent.parameters[name].detach() for name in tensors}
        if by == "weight":
            return prune(tensors, lambda update: {name: w.abs() for name, w in weights.items()}, step.state)
        return prune(tensors, lambda update: {n: (w * update[n]).abs() for n, w in weights.items()}, step.state)

    of_gradient = by in ("weight", "product")
    return Defense(
        parts=(
            Part(
                "pruning",
                {"rate": rate, "by": by, "scope": scope, "error_feedback": error_feedback},
                Sparse(largest=by == "gradient", scope=scope, error_feedback=error_feedback, dropped=rate),
                strength="rate",
            ),
        ),
        gradient=(on_gradient,) if of_gradient else (),
        upload=() if of_gradient else (on_upload,),
    )


def selective_sharing(
    *,
    share: float = 0.05,
    by: Literal["magnitude", "random"] = "magnitude",
    scope: Scope = "global",
    noise: Distribution = "gaussian",
    noise_scale: float = 0.0,
    error_feedback: bool = False,
) -> Defense:
    """Share ceil(share * n) elements, the largest or random ones, noised; the others are zero.

    PPDL of Shokri and Shmatikov 2015, as the SPN paper compares with it (Table 11 for the noise).
    ``encoding.encode`` sends positions and values of the shared elements only.

    Args:
        share: theta, in (0, 1].
        by: which elements are shared.
        scope: ``global`` takes the share of the whole update, ``layer`` of each parameter tensor.
        noise: distribution of the noise.
        noise_scale: standard deviation (Gaussian) or b (Laplace) of the noise on the shared elements, at least 0.
        error_feedback: add what was not shared (not the noise) to the next round's update.
    """
    checks.number("defense.share", share, above=0, at_most=1, example=0.05)
    checks.one_of("defense.by", by, ("magnitude", "random"))
    checks.one_of("defense.scope", scope, ("layer", "global"))
    checks.one_of("defense.noise", noise, ("gaussian", "laplace"))
    checks.number("defense.noise_scale", noise_scale, at_least=0, example=0.01)
    checks.one_of("defense.error_feedback", error_feedback, (True, False))

    def on_upload(tensors: Tensors, state: ClientState, rng: torch.Generator) -> Tensors:
        masks: Tensors = {}

        def select(update: Tensors) -> Tensors:
            nonlocal masks
            scores = random_scores(update, rng) if by == "random" else {n: t.abs() for n, t in update.items()}
            masks = keep_largest(scores, drop=1 - share, scope=scope)
            return {name: t.masked_fill(~masks[name], 0.0) for name, t in update.items()}

        if error_feedback:
            shared = compress_with_feedback(select, tensors, state, owner="selective_sharing")
        else:
            shared = select(tensors)
        if noise_scale == 0:
            return shared
        return {n: t + sample_noise(t, noise, noise_scale, rng) * masks[n] for n, t in shared.items()}

    std = noise_std(noise, noise_scale)
    settings = {
        "share": share, "by": by, "scope": scope, "noise": noise, "noise_std": std, "error_feedback": error_feedback
    }  # fmt: skip
    effect = Sparse(
        largest=by == "magnitude", scope=scope, error_feedback=error_feedback, noise_std=std, dropped=1 - share
    )
    return Defense(
        parts=(Part("selective_sharing", settings, effect, strength="share"),),
        upload=(on_upload,),
    )


def ppdl(*, share: float = 0.05, noise: Distribution = "gaussian", scale: float = 0.01) -> Defense:
    """Add noise to every gradient, then share only the largest elements of the update (Fan et al. 2020, Table 11).

    ``dp_noise`` at each local gradient, without clipping, composed with ``selective_sharing`` by magnitude.

    Args:
        share: theta, in (0, 1].
        noise: distribution of the noise.
        scale: standard deviation (Gaussian) or b (Laplace), at least 0.
    """
    return compose(dp_noise(noise=noise, scale=scale, at="gradient"), selective_sharing(share=share))
