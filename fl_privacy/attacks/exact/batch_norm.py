"""Solve for activations of a batch, or behind batch norm in training mode if running statistics were uploaded.

With N places, slopes s of the loss behind a norm, normalized values z, and gradients b and w of the norm's bias and
weight, the slopes in front of it are ``weight / deviation * (s - b / N - w z / N)`` (Ioffe and Szegedy 2015).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fl_privacy.attacks.attack import timely
from fl_privacy.attacks.exact import residual
from fl_privacy.attacks.exact.certificate import least_squares
from fl_privacy.attacks.exact.convolution import (
    Convolution,
    Equations,
    Shown,
    Slopes,
    above_noise,
    gated_inputs,
    inputs_up_to_a_factor,
)
from fl_privacy.attacks.exact.residual import (
    FITS,
    Known,
    Link,
    OwnStatistics,
    Residual,
    Step,
    enough,
    followed,
    heard,
    input_of,
    links,
)
from fl_privacy.types import Tensors

_ROUNDS = 12  # most corrections of the silent values; five reach the rounding of single precision
_SOLVED = 1e-6  # relative residual at which they stop
_KEPT = 1e-4  # eigenvalues below this share of the largest are directions that the gradient does not show
_MOST_HIDDEN = 512  # largest number of unknowns along such directions
_LEAST_WEIGHT = 1e-4  # weights of a norm below this share of the largest show no values in front of it
_MOST_SCALE = 3.0  # largest factor by which silent values are scaled to their variance


@torch.no_grad()
def known_by_statistics(network: Residual, gradients: Tensors) -> Known:
    """Solve for activations of an update's B images, from its ``gradients`` (1, *shape), as near to them as possible."""
    own = {name: value.double() for name, value in gradients.items()}
    none = torch.zeros(network.count, dtype=torch.bool, device=network.device)
    for link in timely(links(network)):
        hidden = _hidden(network, own, link)
        if hidden is None:
            continue
        values, first, every = hidden[0], link[0], torch.ones_like(none)
        known = Known({link[2]: values}, (), every, every, torch.zeros_like(values[:, 0, 0, 0]))
        if first is None:
            return known
        layer = network.convolution(first)
        places = layer.shape[1] * layer.shape[2]
        if places > residual.MOST_PLACES or layer.gradients * places * network.count > residual.MOST_NUMBERS:
            return known
        inputs, left = _before(network, own, link, hidden)
        if not left < FITS:
            return replace(known, left=known.left + left)
        known = replace(known, values={input_of(first): inputs}, left=known.left + left)
        return followed(network, own, known, _OwnStep) if input_of(first) in network.cuts else known
    return Known({}, (), none, none, torch.ones(network.count).to(network.device))


def _hidden(network: Residual, own: Tensors, link: Link) -> tuple[Tensor, Tensor] | None:
    """Solve for the inputs (B, C, H, W) of the link's last convolution, and the slopes (B, O, P, Q) of its outputs."""
    _, norm, _, later = link
    layer, bias = network.convolution(later), own[f"{norm.target}.bias"][0]
    blind = inputs_up_to_a_factor(layer, own[f"{later.target}.weight"][0], network.count)
    if blind is None or not blind.unique:
        return None
    signs = blind.values.sum((1, 2, 3), keepdim=True).sign()
    inputs = above_noise(blind.values * signs)
    sums = (layer.back(blind.slopes * signs) * (inputs > 0)).sum((2, 3))
    scales = least_squares(sums.T, bias[:, None])
    if (scales > 0).all() and (sums.T @ scales - bias[:, None]).norm() < FITS * bias.norm():
        scales = scales[..., None, None]
        return inputs / scales, blind.slopes * signs * scales
    return None


