"""Gradients of one batch or of many attacked updates (victims) at once, and copies of models for them."""

import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, TypedDict, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import _SpectralNorm

from fl_privacy.models.gradients.convolution import pads_with_zeros, separated_copy
from fl_privacy.models.losses import CROSS_ENTROPY, Loss, is_plain
from fl_privacy.models.unwrap_model import detached_copy, without_checkpointing
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors

LossFunction = Callable[[Tensor, Tensor], Tensor]  # function (logits (B, K), labels (B,) or (B, K)) -> scalar

LossChange = Callable[[nn.Module, Tensors, Batch], AbstractContextManager[Callable[[Tensor], Tensor]]]
"""Function (model, values by name, batch) -> context around the forward pass, which may observe modules, and yields a
function (loss) -> changed loss."""


@dataclass(frozen=True, eq=False)
class GradientResult:
    """Loss of a batch, its gradients by parameter name, and the buffers after the forward pass."""

    loss: Tensor
    gradients: Tensors
    buffers: Tensors


def set_mode(model: nn.Module, batch_norm: Literal["train", "eval"] | None) -> None:
    """Set ``model`` to training mode, with batch norm in the mode ``batch_norm``; ``None`` changes nothing."""
    if batch_norm is None:
        return
    model.train()
    if batch_norm == "eval":
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()


def drops_out(model: nn.Module) -> bool:
    """Return whether ``model`` has dropout with a rate above 0."""
    return any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules())


class LossOptions(TypedDict, total=False):
    """Keyword arguments of :func:`batch_loss`."""

    batch_norm: Literal["train", "eval"] | None
    loss_scale: float
    loss_function: LossFunction
    changes: Sequence[LossChange]


@without_checkpointing()
def batch_loss(
    model: nn.Module,
    state: ModelState,
    batch: Batch,
    *,
    batch_norm: Literal["train", "eval"] | None = "train",
    loss_scale: float = 1.0,
    loss_function: LossFunction = F.cross_entropy,
    changes: Sequence[LossChange] = (),
) -> tuple[Tensor, Tensors]:
    """Return ``loss_scale`` times the mean loss of ``batch`` at ``state``, and the buffers after the pass.

    ``batch_norm``: mode of batch norm; ``None`` keeps the model's. ``changes``: a defense's changes of the loss.
    """
    set_mode(model, batch_norm)
    buffers = {name: b.clone() for name, b in state.buffers.items()}
    values = {**state.parameters, **buffers}
    with ExitStack() as spanned:
        changed = [spanned.enter_context(change(model, values, batch)) for change in changes]
        loss = loss_function(functional_call(model, values, (batch.inputs,)), batch.labels)
        for change in changed:
            loss = change(loss)
    return loss_scale * loss, buffers


def loss_gradients(
    model: nn.Module, state: ModelState, batch: Batch, *, create_graph: bool = False, **options: Unpack[LossOptions]
) -> GradientResult:
    """Return loss and buffers of a pass of ``batch``, and gradients with respect to all parameters of ``state``.

    Unused parameters have zero gradients. ``create_graph`` allows differentiation with respect to the inputs.
    """
    leaves = {name: p if p.requires_grad else p.detach().requires_grad_() for name, p in state.parameters.items()}
    with torch.enable_grad():
        loss, buffers = batch_loss(model, ModelState(leaves, state.buffers), batch, **options)
        gradients = torch.autograd.grad(
            loss, list(leaves.values()), create_graph=create_graph, allow_unused=True, materialize_grads=True
        )
    if not create_graph:
        loss = loss.detach()
    # An embedding may give a sparse gradient, which most of PyTorch does not support.
    dense = [gradient.to_dense() for gradient in gradients]
    return GradientResult(loss, dict(zip(leaves, dense, strict=True)), buffers)


# PyTorch has no batching rule for recurrent layers; users who attack them cannot change that.
warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")


@dataclass(frozen=True, eq=False)
class VictimModel:
    """Model sent to the clients (victims) that are attacked together, with the plan and loss of their training."""

    model: nn.Module
    names: Sequence[str]  # parameters whose gradients are computed
    plan: LocalPlan
    hidden: str | None = None  # name of the linear layer's weight whose inputs get further gradients from a secret loss
    loss: Loss = CROSS_ENTROPY


class VictimGradients(ABC):
    """Function from V victims' inputs (V, B, C, H, W) and labels (V, B) or (V, B, K) to gradients (V, *shape) by name.

    It is differentiable with respect to the inputs and soft labels.
    """

    @abstractmethod
    def __init__(self, victim_model: VictimModel) -> None: ...

    @abstractmethod
    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensors:
        """Return the victims' gradients (V, *shape) by name."""

    def under(self, victim_model: VictimModel) -> Self:
        return type(self)(victim_model)


