"""Whether what was read of a layer would have left in its bias just what the update has there.

A mixture of images is an image as well, whose own gradient is another than the sum of theirs.
"""

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fl_privacy.attacks.gradient_inversion.targets import needs_unrolling
from fl_privacy.attacks.malicious.from_layer import LEVELS
from fl_privacy.models.gradients import frozen_copy
from fl_privacy.models.losses import CROSS_ENTROPY
from fl_privacy.types import Observation

NEAR = 1e-3
"""Share of its bias gradient by which that of an image may differ, beside what rounding did."""

_MOST_CLASSES = 128
"""Labels that are tried: with more, one of them fits by chance."""

_AT_ONCE = 1024
"""Images times labels."""


def leaves_such_a_bias(
    observation: Observation, images: Tensor, rows: Tensor, measured: Tensor, *, bias: str, error: Tensor
) -> Tensor:
    """Say for which images (N, D) some label's gradient of ``bias`` at ``rows`` (N,) is ``measured`` (N,), as (N,).

    An image is taken at the whole 255ths next to it. All are told where an image has no gradient of its own that could
    be computed: behind batch norm by the batch, dropout, several local steps, or of a model with too many classes.

    Args:
        observation: of the update.
        images: that seem to be single ones.
        rows: the element of ``bias`` in which each was found.
        measured: the mean gradient there, of that image alone.
        bias: name of the layer's.
        error: (N,) how far rounding may have moved ``measured``.
    """
    everything = torch.ones(len(images), dtype=torch.bool, device=images.device)
    labels = torch.arange(observation.num_classes, device=images.device)
    if not len(images) or len(labels) > _MOST_CLASSES or not _each_on_its_own(observation):
        return everything
    values = {name: value.double() for name, value in observation.sent.parameters.items()}
    model = frozen_copy(
        observation.model, observation.sent, observation.plan, device=images.device, dtype=torch.float64
    )
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
        own = own * observation.plan.loss_scale / observation.upload.num_examples
        told.append(((own - found[:, None]).abs() <= (NEAR * found.abs() + near)[:, None]).any(1))
    return torch.cat(told)


def _each_on_its_own(observation: Observation) -> bool:
    """Say whether the update is the mean of what single examples give."""
    plan, modules = observation.plan, [*observation.model.modules()]
    if needs_unrolling(plan, observation.upload.num_examples, "unroll"):
        return False
    by_batch = any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in modules) and plan.batch_norm != "eval"
    drops = any(isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.p > 0 for m in modules)
    return not by_batch and not drops
