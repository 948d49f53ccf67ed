"""Solve for activations of one image behind batch norm in training mode, if its running statistics were uploaded.

With N places, slopes s of the loss behind the norm, normalized values z and the gradients b and w of its bias and
weight, the slopes in front of it are ``weight / deviation * (s - b / N - w z / N)`` (Ioffe and Szegedy 2015). Running
statistics give the deviation and the mean, so that z is the only unknown, where a ReLU is silent.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy.attacks.exact.certificate import least_squares
from fl_privacy.attacks.exact.convolution import Convolution, above_noise, inputs_up_to_a_factor
from fl_privacy.attacks.exact.residual import FITS, Known, Link, OwnStatistics, Residual, heard, input_of, links
from fl_privacy.types import Tensors

_ROUNDS = 12  # most corrections of the silent values; five reach the rounding of single precision
_SOLVED = 1e-6  # relative residual at which they stop
_KEPT = 1e-4  # eigenvalues below this share of the largest are directions that the gradient does not show
_MOST_SCALE = 3.0  # largest factor by which silent values are scaled to their variance
_MOST_HIDDEN = 2048  # largest number of unknowns along such directions


@torch.no_grad()
def known_by_statistics(network: Residual, gradients: Tensors) -> Known:
    """Solve for activations of V images, in front of one link, from ``gradients`` (V, *shape).

    The norms of ``network`` use the images' own statistics (:meth:`Residual.use`).
    """
    own, best = {name: value.double() for name, value in gradients.items()}, list[tuple[int, Link, _Hidden]]()
    for link in links(network):
        best.append((int((hidden := _hidden(network, own, link)).found.sum()), link, hidden))
        if hidden.found.all():
            break
    _, link, hidden = max(best, key=lambda each: each[0])
    values, found = hidden.values, hidden.found
    known, left = {link.relu: values}, torch.where(found, 0.0, 1.0).to(values)
    if link.earlier is not None and found.any():
        pairs = [_before(network, own, link, row, hidden) for row in range(len(values))]
        left = torch.tensor([fit for _, fit in pairs]).to(values)
        if bool((left < FITS)[found].all()):
            known = {input_of(link.earlier): torch.stack([inputs for inputs, _ in pairs])}  # deeper ones slow a descent
    return Known(known, (), found, found, left)


@dataclass(frozen=True, eq=False)
class _Hidden:
    """Inputs (V, C, H, W) of a link's last convolution, slopes (V, O, P, Q) of its outputs, and which V were found."""

    values: Tensor
    slopes: Tensor
    found: Tensor


def _hidden(network: Residual, own: Tensors, link: Link) -> _Hidden:
    """Solve for the inputs of ``link.later`` and the slopes of its outputs.

    The gradient of the norm's bias, which is the sum of slopes behind the norm, gives the scale of both.
    """
    layer, gradients = network.convolution(link.later), own[f"{link.later.target}.weight"]
    values = gradients.new_zeros(len(gradients), *layer.shape)
    slopes, found = torch.zeros_like(layer.outputs(values)), torch.zeros(len(values), dtype=torch.bool)
    for row, gradient in enumerate(gradients):
        blind = inputs_up_to_a_factor(layer, gradient)
        if blind is None or not blind.unique:
            continue
        inputs = above_noise(blind.values[None] * blind.values.sum().sign())
        each = least_squares(_patches(layer, inputs).T, gradient.flatten(1).T).T.reshape(1, *slopes.shape[1:])
        sums = (layer.back(each) * (inputs > 0)).sum((0, 2, 3))
        bias = own[f"{link.norm.target}.bias"][row]
        scale = sums @ bias / sums.square().sum()
        if scale > 0 and (scale * sums - bias).norm() < FITS * bias.norm():
            values[row], slopes[row], found[row] = inputs[0] / scale, scale * each[0], True
    return _Hidden(values, slopes, found.to(values.device))


def _patches(layer: Convolution, inputs: Tensor) -> Tensor:
    """Return the inputs (P, C K) that each of the P output places sees, of one image (1, C, H, W)."""
    module, (down, across) = layer.module, layer.padding
    return F.unfold(inputs, module.kernel_size, module.dilation, (down, across), module.stride)[0].T


