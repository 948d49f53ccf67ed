"""Defenses that upload only some elements of the update, with optional error feedback."""

import typing
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from fl_privacy import checks
from fl_privacy.defenses._dp_noise import Distribution, dp_noise, noise_std, sample_noise
from fl_privacy.defenses.defense import ClientState, Defense, LocalStep, compose
from fl_privacy.defenses.robust_data import PERMUTATIONS, POINTS, integrated_gradients_of_step, shapley_of_elements
from fl_privacy.effects import Part, Scope, Sparse
from fl_privacy.errors import UserError
from fl_privacy.types import Tensors


def keep_largest(scores: Tensors, *, drop: float, scope: Scope) -> Tensors:
    """Return boolean masks that are false at the floor(drop * n) smallest of n ``scores``, for ``drop`` in [0, 1).

    The scope ``layer`` counts n within each tensor, ``global`` over all.
    """
    if scope == "layer":
        return {name: _mask(s.flatten(), drop).view(s.shape) for name, s in scores.items()}
    mask = _mask(torch.cat([s.flatten() for s in scores.values()]), drop) if scores else torch.empty(0)
    parts = torch.split(mask, [s.numel() for s in scores.values()])
    return {name: part.view(s.shape) for (name, s), part in zip(scores.items(), parts, strict=True)}


def upload_scores(by: str, tensors: Tensors, rng: torch.Generator) -> Tensors:
    """Return a score of each element of ``tensors``: its magnitude, or a random number if ``by`` is ``random``."""
    if by != "random":
        return {n: t.abs() for n, t in tensors.items()}
    return {n: torch.rand(t.shape, generator=rng, device=rng.device).to(t.device) for n, t in tensors.items()}


def _mask(scores: Tensor, drop: float) -> Tensor:
    dropped = int(drop * len(scores) + 1e-6)  # 0.29 * 100 is 28.999999999999996
    if dropped == 0:
        return torch.ones_like(scores, dtype=torch.bool)
    threshold = scores.kthvalue(dropped).values
    mask = ~(scores <= threshold)
    ties = (scores == threshold).nonzero().squeeze(1)
    return mask.index_fill_(0, ties[: len(scores) - dropped - int(mask.sum())], True)


def compress_with_feedback(
    compress: Callable[[Tensors], Tensors], tensors: Tensors, state: ClientState, *, owner: str, feedback: bool
) -> Tensors:
    """Return ``compress(tensors)``; with ``feedback``, first add to ``tensors`` what earlier calls have lost.

    The losses, input minus output, are kept in ``state`` under names that begin with ``owner``. ``compress`` must add
    no noise: feedback would undo it.
    """
    if not feedback:
        return compress(tensors)
    keys = {name: f"{owner}/residual/{name}" for name in tensors}
    left = {name: state.tensors[key] for name, key in keys.items() if key in state.tensors}
    corrected = {name: t + left[name].to(t.device) if name in left else t for name, t in tensors.items()}
    compressed = compress(corrected)
    state.tensors.update({keys[name]: t - compressed[name] for name, t in corrected.items()})
    return compressed


Criterion = Literal["gradient", "weight", "product", "integrated_gradients", "shapley", "random"]

OF_STEPS = ("weight", "product", "integrated_gradients", "shapley")
"""Criteria that prune the gradient of every local step, since they need the parameters."""


def step_scores(by: Criterion, gradients: Tensors, step: LocalStep, samples: int | None = None) -> Tensors:
    """Return the importance of each element of ``gradients``, for pruning the least important; see ``pruning``.

    ``by``: ``weight``, ``product``, ``integrated_gradients`` or ``shapley``. ``samples``: number of points or
    permutations for the last two; ``None`` takes the default.
    """
    weights = {name: step.sent.parameters[name].detach() for name in gradients}
    if by == "weight":
        return {name: w.abs() for name, w in weights.items()}
    products = {name: (w * gradients[name]).abs() for name, w in weights.items()}
    if by == "product":
        return products
    if by == "integrated_gradients":
        found = integrated_gradients_of_step(step, points=samples or POINTS)
        return {name: found[name].abs() for name in gradients}
    values = shapley_of_elements(step, permutations=samples or PERMUTATIONS)
    return products | {name: value for name, value in values.items() if name in weights}