class VictimLoss:
    """Loss of one victim's batch as a function of parameters by name."""

    def __init__(self, victim_model: VictimModel) -> None:
        self._model, self._names, _ = separated_copy(victim_model.model)
        self._scale, self._of_outputs = victim_model.plan.loss_scale, victim_model.loss

    def parameters(self) -> dict[str, Tensor]:
        return {name: self._model.get_parameter(own) for name, own in self._names.items()}

    def __call__(self, parameters: Tensors, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the scalar loss; parameters not given keep the values that the victims were sent."""
        renamed = {self._names[name]: value for name, value in parameters.items()}
        return self._scale * self._of_outputs(functional_call(self._model, renamed, (inputs,)), labels)


_COLUMNS = 1 << 18
"""Most values under the kernel at all positions for which matrix products are faster than a grouped convolution."""


def _outputs_of_victims(layer: Any, inputs: Tensor) -> Tensor:
    # inputs (V B, ...) of V victims, whose weights (V, ...) differ
    weight = layer.weight
    count, outputs = weight.shape[:2]
    bias = weight.new_zeros(count, outputs) if layer.bias is None else layer.bias
    if isinstance(layer, nn.Linear):
        found = torch.baddbmm(bias[:, None], inputs.reshape(count, -1, inputs.shape[-1]), weight.mT)
        return found.reshape(*inputs.shape[:-1], outputs)
    places = (layer.stride, layer.padding, layer.dilation)
    sizes = zip(inputs.shape[2:], layer.kernel_size, *places, strict=True)
    size = [(n + 2 * pad - gap * (kernel - 1) - 1) // stride + 1 for n, kernel, stride, pad, gap in sizes]
    if len(inputs) * weight[0, 0].numel() * math.prod(size) > _COLUMNS:
        stacked = inputs.reshape(count, -1, *inputs.shape[1:]).transpose(0, 1).flatten(1, 2)
        found = F.conv2d(stacked, weight.flatten(0, 1), bias.flatten(), *places, groups=count)
        return found.reshape(-1, count, outputs, *size).transpose(0, 1).flatten(0, 1)
    columns = F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    if len(inputs) == count:
        found = torch.baddbmm(bias[..., None], weight.flatten(2), columns)
    else:
        found = weight.flatten(2)[:, None] @ columns.reshape(count, -1, *columns.shape[1:]) + bias[:, None, :, None]
    return found.reshape(len(inputs), outputs, *size)


JoinedLoss = Callable[[Tensors, Tensor, Tensor], Tensor]
"""Function (parameters (V, *shape), inputs (V, B, ...), labels (V, B) or (V, B, K)) -> sum of V victims' losses."""


def joined_loss(victim_model: VictimModel) -> JoinedLoss | None:
    """Return a function (parameters (V, *shape) by name, inputs, labels) -> loss of V victims in one forward pass.

    ``None`` unless all parameters are of linear layers and convolutions, and the loss is cross entropy.
    """
    copied = copy.deepcopy(victim_model.model)
    for module in copied.modules():
        convolves = type(module) is nn.Conv2d and module.groups == 1 and pads_with_zeros(module)
        if type(module) is nn.Linear or convolves:
            module.forward = partial(_outputs_of_victims, module)
        elif next(module.parameters(recurse=False), None) is not None:
            return None

    def loss(parameters: Tensors, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = functional_call(copied, dict(parameters), (inputs.flatten(0, 1),))
        scale = victim_model.plan.loss_scale / inputs.shape[1]
        return scale * F.cross_entropy(logits, labels.flatten(0, 1), reduction="sum")

    return loss if is_plain(victim_model.loss) else None


class Vectorized(VictimGradients):
    """Computes all victims' gradients with ``vmap`` of one victim's loss."""

    def __init__(self, victim_model: VictimModel) -> None:
        self._loss = VictimLoss(victim_model)
        parameters = self._loss.parameters()
        self._parameters = {name: parameters[name] for name in victim_model.names}

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensors:
        return cast(Tensors, vmap(grad(self._loss), in_dims=(None, 0, 0))(self._parameters, inputs, labels))


class OneByOne(VictimGradients):
    """Computes the gradients of one victim after another with :func:`loss_gradients`."""

    def __init__(self, victim_model: VictimModel) -> None:
        self._victim_model = victim_model
        self._state = ModelState(dict(victim_model.model.named_parameters()), dict(victim_model.model.named_buffers()))

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensors:
        one, scale = self._victim_model, self._victim_model.plan.loss_scale
        how: dict[str, Any] = {"batch_norm": None, "loss_scale": scale, "loss_function": one.loss}
        how["create_graph"] = torch.is_grad_enabled()
        pairs = zip(inputs, labels, strict=True)
        victims = [loss_gradients(one.model, self._state, Batch(*pair), **how).gradients for pair in pairs]
        return {name: torch.stack([gradient[name] for gradient in victims]) for name in one.names}


@contextmanager
def plain_attention() -> Iterator[None]:
    """Let attention use plain operations, which support ``vmap`` and repeated differentiation, within the context."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def differentiable_twice() -> Iterator[None]:
    """Within the context, let attention and convolutions use twice differentiable operations of full precision."""
    cudnn = torch.backends.cudnn
    exact = cudnn.flags(
        enabled=cudnn.enabled, benchmark=cudnn.benchmark, deterministic=cudnn.deterministic, allow_tf32=False
    )
    with torch.enable_grad(), plain_attention(), exact:
        yield


def frozen_copy(
    model: nn.Module, sent: ModelState, plan: LocalPlan, *, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """Return a frozen copy of ``model`` with the values ``sent``, for an attack to differentiate through it.

    Layers are in the modes of the client's ``plan``, but dropout is off, and spectral norm runs no power iteration. No
    layer works in place; hard sigmoids have second derivatives.
    """
    copied = detached_copy(model).to(device=device, dtype=dtype).train(plan.mode == "train").requires_grad_(False)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            parameter.copy_(sent.parameters[name])
        for name, buffer in copied.named_buffers():
            if name in sent.buffers:
                buffer.copy_(sent.buffers[name])
    for module in copied.modules():
        norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if isinstance(module, _SpectralNorm) or (norm and plan.batch_norm == "eval"):
            module.eval()
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
        elif isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.Hardsigmoid):
            module.forward = lambda input: F.relu6(input + 3) / 6  # type: ignore[method-assign]
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]
    return copied
