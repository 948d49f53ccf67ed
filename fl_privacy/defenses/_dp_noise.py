"""Clipping and noise on the update, on each local gradient or on each example's gradient."""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fl_privacy import checks, effects
from fl_privacy.defenses.defense import Defense, LocalStep
from fl_privacy.errors import UserError
from fl_privacy.models.gradients import clipped_sum
from fl_privacy.rng import SecretGenerator
from fl_privacy.types import Tensors


def clip_by_norm(tensors: Tensors, norm: float, *, scope: effects.Scope = "global") -> Tensors:
    """Scale ``tensors`` to at most the l2 ``norm``, all (``global``) or each (``layer``); ones not finite to zero."""
    if not tensors:
        return {}
    norms = torch.stack([torch.linalg.vector_norm(t) for t in tensors.values()])
    if scope == "global":
        norms = torch.linalg.vector_norm(norms).expand(len(tensors))
    factors = (norm / norms).clamp(max=1.0)  # norm / 0 = inf is clamped too
    known = norms.isfinite()
    scales = zip(tensors.items(), torch.where(known, factors, 0), known, strict=True)
    return {name: torch.where(finite, t, 0) * factor.to(t.dtype) for (name, t), factor, finite in scales}


Distribution = Literal["gaussian", "laplace"]


def sample_noise(like: Tensor, distribution: Distribution, scale: float, rng: torch.Generator) -> Tensor:
    """Return independent zero-mean noise with the shape, dtype and device of ``like``.

    ``scale``: standard deviation of Gaussian noise, or parameter b of Laplace noise with deviation sqrt(2) b. ``rng``:
    a ``SecretGenerator`` gives cryptographic noise.
    """
    if isinstance(rng, SecretGenerator):  # inverse distribution function of 52 secret bits and a sign, in float64
        bits = np.frombuffer(rng.next_bytes(8 * like.numel()), dtype="<u8")
        share = torch.from_numpy(((bits >> np.uint64(12)) + 0.5) * 2.0**-52)
        size = torch.erfinv(share).mul_(math.sqrt(2)) if distribution == "gaussian" else share.neg_().log1p_().neg_()
        signed = torch.from_numpy(np.where(bits & np.uint64(1), 1.0, -1.0)).mul_(size).mul_(scale)
        return signed.view(like.shape).to(like)
    noise = torch.empty(like.shape, dtype=like.dtype, device=rng.device)
    if distribution == "gaussian":
        noise.normal_(std=scale, generator=rng)
    else:  # inverse distribution function: three times as fast as exponential_
        noise.uniform_(-1, 1, generator=rng)
        below_one = 1 - torch.finfo(noise.dtype).eps / 2
        noise = noise.abs().clamp_max_(below_one).neg_().log1p_().mul_(scale).copysign_(noise)
    return noise.to(like.device)


def noise_std(distribution: Distribution, scale: float) -> float:
    """Return the standard deviation of ``sample_noise`` for ``distribution`` and ``scale``."""
    return scale * (math.sqrt(2) if distribution == "laplace" else 1.0)


def dp_noise(
    *,
    noise: Distribution = "gaussian",
    scale: float = 0.01,
    clip_norm: float | None = None,
    clip_scope: effects.Scope = "global",
    at: Literal["upload", "gradient"] = "upload",
    layers: Sequence[int | str] | None = None,
) -> Defense:
    """Clip the update, if asked, and add independent noise to every element (Abadi et al. 2016; DLG section 5.1).

    Without ``clip_norm``, there is no privacy guarantee; with it, ``privacy.guarantee`` computes one.

    Args:
        noise: ``gaussian`` or ``laplace``, independent for each element.
        scale: standard deviation of the Gaussian, or the Laplace parameter b; in units of the update, at least 0.
        clip_norm: largest l2 norm, to which the update is scaled down before the noise; ``None`` does not clip.
        clip_scope: ``global`` bounds the norm of the whole update, ``layer`` that of each parameter tensor.
        at: ``upload`` perturbs the upload once, ``gradient`` the gradient of every local step.
        layers: layers that get noise, by module names or by numbers from 1 (Refiner Table 2); ``None`` takes all. The
            others are uploaded in the clear, without guarantee.
    """
    checks.one_of("defense.noise", noise, ("gaussian", "laplace"))
    checks.one_of("defense.clip_scope", clip_scope, ("layer", "global"))
    checks.one_of("defense.at", at, ("upload", "gradient"))
    checks.number("defense.scale", scale, at_least=0, example=0.01)
    if clip_norm is not None:
        checks.number("defense.clip_norm", clip_norm, above=0, example=1.0)

    chosen = None if layers is None else _expect_layers(layers)

    def perturb(tensors: Tensors, rng: torch.Generator) -> Tensors:
        noised = tensors if chosen is None else _owned(tensors, chosen)
        if clip_norm is not None:
            tensors = clip_by_norm(tensors, clip_norm, scope=clip_scope)
        return {n: t + sample_noise(t, noise, scale, rng) if n in noised else t for n, t in tensors.items()}

    def expect_there(model: nn.Module) -> None:
        _owned((name for name, _ in model.named_parameters()), chosen or ())

    std = noise_std(noise, scale)
    settings: dict[str, object] = {
        "noise": noise, "scale": scale, "std": std, "clip_norm": clip_norm, "clip_scope": clip_scope, "at": at
    }  # fmt: skip
    clip = None if clip_norm is None else effects.Clipped(norm=clip_norm, scope=clip_scope)
    whole = (effects.Gaussian if noise == "gaussian" else effects.Laplace)(std=std, clip=clip, at=at)
    effect = whole if chosen is None else effects.NoisedLayers(added=whole, layers=chosen)
    settings |= {} if chosen is None else {"layers": list(chosen)}
    part, fits = effects.Part("dp_noise", settings, effect, strength="scale"), (expect_there,) if chosen else ()
    if at == "gradient":
        return Defense(parts=(part,), gradient=(lambda tensors, step: perturb(tensors, step.rng),), fits=fits)
    return Defense(parts=(part,), upload=(lambda tensors, state, rng: perturb(tensors, rng),), fits=fits)


