"""Check that an image from a layer explains the update's bias gradient; a mixture's own gradient differs."""

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fl_privacy.attacks.gradient_inversion.targets import needs_unrolling
from fl_privacy.attacks.malicious.from_layer import LEVELS
from fl_privacy.models.gradients import frozen_copy
from fl_privacy.models.losses import CROSS_ENTROPY
from fl_privacy.types import Observation

NEAR = 1e-3
"""Share of the bias gradient by which an image's may differ, next to rounding."""

_MOST_CLASSES = 128
"""Largest number of labels that are tried: with more, one of them fits by chance."""

_AT_ONCE = 1024
"""Images times labels."""


def leaves_such_a_bias(
    observation: Observation, images: Tensor, rows: Tensor, measured: Tensor, *, bias: str, error: Tensor
) -> Tensor:
    """Return for which images (N, D), rounded to 255ths, some label explains the bias gradient, (N,).

    All are accepted if an image has no computable gradient of its own: with batch statistics, dropout, several local
    steps, or too many classes.

    Args:
        rows: (N,) element of ``bias`` for each.
        measured: (N,) mean gradient there of that image alone.
        error: (N,) largest rounding of ``measured``.
    """
    labels, plan = torch.arange(observation.num_classes, device=images.device), observation.plan
    mixes = needs_unrolling(plan, observation.upload.num_examples, "unroll")
    for module in observation.model.modules():
        by_batch = isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and plan.batch_norm != "eval"
        mixes |= by_batch or (isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0)
    if not len(images) or len(labels) > _MOST_CLASSES or mixes:
        return torch.ones(len(images), dtype=torch.bool, device=images.device)
    values = {name: value.double() for name, value in observation.sent.parameters.items()}
    model = frozen_copy(observation.model, observation.sent, plan, device=images.device, dtype=torch.float64)
    loss = observation.loss or CROSS_ENTROPY
    rest = {name: value for name, value in values.items() if name != bias}

    def one(offset: Tensor, image: Tensor, label: Tensor) -> Tensor:
        outputs = functional_call(model, {**rest, bias: offset}, (image[None],))
        return loss(outputs, label[None])

    of_labels = vmap(vmap(grad(one), in_dims=(None, None, 0)), in_dims=(None, 0, None))
    whole = ((LEVELS * images.double()).round() / LEVELS).reshape(len(images), *observation.input_shape)
    told = []
    for some, at, found, near in zip(
        *(torch.split(each, max(1, _AT_ONCE // len(labels))) for each in (whole, rows, measured, error)), strict=True
    ):
        own = of_labels(values[bias], some, labels)[torch.arange(len(some)), :, at]
        own = own * plan.loss_scale / observation.upload.num_examples
        told.append(((own - found[:, None]).abs() <= (NEAR * found.abs() + near)[:, None]).any(1))
    return torch.cat(told)