@dataclass(eq=False)
class _Front:
    """Slopes (B, O, P, Q) in front of a norm of B images, by normalized values that a ReLU's ``values`` show in part.

    The others are unknown, and estimated from a guess of the convolution's inputs. All values of a channel have mean 0,
    and a known variance, over all images. ``behind``: slopes of the norm's outputs.
    """

    layer: Convolution
    norm: OwnStatistics
    of_norm: tuple[Tensor, Tensor]  # gradients (1, O) of bias and weight
    behind: Tensor
    values: Tensor | None

    def __post_init__(self) -> None:
        norm = self.norm
        assert norm.running_mean is not None and norm.running_var is not None
        of_batch = norm.running_mean[:1], norm.running_var[:1], *self.of_norm
        mean, variance, self.by_bias, self.by_weight = (each[..., None, None] for each in of_batch)
        self.weight, self.bias = (each.view(-1, 1, 1) for each in (norm.weight, norm.bias))
        self.deviation, bias = (variance + norm.eps).sqrt(), self.layer.module.bias
        self.offset = mean if bias is None else mean - bias.view(-1, 1, 1)
        self.live = self.weight.abs() > _LEAST_WEIGHT * self.weight.abs().max()
        self.places = self.behind[:, 0].numel()
        values = torch.zeros_like(self.behind) if self.values is None else self.values
        self.gates = self.live & (values > 0)
        self.known = torch.where(self.gates, (values - self.bias) / self.weight, 0)
        self.number = (~self.gates).sum((0, 2, 3), keepdim=True).clamp_min(1)
        self.center = -self._average(self.known)
        share = self.places * variance / self.deviation.square() / self.number
        self.wanted = (share - self._average(self.known.square()) - self.center.square()).clamp_min(0)
        self.z = self._completed(torch.zeros_like(self.known))

    def _average(self, of: Tensor) -> Tensor:
        return of.sum((0, 2, 3), keepdim=True) / self.number

    def _completed(self, guess: Tensor) -> Tensor:
        middle = self._average(guess * ~self.gates)
        spread = self._average((guess - middle).square() * ~self.gates)
        scale = torch.where(spread > 0, (self.wanted / spread).sqrt(), 0).clamp_max(_MOST_SCALE)
        return torch.where(self.gates, self.known, (guess - middle) * scale + self.center)

    @property
    def slopes(self) -> Tensor:
        moved = 0 if self.norm.fixed else (self.by_bias + self.z * self.by_weight) / self.places
        return self.weight / self.deviation * (self.behind - moved)

    def learn(self, inputs: Tensor) -> None:
        """Estimate the unknown normalized values from a guess of the convolution's ``inputs`` (V, C, H, W)."""
        z = (self.layer.outputs(inputs) - self.offset) / self.deviation
        if self.values is not None:  # the ReLU silenced them
            silent = ((self.weight * z + self.bias).clamp(max=0) - self.bias) / self.weight
            z = torch.where(self.live, silent, 0)
        self.z = self._completed(z)


def _front(network: Residual, own: Tensors, convolution: fx.Node, behind: Tensor, values: Tensor | None) -> _Front:
    (node,) = convolution.users
    norm = network.graph.layer(node)
    assert isinstance(norm, OwnStatistics)
    of_norm = own[f"{node.target}.bias"], own[f"{node.target}.weight"]
    return _Front(network.convolution(convolution), norm, of_norm, behind, values)


@dataclass(eq=False)
class _OwnStep(Step):
    """Step through norms in training mode; ``fronts`` by convolution."""

    fronts: dict[fx.Node, _Front] = field(default_factory=dict)

    def _behind_norm(self, node: fx.Node, own: Slopes) -> dict[fx.Node, Slopes] | None:
        before = input_of(node)
        if self.network.graph.kind(before) != "conv" or len(before.users) > 1:
            return None
        known = {self.at: self.outputs, **self.values}
        values = next((known[one] for one in node.users if one in known), None)
        self.fronts[before] = _front(self.network, self.gradients, before, own.values, values)
        return {before: own}

    def _behind_convolution(self, node: fx.Node, own: Slopes) -> dict[fx.Node, Slopes] | None:
        given, front = input_of(node), self.fronts.get(node)
        if front is None:
            return super()._behind_convolution(node, own)
        if given is self.before:
            return super()._behind_convolution(node, Slopes(front.slopes))
        if given in self.values or not enough([self._equations(node)]):
            return None
        self.values[given] = self._corrected(given, [node], None)
        return {given: Slopes(front.layer.back(front.slopes))}

    def _equations(self, node: fx.Node) -> Equations:
        front = self.fronts[node]
        return Equations(front.layer, Slopes(front.slopes), self.gradients[f"{node.target}.weight"])

    def solved(self) -> Tensor | None:
        if not enough(self.equations):
            return None
        nodes = [node for node in self.fronts if input_of(node) is self.before]
        return self._corrected(self.before, nodes, self.shown())

    def _corrected(self, given: fx.Node, nodes: Sequence[fx.Node], shown: Shown | None) -> Tensor:
        """Solve for the inputs (V, C, H, W) of convolutions, and correct the normalized values behind them in turn."""
        layer = self.fronts[nodes[0]].layer
        best = self.outputs.new_zeros(len(self.outputs), *layer.shape)
        least = torch.full_like(best[:, 0, 0, 0], torch.inf)
        relu = self.network.graph.kind(given) == "relu"
        fixed = all(self.fronts[node].norm.fixed for node in nodes)
        for _ in timely(range(1 if fixed else _ROUNDS)):
            found, left = gated_inputs([self._equations(node) for node in nodes], shown)
            better = left < least
            best, least = torch.where(better[:, None, None, None], found, best), torch.where(better, left, least)
            if os.environ.get("SAY"):
                print("   ", given, left.tolist(), flush=True)
            if least.max() < _SOLVED:
                break
            for node in nodes:
                self.fronts[node].learn(found.clamp(min=0) if relu else found)
        best = heard(self.network, given, best)
        for node in nodes:
            self.fronts[node].learn(best)
        return best


