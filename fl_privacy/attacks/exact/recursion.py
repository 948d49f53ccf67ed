"""One image behind convolutions, solved for layer by layer from the output on (R-GAP, Zhu and Blaschko 2021).

Of a network in which each layer takes nothing but the activations of the one before, the output layer's gradients give
the features that entered it and the slope of the loss by them. From there every layer has two kinds of linear equations
for what entered it: its outputs, by the inverse of the activation behind it, and its weight's gradient, which is a
product of what entered with the slope by its outputs, known by then. The slope goes back through the layer, and so on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_privacy.attacks.exact.certificate import model_as_sent
from fl_privacy.attacks.exact.convolution import Convolution, solve_inputs
from fl_privacy.attacks.exact.first_layer import probe_first_layer
from fl_privacy.gradients.watch import leaving, owners
from fl_privacy.types import Observation, Tensors

_MOST = 1 << 15
"""Values that enter a convolution, at most: more take longer than a descent."""

_SILENT = 1e-5
"""Outputs of a ReLU up to this share of the largest are zero."""

_WRONG = 0.1
"""Share of its right-hand sides that a layer's equations leave from which they are no longer those of one image."""

_ALIKE = 1e-6
_FARTHEST = 8.0
"""From 0, of numbers by which activations are told apart; beyond it they no longer differ from a line."""


@dataclass(frozen=True, eq=False)
class Activation:
    """An elementwise function that grows.

    Attributes:
        value: z -> a.
        inverse: a -> z; of a ReLU where it is not silent.
        slope: a -> da/dz.
    """

    value: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def _leaky(slope: float) -> Activation:
    return Activation(
        lambda z: torch.where(z > 0, z, slope * z),
        lambda a: torch.where(a > 0, a, a / slope),
        lambda a: torch.where(a > 0, torch.ones_like(a), slope),
    )


def _above_silence(a: Tensor) -> Tensor:
    largest = a.flatten(1).amax(1).view(-1, *(1 for _ in a.shape[1:]))
    return (a > _SILENT * largest).to(a)


_EDGE = 1e-12

ACTIVATIONS: Sequence[Activation] = (
    Activation(torch.clone, torch.clone, torch.ones_like),
    Activation(torch.relu, torch.relu, _above_silence),
    Activation(torch.sigmoid, lambda a: torch.logit(a, _EDGE), lambda a: a * (1 - a)),
    Activation(torch.tanh, lambda a: torch.atanh(a.clamp(_EDGE - 1, 1 - _EDGE)), lambda a: 1 - a.square()),
    Activation(
        nn.functional.elu,
        lambda a: torch.where(a > 0, a, torch.log1p(a.clamp(_EDGE - 1, 0))),
        lambda a: torch.where(a > 0, 1, 1 + a),
    ),
    Activation(
        nn.functional.softplus,
        lambda a: a + torch.log(-torch.expm1(-a.clamp_min(_EDGE))),
        lambda a: -torch.expm1(-a),
    ),
    _leaky(0.01),
    _leaky(0.2),
)
"""Those that are told apart by what comes out of them."""


@dataclass(frozen=True, eq=False)
class ChainLayer:
    """Of a chain.

    Attributes:
        name, module: of the layer, in double precision.
        inputs, outputs: shapes of what enters and leaves it, without the batch.
        activation: behind it.
    """

    name: str
    module: nn.Conv2d | nn.Linear
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    activation: Activation


@dataclass(frozen=True, eq=False)
class Chain:
    """A network of which each layer takes the activations of the one before, the first of them a convolution.

    Attributes:
        layers: from the image on.
        image: (C, H, W) of the image.
        shift, scale: the first one's input is ``shift + scale * pixels``, (C, H, W) of what enters it.
    """

    layers: Sequence[ChainLayer]
    image: tuple[int, ...]
    shift: Tensor
    scale: Tensor

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parameters whose gradients are needed; that of the output's bias last."""
        return (*(f"{layer.name}.weight" for layer in self.layers), f"{self.layers[-1].name}.bias")


@dataclass(frozen=True, eq=False)
class Recursion:
    """What came of a chain's equations for V victims.

    Attributes:
        images: (V, C, H, W).
        left: (V,) share of their right-hand sides that the equations of a layer leave, of the worst.
    """

    images: Tensor
    left: Tensor

    @property
    def sound(self) -> Tensor:
        """(V,) where they may be those of an image: no noise, nothing set to zero."""
        return self.left < _WRONG


