"""Labels of any loss from the output layer's gradient."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.models import Rest
from fl_privacy.models.gradients.hooks import leaving
from fl_privacy.models.losses import Loss
from fl_privacy.types import Tensors

OutputNames = tuple[str, str | None]
"""Names of the weight (K, F) and the bias (K,) of a model's last linear layer."""

_FITS = 1e-3
"""Share of the output layer's gradient that labels may leave unexplained."""

_PROBABILITY = 3e-4
"""Length added to slopes, since a probability near 0 or 1 is known no better than its rounding."""

_WHOLE = 1e-3
"""Largest distance of a probability from 0 or 1 to be rounded."""

_TRIALS = 32
"""Images of noise that stand for a batch whose labels are counted, with each of two labels."""


@dataclass(frozen=True, eq=False)
class Head:
    """Outputs (B, K) of the output layer, ``leaf``, and of the network, with their graph."""

    leaf: Tensor
    outputs: Tensor

    @classmethod
    def of(cls, network: nn.Module, inputs: Tensor, path: str, layer: nn.Module) -> "Head":
        """Run ``network`` on ``inputs``, and keep the graph behind its output ``layer``."""
        with torch.no_grad(), leaving({path: layer}) as calls:
            network(inputs)
        leaf = calls[-1].output.detach().requires_grad_()
        with torch.enable_grad(), leaving({path: layer}, lambda *_: leaf):
            outputs = network(inputs)
        return cls(leaf, outputs)

    def slopes(self, loss: Loss, labels: Tensor) -> Tensor:
        """Return the gradient (B, K) of the batch's loss by the layer's outputs."""
        with torch.enable_grad():
            (found,) = torch.autograd.grad(loss(self.outputs, labels), self.leaf, retain_graph=True)
        return found


def labels_behind(head: Head, loss: Loss, slopes: Tensor) -> tuple[Tensor, float]:
    """Solve for labels (B,) or rows (B, K) that give ``slopes`` (B, K), and return the share left unexplained.

    Classes are found by the direction of their slopes alone, so that class weights and clipping do no harm. Rows solve
    linear equations, since usual losses are linear in their targets.
    """
    found: list[tuple[Tensor, float]] = []
    if loss.targets == "classes":
        found.append(_best_classes(head, loss, slopes))
        if found[0][1] < _FITS or loss.takes == "indices":
            return found[0]
    rows = _rows(head, loss, slopes)
    length = float(slopes.norm()) + _PROBABILITY
    found.append((rows, float((head.slopes(loss, rows) - slopes).norm()) / length))
    return min(found, key=lambda one: one[1])


def _best_classes(head: Head, loss: Loss, slopes: Tensor) -> tuple[Tensor, float]:
    """Return the class (B,) of each example, and the largest share left unexplained."""
    size, number = slopes.shape
    apart = []
    for label in range(number):
        own = head.slopes(loss, torch.full((size,), label, device=slopes.device))
        apart.append(1 - F.cosine_similarity(own.double(), slopes.double(), dim=1, eps=1e-30))
    least, classes = torch.stack(apart, 1).min(1)
    return classes, float((2 * least.clamp_min(0)).sqrt().max())


def _rows(head: Head, loss: Loss, slopes: Tensor) -> Tensor:
    """Solve for targets (B, K); those of classes add up to 1."""
    size, number = slopes.shape
    zeros = slopes.new_zeros(size, number)
    base = head.slopes(loss, zeros)
    if loss.targets != "classes":
        change = head.slopes(loss, zeros + 1) - base
        rows = (slopes - base) / torch.where(change.abs() > 0, change, 1)
        near = loss.targets == "bits" and bool(((rows - rows.round()).abs() < _WHOLE).all())
        return rows.round() if near else rows
    changes = []
    for label in range(number):
        one = zeros.clone()
        one[:, label] = 1
        changes.append(head.slopes(loss, one) - base)
    system = torch.cat([torch.stack(changes, 2), slopes.new_ones(size, 1, number)], 1).double().cpu()
    right = torch.cat([slopes - base, slopes.new_ones(size, 1)], 1).double().cpu()
    solved: Tensor = torch.linalg.lstsq(system, right[:, :, None], driver="gelsd").solution[:, :, 0].clamp_min(0)
    return (solved / solved.sum(1, keepdim=True)).to(slopes)


@dataclass(frozen=True, eq=False)
class SingleExample:
    """The output layer's gradient of one example: head of its features, and slopes (1, K)."""

    head: Head
    slopes: Tensor

    @classmethod
    def of(
        cls, model: nn.Module, shape: tuple[int, ...], layer: OutputNames, gradient: Tensors
    ) -> "SingleExample | None":
        """Build it from the unscaled ``gradient``; ``None`` if that is incomplete or not of one example.

        Weight and bias have the gradients s h^T and s, which give the features h.
        """
        weight, bias = layer
        if bias is None or not {weight, bias} <= gradient.keys():
            return None
        whole, slope = gradient[weight], gradient[bias]
        if not bool(slope.any()):
            return None
        features = whole.T @ slope / slope.square().sum()
        if float((whole - slope[:, None] * features).norm()) > _FITS * float(whole.norm()):
            return None
        path = weight.rpartition(".")[0]
        head = Head.of(Rest(model, path, shape), features[None], path, model.get_submodule(path))
        return cls(head, slope[None]) if head.leaf.shape == (1, len(slope)) else None


def counted_labels(
    model: nn.Module, loss: Loss, shape: tuple[int, ...], layer: OutputNames, *, evidence: Tensor, size: int
) -> Tensor:
    """Find labels (B,), sorted, whose summed slopes point in the direction of ``evidence`` (K,).

    Each class has the slopes of noise; labels are added, then changed, one by one. Lengths do not count, since class
    weights change them.
    """
    each = _slopes_by_class(model, loss, shape, layer).to(evidence)
    labels = list[int]()
    for _ in range(size):
        labels.append(_best_addition(each, labels, evidence))
    for _ in range(2):
        for place in range(size):
            rest = labels[:place] + labels[place + 1 :]
            labels = [*rest[:place], _best_addition(each, rest, evidence), *rest[place:]]
    return torch.tensor(sorted(labels), device=evidence.device)


def _best_addition(each: Tensor, labels: Sequence[int], evidence: Tensor) -> int:
    total = each + each[list(labels)].sum(0)
    return int(F.cosine_similarity(total, evidence[None], dim=1, eps=1e-30).argmax())


def _slopes_by_class(model: nn.Module, loss: Loss, shape: tuple[int, ...], layer: OutputNames) -> Tensor:
    """Return mean slopes (K, K) of an example of each class, in a common unit."""
    like = next(model.parameters())
    noise = torch.rand((2 * _TRIALS, *shape), generator=torch.Generator().manual_seed(0)).to(like)
    path = layer[0].rpartition(".")[0]
    head, found = Head.of(model, noise, path, model.get_submodule(path)), []
    for label in range(head.leaf.shape[1]):
        labels = torch.zeros(2 * _TRIALS, dtype=torch.long, device=like.device)
        labels[:_TRIALS] = label
        slopes = head.slopes(loss, labels)
        own, first = slopes[:_TRIALS].mean(0), slopes[_TRIALS:].mean(0)
        found.append(own / first.norm().clamp_min(torch.finfo(like.dtype).tiny))  # a batch may normalize its weights
    return torch.stack(found)
