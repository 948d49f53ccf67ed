"""Inconsistent models (Pasquini et al. 2022): all clients but one get a dead network without gradient."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fl_privacy.attacks.gradient_inversion.grouping import failed
from fl_privacy.attacks.gradient_inversion.targets import needs_unrolling
from fl_privacy.attacks.malicious.server_attack import LEVELS, ServerAttack, ThreatLevel, expect_whole
from fl_privacy.checks import whole
from fl_privacy.errors import UserError
from fl_privacy.models.gradients import frozen_copy, loss_gradients
from fl_privacy.models.gradients.hooks import leaving, owners
from fl_privacy.models.losses import CROSS_ENTROPY
from fl_privacy.types import Batch, ModelState, Observation, Reconstruction

_DEEP = 1e4  # depth below zero of a dead ReLU's input


@dataclass(frozen=True, kw_only=True)
class Inconsistent(ServerAttack):
    """Sends the model to one client, and a model whose last ReLU never fires to all others.

    In the sum, layers below that ReLU and weights above it then depend only on the one client's data (Pasquini et al.
    2022, section 4). Parameters that the other clients also change, such as biases above the ReLU, are left out.
    ``client``: index of the attacked client, from 0.
    """

    client: int = 0

    level = ThreatLevel.INCONSISTENT
    description = (
        "The server sent one client the model and the others a dead one, so that the mean of all replies is that"
        " client's update."
    )
    reads_sum = True
    reads_images = False

    def __post_init__(self) -> None:
        whole("server.client", self.client, at_least=0, example=0)

    @property
    def only(self) -> int | None:
        return self.client

    def craft(self, model: nn.Module, state: ModelState, client: int) -> ModelState:
        return state if client == self.client else self.dead(model, state)

    def dead(self, model: nn.Module, state: ModelState) -> ModelState:
        """Return ``state`` with only negative outputs before the last ReLU; ``UserError`` without ReLU or bias."""
        expect_whole(model, state, "Inconsistent models")
        images = self.public[:2].to(next(iter(state.parameters.values())))
        relus = {name: module for name, module in model.named_modules() if isinstance(module, nn.ReLU)}
        model.eval()
        with torch.no_grad(), leaving({**owners(model), **relus}) as calls:
            functional_call(model, {**state.parameters, **state.buffers}, (images,))
        places = [place for place, call in enumerate(calls) if call.name in relus]
        before = [call.name for call in calls[: places[-1]] if call.name not in relus] if places else []
        if not before:
            raise UserError(
                "Inconsistent models: a ReLU behind a layer is expected, but the model has none; use"
                " model.activation=relu."
            )
        weight, bias = f"{before[-1]}.weight", f"{before[-1]}.bias"
        if bias not in state.parameters:
            raise UserError(
                f"Inconsistent models: a bias in front of the last ReLU is expected, but {before[-1]} has none; use"
                " model.activation=relu and a model with batch norm or biases."
            )
        own = state.parameters
        killed = {weight: torch.zeros_like(own[weight]), bias: torch.full_like(own[bias], -_DEEP)}
        return ModelState({**own, **killed}, state.buffers)

    def read(self, observation: Observation) -> Reconstruction | Observation:
        if observation.id.client != self.client:
            return failed(
                observation, "The attacked client is expected, but this one got a dead model; set server.client."
            )
        mixed = self.mixed(observation.model, observation.sent)
        tensors = {name: t for name, t in observation.upload.tensors.items() if name not in mixed}
        return replace(observation, upload=replace(observation.upload, tensors=tensors))

    def mixed(self, model: nn.Module, state: ModelState) -> set[str]:
        images = self.public[:2].to(next(iter(state.parameters.values())))
        batch = Batch(images, torch.arange(len(images)))
        found = loss_gradients(model, self.dead(model, state), batch, batch_norm="eval").gradients
        return {name for name, gradient in found.items() if gradient.any()}


NEAR = 1e-3  # share of the bias gradient by which an image's gradient may differ, next to rounding
_MOST_CLASSES = 128  # largest number of labels that are tried: with more, one of them fits by chance
_AT_ONCE = 1024  # images times labels


def leaves_such_a_bias(
    observation: Observation, images: Tensor, rows: Tensor, measured: Tensor, *, bias: str, error: Tensor
) -> Tensor:
    """Return ``True`` (N,) for N images that, with some label, would cause the measured bias gradient.

    Pixels are rounded to 8 bits. All images are accepted if an image's own gradient can't be computed: with batch
    statistics, dropout, several local steps, or too many classes. ``bias``: parameter's name. ``rows`` (N,): index of
    the element of the bias to compare, for each image. ``measured`` (N,): the image's part of that element's gradient,
    a mean over the batch. ``error`` (N,): largest error of ``measured``.
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

    def one(offset: Tensor, image: Tensor, label: Tensor) -> Tensor:
        return loss(functional_call(model, {**values, bias: offset}, (image[None],)), label[None])

    of_labels = vmap(vmap(grad(one), in_dims=(None, None, 0)), in_dims=(None, 0, None))
    whole = ((LEVELS * images.double()).round() / LEVELS).reshape(len(images), *observation.input_shape)
    hits = []
    for some, at, found, near in zip(
        *(torch.split(each, max(1, _AT_ONCE // len(labels))) for each in (whole, rows, measured, error)), strict=True
    ):
        own = of_labels(values[bias], some, labels)[torch.arange(len(some)), :, at]
        own = own * plan.loss_scale / observation.upload.num_examples
        hits.append(((own - found[:, None]).abs() <= (NEAR * found.abs() + near)[:, None]).any(1))
    return torch.cat(hits)
