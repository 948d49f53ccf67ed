"""Solve for activations of a batch, or behind batch norm in training mode if running statistics were uploaded.

With N places, slopes s of the loss behind a norm, normalized values z, and gradients b and w of the norm's bias and
weight, the slopes in front of it are ``weight / deviation * (s - b / N - w z / N)`` (Ioffe and Szegedy 2015).
"""

from collections.abc import Mapping
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
    conjugate_gradients,
    inputs_up_to_a_factor,
    solve,
    turn_gates,
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
_SCALED = 5e-2  # largest relative residual of the equations of an image's scale, far fewer than a norm's channels
_MISSED = 1e-3  # largest relative residual of a convolution between blocks
_SOLVED = 1e-6  # relative residual at which they stop
_KEPT = 1e-4  # eigenvalues below this share of the largest are directions that the gradient does not show
_FALLS = 0.9  # least factor by which a correction lowers the residual
_NONE = 1e-10  # eigenvalues below this share of the largest are rounding
_MOST_OPEN = 0.7  # largest number of unknowns along such directions for each known output
_LEAST_WEIGHT = 1e-4  # weights of a norm below this share of the largest show no values in front of it
_MOST_SCALE = 3.0  # largest factor by which silent values are scaled to their variance


@torch.no_grad()
def known_by_statistics(network: Residual, gradients: Tensors) -> Known:
    """Solve for activations of an update's B images, from ``gradients`` (1, *shape), as near to them as possible."""
    own = {name: value.double() for name, value in gradients.items()}
    none = torch.zeros(network.count, dtype=torch.bool, device=network.device)
    deepest: Known | None = None
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
        behind = Slopes(network.convolution(link[3]).back(hidden[1]), values > 0)
        front = _front(network, own, first, behind, values)
        inputs, left = _inputs(network, own, input_of(first), {first: front}, None)
        deepest = deepest or replace(known, left=known.left + left)
        if left < FITS:
            known = replace(known, values={input_of(first): inputs}, left=known.left + left)
            if input_of(first) in network.cuts:  # equations behind values that stay unknown are left out
                known = replace(followed(network, own, known, _OwnStep), equations=())
            return known
    return deepest or Known({}, (), none, none, torch.ones(network.count).to(network.device))


def _hidden(network: Residual, own: Tensors, link: Link) -> tuple[Tensor, Tensor] | None:
    """Solve for the inputs (B, C, H, W) of the link's last convolution, and the slopes (B, O, P, Q) of its outputs."""
    _, norm, _, later = link
    layer, bias = network.convolution(later), own[f"{norm.target}.bias"][0]
    blind = inputs_up_to_a_factor(layer, own[f"{later.target}.weight"][0], network.count)
    if blind is None or not blind.unique:
        return None
    inputs = above_noise(blind.values * blind.values.sum((1, 2, 3), keepdim=True).sign())
    module, (down, across) = layer.module, layer.padding
    seen = (
        F.unfold(inputs, module.kernel_size, module.dilation, (down, across), module.stride).transpose(0, 1).flatten(1)
    )
    slopes = least_squares(seen, own[f"{later.target}.weight"][0].flatten(1).T).T
    slopes = slopes.reshape(len(slopes), network.count, *blind.slopes.shape[2:]).transpose(0, 1)
    sums = (layer.back(slopes) * (inputs > 0)).sum((2, 3))
    scales = least_squares(sums.T, bias[:, None])
    if (scales > 0).all() and (sums.T @ scales - bias[:, None]).norm() < _SCALED * bias.norm():
        scales = scales[..., None, None]
        return inputs / scales, slopes * scales
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
    behind: Slopes
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
        self.places = self.behind.full[:, 0].numel()
        values = torch.zeros_like(self.behind.full) if self.values is None else self.values
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
    def slopes(self) -> Slopes:
        scale = self.weight / self.deviation
        moved = None if self.norm.fixed else scale * (self.by_bias + self.z * self.by_weight) / self.places
        return Slopes(scale * self.behind.full, self.behind.open, moved)

    def learn(self, inputs: Tensor) -> None:
        """Estimate the unknown normalized values from a guess of the convolution's ``inputs`` (V, C, H, W)."""
        z = (self.layer.outputs(inputs) - self.offset) / self.deviation
        if self.values is not None:  # the ReLU silenced them
            silent = ((self.weight * z + self.bias).clamp(max=0) - self.bias) / self.weight
            z = torch.where(self.live, silent, 0)
        self.z = self._completed(z)


