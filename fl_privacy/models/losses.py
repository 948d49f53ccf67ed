"""Losses of clients: by name, of PyTorch, or any function."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.checks import one_of
from fl_privacy.errors import UserError, reason_of

TargetKind = Literal["classes", "bits", "values"]
"""Targets for outputs (B, K): one of K ``classes``, K ``bits``, or K ``values``."""


@dataclass(frozen=True)
class Loss:
    """A client's loss, which maps the outputs and labels of a batch to a scalar."""

    name: str
    function: Callable[[Tensor, Tensor], Tensor]  # function (outputs (B, K), targets) -> scalar
    targets: TargetKind = "classes"
    takes: Literal["indices", "rows", "both"] = "both"  # targets: classes (B,), rows (B, K), or both
    dtype: torch.dtype | None = None  # only type that ``function`` supports; ``None`` for any

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the scalar loss of outputs (B, K) for labels: classes (B,), or rows (B, K) such as probabilities."""
        if self.takes == "rows" and not labels.is_floating_point():
            classes = torch.arange(outputs.shape[1], device=labels.device)
            labels = (labels.unsqueeze(-1) == classes).to(outputs.dtype)  # vmap forbids one_hot
        given = outputs if self.dtype is None else outputs.to(self.dtype)
        return self.function(given, labels.to(given.dtype) if labels.is_floating_point() else labels).to(outputs.dtype)

    def answers(self, labels: Tensor) -> Tensor:
        """Convert class probabilities (..., K) to classes (...); other labels are returned unchanged."""
        return labels.argmax(-1) if labels.is_floating_point() and self.targets == "classes" else labels

    def expected(self, outputs: Tensor) -> Tensor:
        """Return the targets (..., K) that outputs (..., K) predict, such as class probabilities."""
        if self.targets == "classes":
            return outputs.softmax(-1)
        return outputs.sigmoid() if self.targets == "bits" else outputs


CROSS_ENTROPY = Loss("cross entropy", F.cross_entropy)  # mean over the batch, by softmax

BINARY_CROSS_ENTROPY = Loss("binary cross entropy", F.binary_cross_entropy_with_logits, targets="bits", takes="rows")
"""Mean binary cross entropy of sigmoids, over batch and outputs."""

SQUARED_ERROR = Loss("squared error", F.mse_loss, targets="values", takes="rows")  # mean over batch and outputs
NAMED_LOSSES = {"cross_entropy": CROSS_ENTROPY, "bce": BINARY_CROSS_ENTROPY, "mse": SQUARED_ERROR}

_TARGETS: dict[TargetKind, tuple[object, ...]] = {
    "bits": (
        *(nn.BCEWithLogitsLoss, nn.BCELoss, nn.MultiLabelSoftMarginLoss),
        *(F.binary_cross_entropy_with_logits, F.binary_cross_entropy),
    ),
    "values": (
        *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss),
        *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
    ),
}
"""Kind of targets -> PyTorch's losses with such targets."""

LossLike = str | nn.Module | Callable[[Tensor, Tensor], Tensor] | Loss
"""Name in ``NAMED_LOSSES``, loss of PyTorch, or function (outputs (B, K), labels) -> scalar."""

_PLAIN: tuple[object, ...] = (F.cross_entropy, F.nll_loss)  # ``nll_loss`` of log probabilities is their cross entropy
_TINY_TRIAL = 2  # number of examples in the trial of an unknown function


def is_plain(loss: Loss) -> bool:
    """Return whether ``loss`` is the mean cross entropy without options."""
    return loss is CROSS_ENTROPY


def loss_of(given: LossLike, num_classes: int, like: Tensor) -> Loss:
    """Convert ``given`` to a ``Loss`` on the device of ``like``; ``UserError`` unless it maps K outputs to a scalar."""
    if isinstance(given, Loss):
        return given
    if isinstance(given, str):
        one_of("loss, unless a function,", given, NAMED_LOSSES)
        return NAMED_LOSSES[given]
    plain = type(given) in (nn.CrossEntropyLoss, nn.NLLLoss) and getattr(given, "weight", None) is None
    plain = plain and not getattr(given, "label_smoothing", 0.0) and getattr(given, "reduction", "") == "mean"
    if plain or given in _PLAIN:
        return CROSS_ENTROPY
    if not callable(given) or isinstance(given, type):
        got = f"the class {given.__name__}; call it" if isinstance(given, type) else f"{given!r:.80}; try bce"
        raise UserError(f"loss is expected to be a name or a function (outputs, labels) -> scalar, but got {got}.")
    return _tried(given, num_classes, like)