def pruning(
    *,
    rate: float = 0.9,
    by: Criterion = "gradient",
    scope: Scope = "layer",
    error_feedback: bool = False,
    samples: int | None = None,
) -> Defense:
    """Zero the floor(rate * n) least important of n elements (DLG section 5.2; Refiner Tables 1 and 11).

    Args:
        rate: share of the elements set to zero, in [0, 1).
        by: importance of an element: ``gradient`` is its magnitude in the upload, ``random`` a random number. The
            others prune the gradient of every local step: ``weight`` (|parameter|), ``product`` (|parameter x
            gradient|), ``integrated_gradients`` (|parameter x mean gradient on the line from zero to the parameters|)
            and ``shapley`` (Shapley value of the element's neuron for the batch's loss; ``product`` if it has no
            neuron).
        scope: ``layer`` prunes the share of each parameter tensor, ``global`` of the whole update.
        error_feedback: ``True`` adds the pruned elements to the next update.
        samples: number of points of ``integrated_gradients`` (a pass each), or of random orders of ``shapley`` (a pass
            per neuron each); ``None`` takes 20 points or 10 orders.
    """
    _check_pruning(rate, by, scope, error_feedback, samples=samples)

    def prune(tensors: Tensors, scores: Callable[[Tensors], Tensors], state: ClientState) -> Tensors:
        def compress(update: Tensors) -> Tensors:
            masks = keep_largest(scores(update), drop=rate, scope=scope)
            return {name: t.masked_fill(~masks[name], 0.0) for name, t in update.items()}

        return compress_with_feedback(compress, tensors, state, owner="pruning", feedback=error_feedback)

    def on_upload(tensors: Tensors, state: ClientState, rng: torch.Generator) -> Tensors:
        return prune(tensors, lambda update: upload_scores(by, update, rng), state)

    def on_gradient(tensors: Tensors, step: LocalStep) -> Tensors:
        return prune(tensors, lambda update: step_scores(by, update, step, samples), step.state)

    settings = {"rate": rate, "by": by, "scope": scope, "error_feedback": error_feedback}
    effect = Sparse(largest=by == "gradient", scope=scope, error_feedback=error_feedback, dropped=rate)
    part = Part("pruning", settings if samples is None else {**settings, "samples": samples}, effect, strength="rate")
    if by in OF_STEPS:
        return Defense(parts=(part,), gradient=(on_gradient,))
    return Defense(parts=(part,), upload=(on_upload,))


def _check_pruning(rate: float, by: str, scope: str, error_feedback: bool, *, samples: int | None) -> None:
    checks.number("defense.rate", rate, at_least=0, below=1, example=0.9)
    checks.one_of("defense.by", by, typing.get_args(Criterion))
    checks.one_of("defense.scope", scope, ("layer", "global"))
    checks.one_of("defense.error_feedback", error_feedback, (True, False))
    if samples is not None:
        checks.whole("defense.samples", samples, at_least=1, example=20)
        if by not in ("integrated_gradients", "shapley"):
            raise UserError(
                "defense.samples is expected with defense.by=integrated_gradients or shapley, but got"
                f" defense.by={by}; leave it out."
            )
    if by == "shapley" and scope == "global":
        raise UserError(
            "defense.scope is expected to be layer with defense.by=shapley, which ranks the neurons of a layer,"
            " but got 'global'; set defense.scope=layer."
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
    """Upload ceil(share * n) of n elements, the largest or random ones, with optional noise; the others become zero.

    It is PPDL of Shokri and Shmatikov 2015, a baseline of Fan et al. 2020 (Table 11).

    Args:
        share: share theta of the uploaded elements, in (0, 1].
        by: elements to upload: those of largest ``magnitude``, or ``random`` ones.
        scope: ``global`` takes the share of the whole update, ``layer`` of each parameter tensor.
        noise: ``gaussian`` or ``laplace``.
        noise_scale: standard deviation (Gaussian) or b (Laplace) of the noise, at least 0.
        error_feedback: ``True`` adds the elements that were not uploaded to the next update.
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
            masks = keep_largest(upload_scores(by, update, rng), drop=1 - share, scope=scope)
            return {name: t.masked_fill(~masks[name], 0.0) for name, t in update.items()}

        shared = compress_with_feedback(select, tensors, state, owner="selective_sharing", feedback=error_feedback)
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
    return Defense(parts=(Part("selective_sharing", settings, effect, strength="share"),), upload=(on_upload,))


def ppdl(*, share: float = 0.05, noise: Distribution = "gaussian", scale: float = 0.01) -> Defense:
    """Add noise to every local gradient, and upload only the largest elements (PPDL, Fan et al. 2020, Table 11).

    Args:
        share: share theta of the uploaded elements, in (0, 1].
        noise: ``gaussian`` or ``laplace``.
        scale: standard deviation (Gaussian) or b (Laplace), at least 0.
    """
    return compose(dp_noise(noise=noise, scale=scale, at="gradient"), selective_sharing(share=share))