def _front(network: Residual, own: Tensors, convolution: fx.Node, behind: Slopes, values: Tensor | None) -> _Front:
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
        self.fronts[before] = _front(self.network, self.gradients, before, own, values)
        return {before: own}

    def _behind_convolution(self, node: fx.Node, own: Slopes) -> dict[fx.Node, Slopes] | None:
        given, front = input_of(node), self.fronts.get(node)
        if front is None:
            return super()._behind_convolution(node, own)
        if given is self.before:
            return super()._behind_convolution(node, front.slopes)
        equations = Equations(front.layer, own, self.gradients[f"{node.target}.weight"])
        if given in self.values or not enough([equations]):
            return None
        found, left = _inputs(self.network, self.gradients, given, {node: front}, None)
        if left > _MISSED:
            return None
        self.values[given] = found
        return {given: Slopes(front.layer.back(front.slopes.values))}

    def solved(self) -> Tensor | None:
        if not enough(self.equations):
            return None
        fronts = {node: front for node, front in self.fronts.items() if input_of(node) is self.before}
        found, left = _inputs(self.network, self.gradients, self.before, fronts, self.shown())
        return found if left < FITS else None


def _inputs(
    network: Residual, own: Tensors, given: fx.Node, fronts: Mapping[fx.Node, _Front], shown: Shown | None
) -> tuple[Tensor, float]:
    """Solve for the inputs (B, C, H, W) of convolutions; also return their relative residual.

    Unknown normalized values behind the convolutions are corrected in turn with the inputs.
    """
    best, least = (
        torch.zeros(network.count, *network.shapes[given]).to(shown[0] if shown else network.device),
        torch.inf,
    )
    best, relu = best.double(), network.graph.kind(given) == "relu"
    turned = False
    for _ in timely(range(_ROUNDS)):
        equations = [
            Equations(front.layer, front.slopes, own[f"{node.target}.weight"]) for node, front in fronts.items()
        ]
        found = _solved(next(iter(fronts.values())), equations[0], shown) if len(fronts) == 1 else None
        ends = [torch.linalg.eigvalsh(each.left[0].T @ each.left[0])[[0, -1]] for each in equations if found is None]
        if not all(low > _NONE * high for low, high in ends):
            break
        found = solve(equations, shown)[0] if found is None else found
        apart = [(each.left @ each.joined(found).mT - each.right).norm() / each.right.norm() for each in equations]
        left = float(max(apart))
        stalls = left > _FALLS * least
        best, least = (found, left) if left < least else (best, least)
        if least < _SOLVED or (stalls and turned):
            break
        turned = stalls
        for each in equations if stalls else ():
            turn_gates(each)
        for front in fronts.values():
            front.learn(found.clamp(min=0) if relu else found)
    best = heard(network, given, best)
    for front in fronts.values():
        front.learn(best)
    return best, least


def _solved(front: _Front, own: Equations, shown: Shown | None) -> Tensor | None:
    """Solve ``own`` for the inputs (B, C, H, W) of a convolution; ``None`` if too much is left open.

    Known outputs, and inputs that are ``shown``, determine the directions that the gradient does not show, if any.
    """
    layer, gates, left = front.layer, front.gates, own.left[0]
    values, vectors = torch.linalg.eigh(left.T @ left)
    clear = values > _KEPT * values[-1]
    seen, free = vectors[:, clear], vectors[:, ~clear]
    found: Tensor = (seen / values[clear] @ (seen.T @ (left.T @ own.right[0]))).T
    count, channels, shape = free.shape[1], layer.shape[0], (layer.shape[0], len(gates), *layer.shape[1:])
    number = int(gates.sum()) + (int((shown[0] > 0).sum()) if shown else 0)
    if not 0 < count * channels <= _MOST_OPEN * number:
        return None
    found = found.reshape(shape).transpose(0, 1)

    def along(values: Tensor) -> Tensor:
        inputs: Tensor = (values.reshape(channels, count) @ free.T).reshape(shape).transpose(0, 1)
        return inputs

    def across(outputs: Tensor, inputs: Tensor) -> Tensor:
        sums = layer.back(outputs * gates) + (0 if shown is None else inputs)
        flat: Tensor = (sums.transpose(0, 1).flatten(1) @ free).reshape(1, -1)
        return flat

    def normal(values: Tensor) -> Tensor:
        inputs = along(values)
        return across(layer.outputs(inputs), inputs * often)

    often, sums = shown or (torch.zeros_like(found), torch.zeros_like(found))
    rest = front.known * front.deviation + front.offset - layer.outputs(found)
    right = across(rest, sums - often * found)
    return found + along(conjugate_gradients(normal, right, torch.ones_like(right)))