@dataclass(frozen=True, eq=False)
class _InEachType:
    module: nn.Module

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        held = next(value.dtype for value in self.module.state_dict().values() if value.is_floating_point())
        same = self.module if held == outputs.dtype else copy.deepcopy(self.module).to(outputs.dtype)
        return cast(Tensor, same(outputs, targets))


def _tried(given: Callable[[Tensor, Tensor], Tensor], num_classes: int, like: Tensor) -> Loss:
    moved = given
    if isinstance(given, nn.Module):
        moved = copy.deepcopy(given).to(device=like.device)
        if any(value.is_floating_point() for value in moved.state_dict().values()):
            moved = _InEachType(moved)
    size = _TINY_TRIAL + (num_classes == _TINY_TRIAL)
    outputs = torch.rand(size, num_classes, generator=torch.Generator().manual_seed(0)).to(like)
    indices = torch.zeros(len(outputs), dtype=torch.long, device=like.device)
    rows = torch.zeros_like(outputs)
    rows[:, 0] = 1
    what = type(given) if isinstance(given, nn.Module) else given
    known = next((kind for kind, losses in _TARGETS.items() if what in losses), None)
    name = getattr(given, "__name__", type(given).__name__)
    of_rows, name = _refused(moved, outputs, rows), name if name.isidentifier() else "the function given"
    if num_classes == 1 and (known is None or of_rows is not None):
        return _of_one_output(moved, outputs, name, of_rows)
    of_indices = _refused(moved, outputs, indices) if known is None else "it takes rows"
    if of_indices is not None and of_rows is not None:
        raise _unusable(name, num_classes, of_indices if known is None else of_rows)
    taken = [rows.double()] * (of_rows is None) + [indices] * (of_indices is None)
    dtype = None if all(_refused(moved, outputs.double(), each) is None for each in taken) else like.dtype
    if of_indices is None:
        return Loss(name, moved, takes="indices" if of_rows else "both", dtype=dtype)
    return Loss(name, moved, targets=known or _kind(moved, outputs), takes="rows", dtype=dtype)


def _of_one_output(given: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, name: str, of_rows: str | None) -> Loss:
    def flat(made: Tensor, targets: Tensor) -> Tensor:
        return given(made, targets.squeeze(1))

    function = given if of_rows is None else flat
    if of_rows is not None and (reason := _refused(flat, outputs, torch.zeros_like(outputs))) is not None:
        raise _unusable(name, 1, reason)
    return Loss(name, function, targets=_kind(function, outputs), takes="rows")


def _unusable(name: str, num_classes: int, reason: str) -> UserError:
    return UserError(
        f"loss is expected to make a scalar of outputs (B, {num_classes}) and labels, but {name} does not ({reason});"
        " let it return the mean over the batch."
    )


def _refused(given: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, labels: Tensor) -> str | None:
    leaf = outputs.detach().requires_grad_()
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = given(leaf, labels)
            if not isinstance(value, Tensor) or value.dim() != 0:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                return f"it gives {got}"
            (slope,) = torch.autograd.grad(value, leaf, allow_unused=True)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        return reason_of(error)
    return None if slope is not None else "it does not depend on the outputs"


def _kind(given: Callable[[Tensor, Tensor], Tensor], outputs: Tensor) -> TargetKind:
    leaf, target = torch.full_like(outputs, 100.0).requires_grad_(), torch.full_like(outputs, 3.0)
    try:
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(given(leaf, target), leaf)
    except (RuntimeError, ValueError, TypeError):
        return "bits"
    return "values" if float(slope.sum()) > 0 else "bits"
