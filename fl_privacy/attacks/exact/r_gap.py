"""Solve for one image that entered convolutions, from the last layer back (R-GAP, Zhu and Blaschko 2021)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from fl_privacy.attacks.exact.certificate import model_as_sent
from fl_privacy.attacks.exact.convolution import Convolution, above_noise, solve_inputs
from fl_privacy.attacks.exact.first_layer import probe_first_layer
from fl_privacy.models.gradients.hooks import ModuleCall, leaving, owners
from fl_privacy.types import Observation, Tensors

_SILENT = 1e-5  # outputs of a ReLU up to this share of the largest are zero
_ALIKE = 1e-6
_FARTHEST = 8.0  # largest absolute value by which activations are distinguished; beyond it they are nearly linear


@dataclass(frozen=True, eq=False)
class Activation:
    """A monotonic elementwise activation function, its inverse (of a ReLU, for active elements) and its slope da/dz."""

    value: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def _leaky(slope: float) -> Activation:
    return Activation(
        lambda z: torch.where(z > 0, z, slope * z),
        lambda a: torch.where(a > 0, a, a / slope),
        lambda a: torch.where(a > 0, torch.ones_like(a), slope),
    )


_EDGE = 1e-12
_SCALE, _DEPTH = 1.0507009873554805, 1.0507009873554805 * 1.6732632423543772
"""Slope of SELU above 0, and minus its lower limit (Klambauer et al. 2017, eq. 2)."""

ACTIVATIONS: Sequence[Activation] = (
    Activation(torch.clone, torch.clone, torch.ones_like),
    Activation(
        torch.relu,
        above_noise,
        lambda a: (a > _SILENT * a.flatten(1).amax(1).view(-1, *(1 for _ in a.shape[1:]))).to(a),
    ),
    Activation(torch.sigmoid, lambda a: torch.logit(a, _EDGE), lambda a: a * (1 - a)),
    Activation(torch.tanh, lambda a: torch.atanh(a.clamp(_EDGE - 1, 1 - _EDGE)), lambda a: 1 - a.square()),
    Activation(
        nn.functional.elu,
        lambda a: torch.where(a > 0, a, torch.log1p(a.clamp(_EDGE - 1, 0))),
        lambda a: torch.where(a > 0, 1, 1 + a),
    ),
    Activation(
        nn.functional.softplus, lambda a: a + torch.log(-torch.expm1(-a.clamp_min(_EDGE))), lambda a: -torch.expm1(-a)
    ),
    Activation(
        nn.functional.selu,
        lambda a: torch.where(a > 0, a / _SCALE, torch.log1p((a / _DEPTH).clamp(_EDGE - 1, 0))),
        lambda a: torch.where(a > 0, _SCALE, a + _DEPTH),
    ),
    _leaky(0.01),
)
"""Activations that are distinguished by their outputs; a leaky ReLU of any slope is tried as well."""


def activation_between(output: Tensor, after: Tensor) -> Activation | None:
    """Return the activation function that maps ``output`` to ``after``; ``None`` for anything else."""
    if output.shape[0] != after.shape[0] or output.numel() != after.numel():
        return None
    lowest = output.flatten().argmin()
    slope = float(after.flatten()[lowest] / output.flatten()[lowest])
    for activation in (*ACTIVATIONS, *([_leaky(slope)] if 0 < slope < 1 else [])):
        if torch.allclose(activation.value(output).flatten(1), after.flatten(1), rtol=_ALIKE, atol=_ALIKE):
            return activation
    return None


_MOST = 1 << 15  # largest number of values that enter a convolution; more take longer than a descent
_MOST_NUMBERS = 1 << 26  # largest number of numbers in the equations of a layer, for a victim: half a gigabyte
WRONG = 0.1  # residual share of a layer's equations above which they are not those of one image


@dataclass(frozen=True, eq=False)
class ChainLayer:
    """Layer of a :class:`LayerChain`: shapes of one example's inputs and outputs, and the activation after it."""

    name: str
    module: nn.Conv2d | nn.Linear
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    activation: Activation


@dataclass(frozen=True, eq=False)
class LayerChain:
    """Layers that each take only the previous layer's activations; the first is a convolution.

    ``layers``: from the image (C, H, W) to the first fully connected layer with a bias. The input of the first layer is
    ``shift + scale * pixels``, (C, H, W).
    """

    layers: Sequence[ChainLayer]
    image: tuple[int, ...]
    shift: Tensor
    scale: Tensor

    @property
    def names(self) -> tuple[str, ...]:
        return (*(f"{layer.name}.weight" for layer in self.layers), f"{self.layers[-1].name}.bias")


