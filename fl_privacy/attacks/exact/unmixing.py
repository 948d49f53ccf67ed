"""Separate images that a layer's gradient mixes, by reproducing the gradient through the later layers."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_privacy.attacks.attack import timely
from fl_privacy.models.gradients.hooks import leaving
from fl_privacy.models.losses import CROSS_ENTROPY, Loss

_INDEPENDENCE = 0.03  # standard deviation of E in A = (1 + E) A_0, for A_0 found by independence: 30 dB
_DAMPING = 1e-3  # damping of the first step, as a share of the preconditioner
_MOST_DAMPING = 1e3
_TOLERANCE = 1e-3  # residual of a linear system at which iterations stop, as a share of its right side
_MOST_PRODUCTS = 200  # largest number of products with the matrix of a linear system
_PROGRESS = 0.01  # share of the misfit by which a step has to reduce it for another to follow


@dataclass(frozen=True, eq=False)
class Behind:
    """The part of a network after the layer ``path``, for images of ``image_shape`` (C, H, W)."""

    model: nn.Module
    path: str
    image_shape: tuple[int, ...]
    loss: Loss = CROSS_ENTROPY

    def signal(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss's gradient D with respect to the M ``outputs`` (B, M), for classes (B,); differentiable."""
        layer, black = self.model.get_submodule(self.path), outputs.new_zeros(len(outputs), *self.image_shape)
        with torch.enable_grad(), leaving({self.path: layer}, lambda *_: outputs):
            loss = self.loss(self.model(black), labels)
        (found,) = torch.autograd.grad(loss, outputs, create_graph=True)
        return found


