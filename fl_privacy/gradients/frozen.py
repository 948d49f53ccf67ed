"""The frozen model that gradients of many victims are computed with, and how it is differentiated twice."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import _SpectralNorm

from fl_privacy.plain_models import detached_copy
from fl_privacy.types import LocalPlan, ModelState


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

    Batch norm is as the plan says: ``train`` uses the statistics of the batch and nothing else. All else is in the
    plan's ``mode``. Dropout is off, since its masks are the client's secret, and a spectral norm no longer iterates;
    nothing works in place, so that every activation can be read.
    """
    copied = detached_copy(model).to(device=device, dtype=dtype).train(plan.mode == "train").requires_grad_(False)
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
        elif isinstance(module, _SpectralNorm):
            module.eval()
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]
    return copied


def _set_batch_norm(module: nn.modules.batchnorm._BatchNorm, plan: LocalPlan) -> None:
    if plan.batch_norm == "eval":
        module.eval()
        return
    module.track_running_stats = False
    module.running_mean = module.running_var = module.num_batches_tracked = None