@torch.no_grad()
def find_chain(observation: Observation) -> LayerChain | None:
    """Find the layers from the image to the first one whose gradients determine its inputs, if any."""
    if observation.upload.num_examples != 1:
        return None
    model = model_as_sent(observation).eval()
    rng = torch.Generator().manual_seed(0)
    image = torch.rand(observation.input_shape, generator=rng, dtype=torch.float64)

    def replaced(module: nn.Module, given: tuple[object, ...], output: Tensor) -> Tensor:
        if not isinstance(module, nn.Conv2d | nn.Linear):
            return output
        # numbers to probe an activation with, of both signs, small and large
        numbers = torch.linspace(-_FARTHEST, _FARTHEST, output.numel(), dtype=output.dtype)
        return numbers[torch.randperm(output.numel(), generator=rng)].view(output.shape).to(output.device)

    with leaving(owners(model), replaced) as calls:
        model(image.to(next(model.parameters()).device)[None])
    uploaded, names = observation.upload.tensors.keys(), [call.name for call in calls]
    own = calls[: 1 + next((k for k, call in enumerate(calls) if _is_start(call, uploaded)), len(calls))]
    if not own or not _is_start(own[-1], uploaded) or any(names.count(call.name) > 1 for call in own):
        return None
    layers = list[ChainLayer]()
    for call, after in pairwise(own):
        linear = isinstance(call.module, nn.Linear) or _is_plain(call.module, call.inputs.shape[1:])
        activation = activation_between(call.output, after.inputs) if linear else None
        layers += [] if activation is None else [_layer(call, activation)]
    layers.append(_layer(own[-1], ACTIVATIONS[0]))
    if len(layers) < len(own) or not isinstance(layers[0].module, nn.Conv2d):
        return None
    if any(len(layer.inputs) != 1 for layer in layers if isinstance(layer.module, nn.Linear)):
        return None
    seen = probe_first_layer(model, observation.assumed(), observation.input_shape)
    chain = LayerChain(layers, observation.input_shape, seen.black.double(), (seen.white - seen.black).double())
    return chain if seen.one_by_one and seen.black.dim() == 3 and uploaded >= set(chain.names) else None


def _is_start(call: ModuleCall, uploaded: Collection[str]) -> bool:
    return isinstance(call.module, nn.Linear) and {f"{call.name}.weight", f"{call.name}.bias"} <= set(uploaded)


def _layer(call: ModuleCall, activation: Activation) -> ChainLayer:
    assert isinstance(call.module, nn.Linear | nn.Conv2d)
    return ChainLayer(call.name, call.module, call.inputs.shape[1:], call.output.shape[1:], activation)


def _is_plain(module: nn.Module, shape: tuple[int, ...]) -> bool:
    if not isinstance(module, nn.Conv2d) or module.groups > 1 or module.padding_mode != "zeros":
        return False
    spans = [step * (taps - 1) for step, taps in zip(module.dilation, module.kernel_size, strict=True)]
    if module.padding == "same" and any(span % 2 for span in spans):
        return False
    small = len(shape) == 3 and torch.Size(shape).numel() <= _MOST
    return small and Convolution(module, shape).numbers <= _MOST_NUMBERS


@torch.no_grad()
def recursed(chain: LayerChain, gradients: Tensors) -> tuple[Tensor, Tensor]:
    """Return the images (V, C, H, W) of V updates of one image each, and the worst layer's relative residual (V,)."""
    last = chain.layers[-1]
    delta = gradients[f"{last.name}.bias"].double()
    values, back = _connected(last, gradients, delta)
    left, known = torch.where(delta.any(1), 0.0, 1.0).to(delta), torch.ones_like(values)
    for layer in reversed(chain.layers[:-1]):
        activation = layer.activation
        outputs = activation.inverse(values.reshape(-1, *layer.outputs))
        slopes = activation.slope(activation.value(outputs)).clamp_min(0) * known.reshape(outputs.shape)
        delta = back.reshape(slopes.shape) * slopes
        if isinstance(layer.module, nn.Linear):
            values, back = _connected(layer, gradients, delta)
            known = torch.ones_like(values)
            continue
        own = Convolution(layer.module, layer.inputs)
        if layer.module.bias is not None:
            outputs = outputs - layer.module.bias[:, None, None]
        gradient = gradients[f"{layer.name}.weight"].double()
        first = layer is chain.layers[0]
        found = solve_inputs(own, outputs, slopes, delta, gradient, smooth=first)
        values, known, back = found.values, found.seen, own.back(delta)
        left = torch.where(known.flatten(1).any(1) if first else found.enough, left.maximum(found.left), 1)
        if not bool((left < WRONG).any()):
            break
    size = len(values), *chain.image
    if values.shape[1:] != chain.shift.shape:  # no victim is solved for down to the image
        return values.new_zeros(size), left
    return ((values - chain.shift) / chain.scale).reshape(size), left


def _connected(layer: ChainLayer, gradients: Mapping[str, Tensor], delta: Tensor) -> tuple[Tensor, Tensor]:
    weight, bias = gradients[f"{layer.name}.weight"].double(), gradients.get(f"{layer.name}.bias")
    delta = delta if bias is None else bias.double()
    squared = delta.square().sum(1, keepdim=True).clamp_min(torch.finfo(delta.dtype).tiny)
    return torch.einsum("vo,voi->vi", delta, weight) / squared, delta @ layer.module.weight