@dataclass(frozen=True, eq=False)
class Mixture:
    """Equations for the unmixing matrix A (B, B): a layer's inputs are A R, for a basis R of its gradient's rows."""

    behind: Behind
    # Mixing A (B, B) and a client's scaling s solve s D^T [A, 1] = [G R^T, g] (see cocktail_party.py), where D_i is
    # the gradient with respect to z_i = P^T a_i + b, P = R W^T.
    projected: Tensor  # P (B, M)
    bias: Tensor  # b (M,)
    observed: Tensor  # [G R^T, g] (M, B + 1)
    noise: float  # variance of an element of G

    def signal(self, mixing: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        outputs = (mixing @ self.projected + self.bias).detach().requires_grad_()
        return outputs, self.behind.signal(outputs, labels)


def mixture_of(weight: Tensor, bias: Tensor, layer: tuple[Tensor, Tensor], basis: Tensor, behind: Behind) -> Mixture:
    """Build the equations (:class:`Mixture`) that unmix the inputs of a layer.

    ``weight``, ``bias``: gradients G and g. ``layer``: weight and bias. ``basis``: basis R (B, N) of the rows of G.
    ``behind``: later layers.
    """
    gradient, (values, shift) = weight.double(), layer
    on_basis = gradient @ basis.T
    rest = float(gradient.square().sum() - on_basis.square().sum())
    freedom = (gradient.shape[0] - len(basis)) * (gradient.shape[1] - len(basis))
    return Mixture(
        behind=behind,
        projected=basis @ values.double().T,
        bias=shift.double(),
        observed=torch.cat([on_basis, bias.double()[:, None]], 1),
        noise=max(0.0, rest) / max(1, freedom),
    )


def unmixed_by_network(mixture: Mixture, start: Tensor, labels: Tensor, *, steps: int) -> Tensor:
    """Find the unmixing matrix A (B, B) that reproduces the gradient, in at most ``steps`` steps from ``start``."""
    point = _Point.at(mixture, start, None, labels)
    if not math.isfinite(point.misfit(torch.zeros_like(start), start)):
        return start
    ridge = mixture.noise / _INDEPENDENCE**2 * metric_of_changes(start)
    damping, first = _DAMPING, start
    for _ in timely(range(steps)):
        before, better = point.misfit(ridge, first), None
        while better is None and damping < _MOST_DAMPING:
            moved = point.moved(ridge, first, damping)
            if moved.misfit(ridge, first) < before:
                better = moved
            damping = damping / 10 if better else 10 * damping
        if better is None:
            break
        point = better
        if point.misfit(ridge, first) > (1 - _PROGRESS) * before:
            break
    return point.mixing


def misfit(mixture: Mixture, mixing: Tensor, labels: Tensor) -> float:
    """Return the squared distance of the observed gradient from that for the unmixing matrix ``mixing`` (B, B)."""
    return _Point.at(mixture, mixing, None, labels).misfit(torch.zeros_like(mixing), mixing)


def metric_of_changes(first: Tensor) -> Tensor:
    """Return M (B, B) with <D, D M> = | E |^2 for each change D = E A_0 of the matrix A_0 (``first``)."""
    metric: Tensor = torch.linalg.inv(first.T @ first)
    return metric


@dataclass(frozen=True, eq=False)
class _Point:
    mixture: Mixture
    labels: Tensor
    mixing: Tensor
    scale: Tensor
    outputs: Tensor
    signal: Tensor
    made: Tensor

    @classmethod
    def at(cls, mixture: Mixture, mixing: Tensor, scale: Tensor | None, labels: Tensor) -> "_Point":
        outputs, signal = mixture.signal(mixing, labels)
        made = signal.detach().T @ _with_ones(mixing)  # D^T [A, 1]
        if scale is None:
            scale = (made * mixture.observed).sum() / made.square().sum()
        return cls(mixture, labels, mixing, scale, outputs, signal, made)

    def misfit(self, ridge: Tensor, first: Tensor) -> float:
        left, apart = self.scale * self.made - self.mixture.observed, self.mixing - first
        return float(left.square().sum() + (apart @ ridge * apart).sum())

    def moved(self, ridge: Tensor, first: Tensor, damping: float) -> "_Point":
        size, signal, scale = len(self.mixing), self.signal.detach(), self.scale
        ones, made, projected = _with_ones(self.mixing), self.made, self.mixture.projected

        def down(values: Tensor) -> Tensor:
            by_signal = self._bent(ones @ values.T) @ projected.T + signal @ values[:, :size]
            return _joined(scale * by_signal, (made * values).sum())

        def normal(step: Tensor) -> Tensor:
            mixing, factor = _parted(step, size)
            change = self._bent(mixing @ projected).T @ ones
            change[:, :size] += signal.T @ mixing
            return down(scale * change + factor * made) + _joined(mixing @ ridge, factor * 0)

        own = made.square().sum()
        ours, rows = torch.linalg.eigh(scale.square() * signal @ signal.T)
        theirs, columns = torch.linalg.eigh(ridge)
        values = ours.clamp_min(torch.finfo(ours.dtype).eps * ours[-1])[:, None] + theirs.clamp_min(0)

        def preconditioned(flat: Tensor, values: Tensor, own: Tensor) -> Tensor:
            matrix, number = _parted(flat, size)
            return _joined(rows @ (values * (rows.T @ matrix @ columns)) @ columns.T, own * number)

        slope = down(scale * made - self.mixture.observed) + _joined((self.mixing - first) @ ridge, scale * 0)
        step = _solved(
            lambda one: normal(one) + damping * preconditioned(one, values, own),
            slope,
            lambda one: preconditioned(one, 1 / values, 1 / own) / (1 + damping),
        )
        mixing, factor = _parted(step, size)
        return _Point.at(self.mixture, self.mixing - mixing, self.scale - factor, self.labels)

    def _bent(self, direction: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(self.signal, self.outputs, direction, retain_graph=True)
        return found


def _solved(product: Callable[[Tensor], Tensor], right: Tensor, precondition: Callable[[Tensor], Tensor]) -> Tensor:
    found, rest = torch.zeros_like(right), right
    ahead = precondition(rest)
    direction, size = ahead, rest @ ahead
    enough = _TOLERANCE**2 * size
    for _ in timely(range(_MOST_PRODUCTS)):
        bent = product(direction)
        share = size / (direction @ bent)
        found, rest = found + share * direction, rest - share * bent
        ahead = precondition(rest)
        before, size = size, rest @ ahead
        if not size > enough:
            break
        direction = ahead + size / before * direction
    return found


def _with_ones(mixing: Tensor) -> Tensor:
    return torch.cat([mixing, torch.ones_like(mixing[:, :1])], 1)


def _joined(matrix: Tensor, number: Tensor) -> Tensor:
    return torch.cat([matrix.flatten(), number.reshape(1)])


def _parted(flat: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return flat[:-1].reshape(size, size), flat[-1]