def _before(network: Residual, own: Tensors, link: Link, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
    """Solve for the inputs (B, C, H, W) of the link's first convolution; also return their relative residual.

    Normalized values that the ReLU silences are unknown, and corrected in turn with the inputs.
    """
    earlier, _, _, later = link
    assert earlier is not None
    layer, (values, slopes) = network.convolution(earlier), hidden
    front = _front(network, own, earlier, network.convolution(later).back(slopes) * (values > 0), values)
    right = own[f"{earlier.target}.weight"][0].flatten(2).transpose(1, 2).flatten(0, 1)
    best = torch.zeros(network.count, *layer.shape).to(values), torch.inf
    outputs, relu = front.known * front.deviation + front.offset, network.graph.kind(input_of(earlier)) == "relu"
    for _ in timely(range(1 if front.norm.fixed else _ROUNDS)):
        moved = layer.moved(front.slopes).transpose(0, 1).flatten(1)
        inputs = _solved(layer, moved, right, outputs, front.gates)
        if inputs is None:
            break
        left = float((moved @ inputs.flatten(2).transpose(0, 1).flatten(1).T - right).norm() / right.norm())
        if os.environ.get("SAY"):
            print("before", left, flush=True)
        best = (inputs, left) if left < best[1] else best
        if left < _SOLVED:
            break
        front.learn(inputs.clamp(min=0) if relu else inputs)
    return heard(network, input_of(earlier), best[0]), best[1]


def _solved(layer: Convolution, left: Tensor, right: Tensor, outputs: Tensor, gates: Tensor) -> Tensor | None:
    """Solve ``left x = right`` for inputs x (B, C, H, W) of B images; ``None`` if too much is left open.

    Known ``outputs`` (B, O, P, Q), where ``gates`` holds, determine x along directions that the gradient does not show.
    """
    values, vectors = torch.linalg.eigh(left.T @ left)
    shown = values > _KEPT * values[-1]
    seen, free = vectors[:, shown], vectors[:, ~shown]
    found: Tensor = (seen / values[shown] @ (seen.T @ (left.T @ right))).T
    count, channels, shape = free.shape[1], layer.shape[0], (layer.shape[0], len(outputs), *layer.shape[1:])
    if os.environ.get("SAY"):
        print("free", count, "of", len(values), "channels", channels, flush=True)
    most = min(_MOST_HIDDEN, residual.MOST_NUMBERS // max(found.numel(), outputs.numel()))
    if count * channels > most:
        return None
    found = found.reshape(shape).transpose(0, 1)
    if count:
        one = free.T.reshape(count, len(outputs), 1, *layer.shape[1:])
        moved = [  # by channel and direction, the outputs that are known
            layer.outputs(F.pad(each, (0, 0, 0, 0, channel, channels - 1 - channel)))[gates]
            for channel in range(channels)
            for each in one
        ]
        rest = outputs[gates] - layer.outputs(found)[gates]
        own = least_squares(torch.stack(moved, 1), rest[:, None]).reshape(channels, count) @ free.T
        found = found + own.reshape(shape).transpose(0, 1)
    return found
