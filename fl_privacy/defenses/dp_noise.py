"""Noise on the update, after clipping it."""

from typing import Literal

import torch

from fl_privacy.defenses.base import ClientState, Defense, LocalStep
from fl_privacy.defenses.checks import expect_number, expect_one_of
from fl_privacy.defenses.clipping import Scope, clip_by_norm
from fl_privacy.defenses.noise import Distribution, noise_std, sample_noise
from fl_privacy.types import Tensors


def dp_noise(
    *,
    noise: Distribution = "gaussian",
    scale: float = 0.01,
    clip_norm: float | None = None,
    clip_scope: Scope = "global",
    at: Literal["upload", "gradient"] = "upload",
) -> Defense:
    """Clip, then add independent noise to every element (Abadi et al. 2016 for a whole update; DLG section 5.1).

    ``scale`` is a scale, not a privacy budget: without ``clip_norm`` there is no guarantee whatever the scale;
    with it, ``accounting.guarantee`` says which.

    Args:
        noise: distribution of each element.
        scale: standard deviation of the Gaussian, or the Laplace parameter b; in units of the update, at least 0.
        clip_norm: l2 norm the update is scaled down to first; ``None`` leaves it.
        clip_scope: ``global`` bounds the norm of the whole update, ``layer`` that of each parameter tensor.
        at: ``upload`` perturbs once what is uploaded, ``gradient`` the gradient of every local step.
    """
    expect_one_of("defense.noise", noise, ("gaussian", "laplace"))
    expect_one_of("defense.clip_scope", clip_scope, ("layer", "global"))
    expect_one_of("defense.at", at, ("upload", "gradient"))
    expect_number("defense.scale", scale, at_least=0, example=0.01)
    if clip_norm is not None:
        expect_number("defense.clip_norm", clip_norm, above=0, example=1.0)

    def perturb(tensors: Tensors, rng: torch.Generator) -> Tensors:
        if clip_norm is not None:
            tensors = clip_by_norm(tensors, clip_norm, scope=clip_scope)
        return {name: t + sample_noise(t, noise, scale, rng) for name, t in tensors.items()}

    def on_upload(tensors: Tensors, state: ClientState, rng: torch.Generator) -> Tensors:
        return perturb(tensors, rng)

    def on_gradient(tensors: Tensors, step: LocalStep) -> Tensors:
        return perturb(tensors, step.rng)

    return Defense(
        name="dp_noise",
        gradient=(on_gradient,) if at == "gradient" else (),
        upload=(on_upload,) if at == "upload" else (),
        public={
            "noise": noise,
            "scale": scale,
            "std": noise_std(noise, scale),
            "clip_norm": clip_norm,
            "clip_scope": clip_scope,
            "at": at,
        },
    )
