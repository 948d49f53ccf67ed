"""Infer the shift and scale of batch norm in front of the first layer from the running statistics sent back.

After one step they are (1 - m) times those sent plus m times those of the batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_privacy.attacks.exact.first_layer import FirstLayer, NotFullyConnectedError, find_first_layer, probe_first_layer
from fl_privacy.models.gradients.choose_method import number_of_steps
from fl_privacy.types import ModelState, Observation


@dataclass(frozen=True, eq=False)
class NormalizedLayer(FirstLayer):
    """A first fully connected layer behind batch norm in training mode.

    Attributes:
        center: (N,) mean input.
        spread: (N,) distance of two examples from it; ``None`` if several values share a mean and a variance.
    """

    center: Tensor
    spread: Tensor | None


def find_normalized_layer(observation: Observation) -> NormalizedLayer | None:
    """Find the layer behind batch norm; ``None`` without it, or if its batch is not known."""
    plan, sent, shape = observation.plan, observation.assumed(), observation.input_shape
    size = observation.upload.num_examples
    if plan.batch_norm != "train" or (plan.shares != "gradient" and number_of_steps(size, plan) != 1):
        return None
    try:
        first = probe_first_layer(observation.model, sent, shape)
    except NotFullyConnectedError:
        return None
    norm = first.module
    if not isinstance(norm, nn.modules.batchnorm._BatchNorm) or not first.one_by_one or norm.running_var is None:
        return None
    names = [f"{first.name}.running_mean", f"{first.name}.running_var"]
    if not all(name in sent.buffers and name in observation.upload.buffers for name in names):
        return None
    share = norm.momentum
    if share is None:
        share = 1 / (float(sent.buffers[f"{first.name}.num_batches_tracked"]) + 1)
    mean, variance = (
        (observation.upload.buffers[name].double() - (1 - share) * sent.buffers[name].double()) / share
        for name in names
    )
    values = size * first.random.numel() // len(mean)
    variance = (variance * (values - 1) / values).clamp_min(0)
    found = dict(zip(names, (each.to(sent.buffers[names[0]]) for each in (mean, variance)), strict=True))
    state = ModelState(sent.parameters, {**sent.buffers, **found})
    layer = find_first_layer(observation.model, state, shape, fixed_norms=True)
    weight = sent.parameters.get(f"{first.name}.weight", torch.ones_like(mean)).double()
    bias = sent.parameters.get(f"{first.name}.bias", torch.zeros_like(mean)).double()
    spread = weight * (variance / (variance + norm.eps)).sqrt()
    each = first.random.numel() // len(mean)
    return NormalizedLayer(
        *(layer.weight, layer.bias, layer.shift, layer.scale),
        center=bias.repeat_interleave(each),
        spread=spread if each == 1 else None,
    )


def two_examples(layer: NormalizedLayer, weight: Tensor, bias: Tensor) -> Tensor | None:
    """Solve for two inputs (2, N), the center plus and minus the spread, by the signs of the gradient.

    Args:
        weight, bias: gradients (M, N) and (M,).
    """
    if layer.spread is None:
        return None
    apart = weight.double() - bias.double()[:, None] * layer.center
    direction = torch.linalg.svd(apart, full_matrices=False)[2][0]
    off = direction.sign() * layer.spread.abs()
    return torch.stack([layer.center + off, layer.center - off])


def with_the_bias(layer: FirstLayer, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the weight's gradient (M, N), joined with the bias's (M, 1) behind batch norm in training mode.

    Examples relative to their mean take one from the rank of the weight's gradient.
    """
    return torch.cat([weight, bias[:, None]], 1) if isinstance(layer, NormalizedLayer) else weight
