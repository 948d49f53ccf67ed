"""What computes the victims' gradients, and the frozen model it works on."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fl_privacy.types import LocalPlan, ModelState, Tensors


@dataclass(frozen=True, eq=False)
class Setting:
    """What all victims of a group share.

    Attributes:
        model: frozen, in the mode of the plan, with the values sent.
        names: the tensors that were uploaded and are to be matched.
        plan: of the clients.
        secret: weight of the linear layer into whose input a loss that nobody else knows sends gradients.
    """

    model: nn.Module
    names: Sequence[str]
    plan: LocalPlan
    secret: str | None = None


class VictimGradients(ABC):
    """(inputs (V, B, C, H, W), labels (V, B) or (V, B, K)) -> gradient (V, *shape) of each tensor.

    It can be differentiated by the inputs and by soft labels.
    """

    @abstractmethod
    def __init__(self, setting: Setting) -> None: ...

    @abstractmethod
    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensors:
        """Gradients by name."""

    def under(self, setting: Setting) -> Self:
        """The same way of computing, for the same model in another setting."""
        return type(self)(setting)


@contextmanager
def differentiable_twice() -> Iterator[None]:
    """Attention by plain operations, since the fused ones have no second derivative; convolutions in full precision."""
    cudnn = torch.backends.cudnn
    exact = cudnn.flags(
        enabled=cudnn.enabled, benchmark=cudnn.benchmark, deterministic=cudnn.deterministic, allow_tf32=False
    )
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), exact:
        yield


def frozen_copy(
    model: nn.Module, sent: ModelState, plan: LocalPlan, *, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """A copy of ``model`` with the values ``sent`` that no longer trains.

    Batch norm is as the plan says: ``train`` uses the statistics of the batch and nothing else. Dropout is off, since
    its masks are the client's secret; nothing works in place, so that every activation can be read.
    """
    copied = copy.deepcopy(model).to(device=device, dtype=dtype).train().requires_grad_(False)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            parameter.copy_(sent.parameters[name])
        for name, buffer in copied.named_buffers():
            if name in sent.buffers:
                buffer.copy_(sent.buffers[name])
    for module in copied.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            _set_batch_norm(module, plan)
        elif isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]
    return copied


def _set_batch_norm(module: nn.modules.batchnorm._BatchNorm, plan: LocalPlan) -> None:
    if plan.batch_norm == "eval":
        module.eval()
        return
    module.track_running_stats = False
    module.running_mean = module.running_var = module.num_batches_tracked = None