@dataclass(frozen=True, eq=False)
class _Silent:
    """Normalized values z (C, H, W) of one image that a ReLU silences, and those that are known (``gates``)."""

    known: Tensor  # (C, H, W) values where ``gates`` holds, else 0
    gates: Tensor
    sums: Tensor  # (C, 1, 1) sum of the silent values, since all sum to 0
    squares: Tensor  # (C, 1, 1) sum of their squares

    @property
    def number(self) -> Tensor:
        return (~self.gates).sum((1, 2), keepdim=True).clamp_min(1)

    def completed(self, guess: Tensor) -> Tensor:
        """Return z with silent values from ``guess``, moved and scaled to their mean and variance."""
        silent, number = ~self.gates, self.number
        mean = (guess * silent).sum((1, 2), keepdim=True) / number
        variance = ((guess - mean).square() * silent).sum((1, 2), keepdim=True) / number
        wanted = (self.squares / number - (self.sums / number).square()).clamp_min(0)
        scale = torch.where(variance > 0, (wanted / variance).sqrt(), 0).clamp_max(_MOST_SCALE)
        return torch.where(silent, (guess - mean) * scale + self.sums / number, self.known)


def _before(network: Residual, own: Tensors, link: Link, row: int, hidden: _Hidden) -> tuple[Tensor, float]:
    """Solve for the inputs (C, H, W) of ``link.earlier``; also return the equations' relative residual.

    Silent values are corrected in turn with the inputs.
    """
    assert link.earlier is not None
    layer, norm = network.convolution(link.earlier), network.graph.layer(link.norm)
    assert isinstance(norm, OwnStatistics)
    weight, bias, mean, variance = (each.view(-1, 1, 1) for each in (norm.weight, norm.bias, *norm.statistics(row)))
    deviation, offset = (variance + norm.eps).sqrt(), mean
    if layer.module.bias is not None:
        offset = mean - layer.module.bias.view(-1, 1, 1)
    by_bias, by_weight = (own[f"{link.norm.target}.{kind}"][row].view(-1, 1, 1) for kind in ("bias", "weight"))
    values, behind = hidden.values[row], network.convolution(link.later).back(hidden.slopes[row : row + 1])[0]
    gates, places = values > 0, values[0].numel()
    known = torch.where(gates, (values - bias) / weight, 0)
    squares = places * variance / deviation.square() - known.square().sum((1, 2), keepdim=True)
    silent = _Silent(known, gates, -known.sum((1, 2), keepdim=True), squares)
    right = own[f"{link.earlier.target}.weight"][row].flatten(2).transpose(1, 2).flatten(0, 1)
    z, best = silent.completed(torch.zeros_like(known)), (torch.zeros(layer.shape).to(known), torch.inf)
    for _ in range(_ROUNDS):
        deltas = weight / deviation * (behind * gates - by_bias / places - z * by_weight / places)
        inputs = _solved(layer, deltas[None], right, (known * deviation + offset), gates)
        if inputs is None:
            break
        left = float((layer.moved(deltas[None])[0] @ inputs.flatten(1).T - right).norm() / right.norm())
        inputs = heard(network, input_of(link.earlier), inputs[None])[0]
        best = (inputs, left) if left < best[1] else best
        if not left <= best[1] or left < _SOLVED:
            break
        outputs = weight * (layer.outputs(inputs[None])[0] - offset) / deviation + bias
        z = silent.completed((outputs.clamp(max=0) - bias) / weight)
    return best


def _solved(layer: Convolution, deltas: Tensor, right: Tensor, outputs: Tensor, gates: Tensor) -> Tensor | None:
    """Solve ``deltas * x = right`` for inputs x (C, H, W) of one image; ``None`` if too much is left open.

    Known ``outputs`` (O, P, Q), where ``gates`` holds, determine x along directions that the gradient does not show.
    """
    left = layer.moved(deltas)[0]
    values, vectors = torch.linalg.eigh(left.T @ left)
    shown = values > _KEPT * values[-1]
    seen, free = vectors[:, shown], vectors[:, ~shown]
    found = (seen / values[shown] @ (seen.T @ (left.T @ right))).T
    count, channels = free.shape[1], layer.shape[0]
    if count * channels > _MOST_HIDDEN:
        return None
    if count:
        each = torch.einsum("pk,cd->kcdp", free, torch.eye(channels).to(free)).reshape(-1, *layer.shape)
        moved = layer.outputs(each)[:, gates].T
        rest = outputs[gates] - layer.outputs(found.reshape(1, *layer.shape))[0][gates]
        found = found + least_squares(moved, rest[:, None]).reshape(count, channels).T @ free.T
    return found.reshape(layer.shape)
