"""Solve for activations of one image behind batch norm in training mode, if its running statistics were uploaded.

With N places, slopes s of the loss behind a norm, normalized values z, and gradients b and w of the norm's bias and
weight, the slopes in front of it are ``weight / deviation * (s - b / N - w z / N)`` (Ioffe and Szegedy 2015).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy.attacks.attack import timely
from fl_privacy.attacks.exact import residual
from fl_privacy.attacks.exact.certificate import least_squares
from fl_privacy.attacks.exact.convolution import Convolution, above_noise, inputs_up_to_a_factor
from fl_privacy.attacks.exact.residual import FITS, Known, Link, OwnStatistics, Residual, heard, input_of, links
from fl_privacy.types import Tensors

_ROUNDS = 12  # most corrections of the silent values; five reach the rounding of single precision
_SOLVED = 1e-6  # relative residual at which they stop
_KEPT = 1e-4  # eigenvalues below this share of the largest are directions that the gradient does not show
_MOST_HIDDEN = 512  # largest number of unknowns along such directions
_LEAST_WEIGHT = 1e-4  # weights of a norm below this share of the largest show no values in front of it
_MOST_SCALE = 3.0  # largest factor by which silent values are scaled to their variance

_Hidden = tuple[Tensor, Tensor, Tensor]
"""Inputs (V, C, H, W) of a link's last convolution, slopes (V, O, P, Q) of its outputs, and ``True`` (V,) if solved."""


@torch.no_grad()
def known_by_statistics(network: Residual, gradients: Tensors) -> Known:
    """Solve for activations of V images in front of one link (:data:`~fl_privacy.attacks.exact.residual.Link`), from
    ``gradients`` (V, *shape).
    """
    own, tried = {name: value.double() for name, value in gradients.items()}, list[tuple[int, Link, _Hidden]]()
    for link in links(network):
        tried.append((int((hidden := _hidden(network, own, link))[2].sum()), link, hidden))
        if hidden[2].all():
            break
    _, link, hidden = max(tried, key=lambda each: each[0])
    values, _, started = hidden
    known, found, left = {link[2]: values}, started, torch.where(started, 0.0, 1.0).to(values)
    first = link[0] if started.any() else None
    layer = network.convolution(link[2] if first is None else first)
    places = layer.shape[1] * layer.shape[2]
    if first is not None and places <= residual.MOST_PLACES and layer.gradients * places <= residual.MOST_NUMBERS:
        inputs, left = values.new_zeros(len(values), *layer.shape), torch.full_like(left, torch.inf)
        for row in timely(started.nonzero().flatten().tolist()):
            inputs[row], left[row] = _before(network, own, link, row, hidden)
        if bool((fits := left < FITS).any()):  # deeper values would only slow a descent
            known, found = {input_of(first): inputs}, fits
    return Known(known, (), started, found, left)


def _hidden(network: Residual, own: Tensors, link: Link) -> _Hidden:
    """Solve for the inputs of the link's last convolution, and the slopes of its outputs."""
    _, norm, _, later = link
    layer, gradients = network.convolution(later), own[f"{later.target}.weight"]
    module, (down, across) = layer.module, layer.padding
    values = gradients.new_zeros(len(gradients), *layer.shape)
    slopes, found = torch.zeros_like(layer.outputs(values)), torch.zeros_like(values[:, 0, 0, 0], dtype=torch.bool)
    for row, gradient in timely(enumerate(gradients)):
        blind = inputs_up_to_a_factor(layer, gradient)
        if blind is None or not blind.unique:
            continue
        inputs = above_noise(blind.values[None] * blind.values.sum().sign())
        seen = F.unfold(inputs, module.kernel_size, module.dilation, (down, across), module.stride)[0]
        each = least_squares(seen, gradient.flatten(1).T).T.reshape(1, *slopes.shape[1:])
        sums, bias = (layer.back(each) * (inputs > 0)).sum((0, 2, 3)), own[f"{norm.target}.bias"][row]
        scale = sums @ bias / sums.square().sum()
        if scale > 0 and (scale * sums - bias).norm() < FITS * bias.norm():
            values[row], slopes[row], found[row] = inputs[0] / scale, scale * each[0], True
    return values, slopes, found