def _expect_layers(layers: Sequence[int | str]) -> tuple[int | str, ...]:
    listed = isinstance(layers, Sequence) and not isinstance(layers, str) and len(layers) > 0
    if not listed or not all((type(one) is int and one >= 1) or (isinstance(one, str) and one) for one in layers):
        raise UserError(
            "defense.layers is expected to be a list of names of layers, or of their numbers from 1, but got"
            f" {layers!r}; try [1], or null for all."
        )
    return tuple(layers)


def _owned(names: Iterable[str], layers: tuple[int | str, ...]) -> frozenset[str]:
    numbers = effects.layer_numbers(names)
    there = [*dict.fromkeys(map(effects.layer_of, numbers)), *dict.fromkeys(numbers.values())]
    for layer in layers:
        checks.one_of("defense.layers", layer, there)
    return effects.NoisedLayers(added=None, layers=layers).noised(numbers)


def local_dp(
    *, round_epsilon: float = 1.0, delta: float = 1e-5, clip_norm: float = 1.0, sensitivity: float | None = None
) -> Defense:
    """Clip, and add Gaussian noise by the classical formula for one round (Dwork and Roth 2014, Theorem A.1).

    It equals Flower's ``LocalDpMod(clip_norm, sensitivity, round_epsilon, delta)`` in distribution. The formula is
    proven for one round and epsilon up to 1; for many rounds see ``privacy.guarantee``.

    Args:
        round_epsilon: privacy budget of one round, above 0.
        delta: probability in (0, 1).
        clip_norm: largest l2 norm, to which the update is scaled down, above 0.
        sensitivity: l2 distance of two updates for which the noise is calibrated; ``None`` takes ``clip_norm``.
    """
    checks.number("defense.round_epsilon", round_epsilon, above=0, example=1.0)
    checks.number("defense.delta", delta, above=0, below=1, example=1e-5)
    if sensitivity is None:
        sensitivity = clip_norm
    checks.number("defense.sensitivity", sensitivity, at_least=0, example=1.0)
    scale = sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / round_epsilon
    return dp_noise(noise="gaussian", scale=scale, clip_norm=clip_norm)


def dp_sgd(*, clip_norm: float = 1.0, noise_multiplier: float = 1.0) -> Defense:
    """Clip each example's gradient, add Gaussian noise to the sum, divide by the batch size (Abadi et al. 2016).

    Compose it before other gradient defenses, since it recomputes the gradient. Gradients of private parameters are
    noised, too, since they shape later uploads. ``privacy.guarantee`` computes epsilon.

    Args:
        clip_norm: largest l2 norm C of one example's gradient, above 0.
        noise_multiplier: standard deviation of the noise on the sum, in units of C; at least 0.
    """
    checks.number("defense.clip_norm", clip_norm, above=0, example=1.0)
    checks.number("defense.noise_multiplier", noise_multiplier, at_least=0, example=1.0)

    def on_gradient(tensors: Tensors, step: LocalStep) -> Tensors:
        total, loss = clipped_sum(
            step.model, step.sent, step.batch, clip_norm, plan=step.plan, changes=step.changes, held=step.held
        )
        step.losses.append(loss)
        std, size = noise_multiplier * clip_norm, max(1, len(step.batch))
        return {name: (t + sample_noise(t, "gaussian", std, step.rng)) / size for name, t in total.items()}

    settings = {"clip_norm": clip_norm, "noise_multiplier": noise_multiplier}
    effect = effects.ClippedExamples(norm=clip_norm, noise_multiplier=noise_multiplier)
    part = effects.Part("dp_sgd", settings, effect, strength="noise_multiplier")
    return Defense(parts=(part,), gradient=(on_gradient,), anew=(on_gradient,))
