"""The successor of Soteria that perturbs random slices of the whole gradient instead of one layer."""

import torch
from torch import Tensor
from torch.func import grad, jvp

from fl_privacy import checks
from fl_privacy.defenses.defense import Defense, LocalStep
from fl_privacy.defenses.noise.mechanism import sample_noise
from fl_privacy.effects import Part, SlicedNoise
from fl_privacy.gradients import batch_loss
from fl_privacy.progress import counted
from fl_privacy.types import Batch, ModelState, Tensors


def soteria_mixing(*, rate: float = 0.5, slices: int = 10, noise_scale: float = 0.01, directions: int = 4) -> Defense:
    """Add Gaussian noise to randomly chosen slices of the gradient (Wang et al., INFOCOM 2022; "Soteria" in Refiner).

    The gradient, layer after layer as one vector, is cut into slices of equal sensitivity, so that layers whose
    gradient tells more about the input are cut finer; slices run across layers. Each step draws anew which slices
    are perturbed: no layer can be muted by an attacker who knows the defense.

    Args:
        rate: share of the slices that are perturbed, in [0, 1]; rounded to a number of slices.
        slices: how many, at least 1.
        noise_scale: standard deviation of the noise, in units of the gradient, at least 0.
        directions: of the estimate of the sensitivities, at least 1.
    """
    checks.number("defense.rate", rate, at_least=0, at_most=1, example=0.5)
    checks.number("defense.slices", slices, at_least=1, example=10)
    checks.number("defense.noise_scale", noise_scale, at_least=0, example=0.01)
    checks.number("defense.directions", directions, at_least=1, example=4)

    def on_gradient(tensors: Tensors, step: LocalStep) -> Tensors:
        sensitivity = gradient_sensitivity(step, directions=directions, rng=step.rng)
        chosen = torch.randperm(slices, generator=step.rng, device=step.rng.device)[: round(rate * slices)]
        perturbed = torch.zeros(slices, dtype=torch.bool).index_fill_(0, chosen.cpu(), True)
        members = slice_members(tensors, {name: sensitivity[name] for name in tensors}, slices)
        return {
            name: t + sample_noise(t, "gaussian", noise_scale, step.rng) * perturbed.to(t.device)[members[name]]
            for name, t in tensors.items()
        }

    settings = {"rate": rate, "slices": slices, "noise": "gaussian", "noise_std": noise_scale}
    return Defense(
        parts=(Part("soteria_mixing", settings, SlicedNoise(std=noise_scale), strength="rate"),),
        gradient=(on_gradient,),
    )


def slice_members(tensors: Tensors, sensitivity: dict[str, float], slices: int) -> dict[str, Tensor]:
    """For each element the slice it belongs to, in [0, slices), not falling in the order of ``tensors``.

    Args:
        tensors: by name.
        sensitivity: of each, spread evenly over its elements; all equal weights if it is zero everywhere.
        slices: how many slices share the sum of the sensitivities equally.
    """
    total = sum(sensitivity.values())
    weights = sensitivity if total > 0 else {name: float(t.numel()) for name, t in tensors.items()}
    total = sum(weights.values())
    members, before = {}, 0.0
    for name, t in tensors.items():
        middles = (torch.arange(t.numel(), dtype=torch.float64, device=t.device) + 0.5) / max(1, t.numel())
        position = (before + weights[name] * middles) / total * slices
        members[name] = position.floor().clamp(0, slices - 1).long().view(t.shape)
        before += weights[name]
    return members


def gradient_sensitivity(step: LocalStep, *, directions: int, rng: torch.Generator) -> dict[str, float]:
    """Frobenius norm of d (gradient of a parameter) / d (inputs), by parameter name.

    Estimated by ``directions`` products of forward over reverse mode with independent random signs v:
    E||J v||^2 = ||J||_F^2. Batch-norm layers are in evaluation mode.
    """
    parameters = {name: p.detach() for name, p in step.sent.parameters.items()}

    def loss(values: Tensors, inputs: Tensor) -> Tensor:
        state = ModelState(values, step.sent.buffers)
        batch = Batch(inputs, step.batch.labels)
        return batch_loss(
            step.model, state, batch, batch_norm="eval", loss_scale=step.plan.loss_scale, changes=step.changes
        )[0]

    def gradient(inputs: Tensor) -> Tensors:
        result: Tensors = grad(loss)(parameters, inputs)
        return result

    x = step.batch.inputs
    squares = dict.fromkeys(parameters, 0.0)
    for _ in counted("sensitivity of layers", range(directions)):
        signs = torch.randint(0, 2, x.shape, generator=rng, device=rng.device).to(x) * 2 - 1
        changes: Tensors = jvp(gradient, (x,), (signs,))[1]
        for name, change in changes.items():
            squares[name] += float(change.square().sum()) / directions
    return {name: square**0.5 for name, square in squares.items()}