def _before(network: Residual, own: Tensors, link: Link, row: int, hidden: _Hidden) -> tuple[Tensor, float]:
    """Solve for the inputs (C, H, W) of the link's first convolution; also return their relative residual.

    Normalized values that the ReLU sets to zero are unknown: they and the inputs are corrected in turn, so that the
    values of each channel have mean 0 and a known variance.
    """
    earlier, node, _, later = link
    assert earlier is not None
    layer, norm = network.convolution(earlier), network.graph.layer(node)
    assert isinstance(norm, OwnStatistics)
    assert norm.running_mean is not None and norm.running_var is not None
    given = norm.weight, norm.bias, norm.running_mean[row], norm.running_var[row]
    weight, bias, mean, variance = (each.view(-1, 1, 1) for each in given)
    deviation = (variance + norm.eps).sqrt()
    offset = mean if layer.module.bias is None else mean - layer.module.bias.view(-1, 1, 1)
    by_bias, by_weight = (own[f"{node.target}.{kind}"][row].view(-1, 1, 1) for kind in ("bias", "weight"))
    values, right = hidden[0][row], own[f"{earlier.target}.weight"][row].flatten(2).transpose(1, 2).flatten(0, 1)
    live, places = weight.abs() > _LEAST_WEIGHT * weight.abs().max(), values[0].numel()
    gates = live & (values > 0)
    known, number = torch.where(gates, (values - bias) / weight, 0), (~gates).sum((1, 2), keepdim=True).clamp_min(1)
    behind = network.convolution(later).back(hidden[1][row : row + 1])[0] * gates

    def average(of: Tensor) -> Tensor:
        return of.sum((1, 2), keepdim=True) / number

    center = -average(known)
    wanted = (places * variance / deviation.square() / number - average(known.square()) - center.square()).clamp_min(0)

    def completed(guess: Tensor) -> Tensor:
        middle = average(guess * ~gates)
        spread = average((guess - middle).square() * ~gates)
        scale = torch.where(spread > 0, (wanted / spread).sqrt(), 0).clamp_max(_MOST_SCALE)
        return torch.where(gates, known, (guess - middle) * scale + center)

    z, best = completed(torch.zeros_like(known)), (torch.zeros(layer.shape).to(known), torch.inf)
    for _ in timely(range(_ROUNDS)):
        deltas = weight / deviation * (behind - by_bias / places - z * by_weight / places)
        moved = layer.moved(deltas[None])[0]
        inputs = _solved(layer, moved, right, known * deviation + offset, gates)
        if inputs is None:
            break
        left = float((moved @ inputs.flatten(1).T - right).norm() / right.norm())
        inputs = heard(network, input_of(earlier), inputs[None])[0]
        best = (inputs, left) if left < best[1] else best
        if left < _SOLVED:
            break
        outputs = weight * (layer.outputs(inputs[None])[0] - offset) / deviation + bias
        z = completed(torch.where(live, (outputs.clamp(max=0) - bias) / weight, 0))
    return best


def _solved(layer: Convolution, left: Tensor, right: Tensor, outputs: Tensor, gates: Tensor) -> Tensor | None:
    """Solve ``left x = right`` for inputs x (C, H, W) of one image; ``None`` if too many values stay unknown.

    Known ``outputs`` of O channels (O, P, Q), where ``gates`` is ``True``, determine x along directions that the
    gradient does not show.
    """
    values, vectors = torch.linalg.eigh(left.T @ left)
    shown = values > _KEPT * values[-1]
    seen, free = vectors[:, shown], vectors[:, ~shown]
    found: Tensor = (seen / values[shown] @ (seen.T @ (left.T @ right))).T
    count, channels = free.shape[1], layer.shape[0]
    most = min(_MOST_HIDDEN, residual.MOST_NUMBERS // max(found.numel(), outputs.numel()))
    if count * channels > most:
        return None
    if count:
        each = torch.einsum("pk,cd->kcdp", free, torch.eye(channels).to(free)).reshape(-1, *layer.shape)
        moved = layer.outputs(each)[:, gates].T
        rest = outputs[gates] - layer.outputs(found.reshape(1, *layer.shape))[0][gates]
        found = found + least_squares(moved, rest[:, None]).reshape(count, channels).T @ free.T
    return found.reshape(layer.shape)