@torch.no_grad()
def find_chain(observation: Observation) -> Chain | None:
    """That of the observation's model where one image was taken and all that is needed was uploaded, else ``None``."""
    if observation.upload.num_examples != 1:
        return None
    model = model_as_sent(observation).eval()
    layers_of_model = owners(model)
    if not all(isinstance(module, nn.Linear) or _is_plain(module) for module in layers_of_model.values()):
        return None
    rng = torch.Generator().manual_seed(0)
    image = torch.rand(observation.input_shape, generator=rng, dtype=torch.float64)
    with leaving(layers_of_model, lambda module, given, output: _spread(output, rng)) as calls:
        logits = model(image.to(next(model.parameters()).device)[None])
    follows = [*(call.inputs for call in calls[1:]), logits]
    layers = []
    for call, after in zip(calls, follows, strict=True):
        module, activation = call.module, _between(call.output, after)
        if activation is None:
            return None
        assert isinstance(module, nn.Linear | nn.Conv2d)
        layers.append(ChainLayer(call.name, module, call.inputs.shape[1:], call.output.shape[1:], activation))
    if not _is_chain(layers):
        return None
    seen = probe_first_layer(model, observation.assumed(), observation.input_shape)
    chain = Chain(layers, observation.input_shape, seen.black.double(), (seen.white - seen.black).double())
    told = observation.upload.tensors.keys()
    return chain if seen.one_by_one and seen.black.dim() == 3 and told >= set(chain.names) else None


def _is_plain(module: nn.Module) -> bool:
    """Whether it is a convolution whose equations are linear in all of its input."""
    if not isinstance(module, nn.Conv2d) or module.groups > 1 or module.padding_mode != "zeros":
        return False
    spans = (step * (taps - 1) for step, taps in zip(module.dilation, module.kernel_size, strict=True))
    return module.padding != "same" or all(span % 2 == 0 for span in spans)


def _is_chain(layers: Sequence[ChainLayer]) -> bool:
    names = [layer.name for layer in layers]
    if len(layers) < 2 or len(set(names)) < len(names):
        return False
    first, last = layers[0], layers[-1]
    convolutions = [layer for layer in layers if isinstance(layer.module, nn.Conv2d)]
    small = all(torch.Size(layer.inputs).numel() <= _MOST and len(layer.inputs) == 3 for layer in convolutions)
    flat = all(len(layer.inputs) == 1 for layer in layers if isinstance(layer.module, nn.Linear))
    ends = isinstance(last.module, nn.Linear) and last.module.bias is not None and last.activation is ACTIVATIONS[0]
    return small and flat and ends and first in convolutions


def _spread(output: Tensor, rng: torch.Generator) -> Tensor:
    """In place of an ``output``, numbers by which activations are told apart: of both signs, small and large."""
    numbers = torch.linspace(-_FARTHEST, _FARTHEST, output.numel(), dtype=output.dtype)
    return numbers[torch.randperm(output.numel(), generator=rng)].view(output.shape).to(output.device)


def _between(output: Tensor, after: Tensor) -> Activation | None:
    """The activation that makes ``after`` of an ``output``; ``None`` where it is another, or more than that."""
    if output.shape[0] != after.shape[0] or output.numel() != after.numel():
        return None
    for activation in ACTIVATIONS:
        if torch.allclose(activation.value(output).flatten(1), after.flatten(1), rtol=_ALIKE, atol=_ALIKE):
            return activation
    return None


@torch.no_grad()
def recursed(chain: Chain, gradients: Tensors) -> Recursion:
    """The images of V updates of one image each.

    Args:
        chain: of the model that they were computed with.
        gradients: (V, *shape) by name.
    """
    last = chain.layers[-1]
    delta = gradients[f"{last.name}.bias"].double()
    values, back = _connected(last, gradients, delta)
    left, known = delta.new_zeros(len(delta)), torch.ones_like(values)
    for layer in reversed(chain.layers[:-1]):
        activation = layer.activation
        outputs = activation.inverse(values.reshape(-1, *layer.outputs))
        slopes = activation.slope(activation.value(outputs)).clamp_min(0) * known.reshape(outputs.shape)
        delta = back.reshape(slopes.shape) * slopes
        if isinstance(layer.module, nn.Linear):
            values, back = _connected(layer, gradients, delta)
            known = torch.ones_like(values)
            continue
        own = Convolution(layer.module, (layer.inputs[0], layer.inputs[1], layer.inputs[2]))
        if layer.module.bias is not None:
            outputs = outputs - layer.module.bias[:, None, None]
        gradient = gradients[f"{layer.name}.weight"].double()
        first = layer is chain.layers[0]
        found = solve_inputs(own, outputs, slopes, delta, gradient, smooth=first)
        values, known, back = found.values, found.seen, own.back(delta)
        left = torch.where(found.enough | first, left.maximum(found.left), 1)
        if not bool((left < _WRONG).any()):
            break
    size = len(values), *chain.image
    if values.shape[1:] != chain.shift.shape:  # none is solved for down to the image
        return Recursion(values.new_zeros(size), left)
    return Recursion(((values - chain.shift) / chain.scale).reshape(size), left)


def _connected(layer: ChainLayer, gradients: Mapping[str, Tensor], delta: Tensor) -> tuple[Tensor, Tensor]:
    """What entered a fully connected layer, and the loss's slope by it."""
    weight, bias = gradients[f"{layer.name}.weight"].double(), gradients.get(f"{layer.name}.bias")
    delta = delta if bias is None else bias.double()
    squared = delta.square().sum(1, keepdim=True).clamp_min(torch.finfo(delta.dtype).tiny)
    return torch.einsum("vo,voi->vi", delta, weight) / squared, delta @ layer.module.weight
