"""Predict from a network alone whether attacks reconstruct its clients' examples."""

import math
from collections import Counter
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fl_privacy.attacks.exact import ExactInversion
from fl_privacy.attacks.exact.first_layer import NotFullyConnectedError, find_patch_embedding
from fl_privacy.attacks.gradient_inversion.other_modalities import search_of
from fl_privacy.models.gradients.hooks import ModuleCall, leaving, owners
from fl_privacy.models.unwrap_model import detached_copy
from fl_privacy.types import ModelState, Observation
from fl_privacy.types.modality import modality_of

Outcome = Literal["reconstructible", "not by these attacks", "unknown"]

_WEIGHTED = (nn.Linear, nn.Conv2d, nn.Embedding)
_KINKED = frozenset({"relu", "leaky_relu", "relu6", "hardtanh", "prelu", "rrelu"})
_OTHERS = frozenset({"silu", "hardswish", "gelu", "mish", "hardsigmoid", "clamp", "clamp_min", "maximum", "where"})
_LARGEST_EXACT, _LEAST_OUTPUTS = 32, 16  # batch of an exact solution behind a ReLU, and outputs for each example
_SOLVED, _TOO_FEW = 0.45, 0.2  # equations for each unknown of a layer: enough for one image, and too few
_DESCENDED, _HOPELESS = 1.4, 0.25  # equations of all layers for each pixel of a batch: enough for descents, too few
_DEEP = 8  # layers with weights behind which no descent here found more than ``_FEW_IMAGES`` behind ReLUs
_REHEARSED = 3  # random images that the exact attack has to solve for
_SHALLOW = 2  # convolutions through which descents are known to go behind ReLUs, whatever the number of equations
_FEW_IMAGES = 4  # images behind a deep network or vision transformer that may be reconstructed together


@dataclass(frozen=True)
class LayerEquations:
    """Numbers of one layer's unknown inputs, and of the equations that a batch's update gives for them."""

    name: str
    kind: str
    unknowns: int  # number of inputs of the layer, over all examples
    gradient: int  # equations of its weight's gradient, bounded by the rank for a linear layer
    outputs: int  # equations of its known outputs, for one image: those with a slope, up to pooling
    equations: int = 0  # equations of all layers with these inputs

    @property
    def ratio(self) -> float:
        return self.equations / max(1, self.unknowns)


@dataclass(frozen=True)
class Prediction:
    """The predicted outcome of the attacks, the decisive layer, and the reason in one sentence."""

    outcome: Outcome
    layer: str
    reason: str
    layers: tuple[LayerEquations, ...] = ()


_Layers = Sequence[LayerEquations]
_Decided = tuple[Outcome, str, str]  # the outcome, the decisive layer, the reason


@dataclass(frozen=True)
class PlannedTraining:
    """Settings of the clients' training that change what an update leaks."""

    batch_size: int = 1
    batch_norm: Literal["eval", "train"] = "eval"  # statistics of norms: fixed ones, or those of the batch
    steps: int = 1
    optimizer: str = "sgd"  # ``sgd``, ``adam`` or ``adamw``; Adam's steps hide the sizes of a gradient

    @property
    def is_gradient(self) -> bool:
        return self.steps == 1 and self.optimizer == "sgd"


class _Called(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__.strip("_"))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def predict(model: nn.Module, shape: Sequence[int], training: PlannedTraining) -> Prediction:
    """Predict the attacks' outcome by counting the equations and unknowns of each layer.

    ``model`` holds the sent values; ``shape`` is (C, H, W) of an image, (F,) of a row or (L,) of a text.
    """
    frozen = next((name for name, value in model.named_parameters() if not value.requires_grad), None)
    model, rng = detached_copy(model).cpu().float().eval(), torch.Generator().manual_seed(0)
    inputs = search_of(model).proxies(model, tuple(shape), rng)[:2]
    watched = {name: module for name, module in model.named_modules() if isinstance(module, _WEIGHTED)}
    with leaving(watched) as calls, _Called() as called:
        model(inputs)
    pairs = zip(calls, [*calls[1:], None], strict=True)
    alone = [_counted(call, following, training.batch_size) for call, following in pairs]
    entering, sums = [call.inputs.data_ptr() for call in calls], Counter[int]()
    for place, own in zip(entering, alone, strict=True):
        sums[place] += own.gradient + own.outputs
    layers = tuple(replace(each, equations=sums[place]) for place, each in zip(entering, alone, strict=True))
    if frozen is not None or not layers:
        why = "Trained linear layers, convolutions or embeddings are expected, without parameters that are held."
        return Prediction("unknown", (frozen or "").rpartition(".")[0], why, layers)
    first, module, pixels = layers[0], calls[0].module, modality_of(model).pixels
    whole = isinstance(module, nn.Linear) and module.in_features == math.prod(shape)
    decided: _Decided
    if whole and training.is_gradient:
        decided = _of_first_linear(module, first, training.batch_size, kinked="relu" in called.names)
    elif first.kind == "embedding" and training.steps == 1:
        decided = "reconstructible", first.name, "Each word that occurs has a row of its own in the update."
    elif not pixels or first.kind == "linear":
        decided = "unknown", first.name, "No exact solution is known for this first layer and training."
    else:
        decided = _of_convolutions(model, layers, shape, training, called.names)
    return Prediction(*decided, layers)


def _counted(call: ModuleCall, following: ModuleCall | None, batch_size: int) -> LayerEquations:
    module, kind = call.module, type(call.module).__name__.lower()
    inputs, outputs = call.inputs[0].numel(), call.output[0].numel()
    gradient, known = next(module.parameters()).numel(), outputs
    if isinstance(module, nn.Linear):
        gradient = min(gradient, batch_size * (inputs + outputs))
    if following is not None:  # one output of each pool, and none where a ReLU is silent
        known = int(min(outputs, following.inputs[0].numel()) * float((following.inputs != 0).float().mean()))
    known = 0 if batch_size > 1 or isinstance(module, nn.Embedding) else known
    return LayerEquations(call.name, kind, batch_size * inputs, gradient, known)


def _of_first_linear(module: nn.Module, first: LayerEquations, size: int, *, kinked: bool) -> _Decided:
    assert isinstance(module, nn.Linear)
    outputs, rank = module.out_features, min(module.weight.shape)
    if module.bias is None:
        return "unknown", first.name, "The first layer has no bias, whose gradient divides the weight's."
    if size == 1:
        return "reconstructible", first.name, "The weight's gradient divided by the bias's is the example."
    if size > rank:
        return "unknown", first.name, f"The gradient has rank {rank} at most, fewer than {size} examples."
    if kinked and size <= min(_LARGEST_EXACT, outputs // _LEAST_OUTPUTS):
        why = f"A ReLU's zeros factor the gradient of {outputs} outputs into {size} examples."
        return "reconstructible", first.name, why
    return "unknown", first.name, f"{outputs} outputs may be too few to factor their gradient into {size} examples."


def _of_convolutions(
    model: nn.Module, layers: _Layers, shape: Sequence[int], training: PlannedTraining, called: Set[str]
) -> _Decided:
    first, size, deep = layers[0], training.batch_size, len(layers) > _DEEP
    norm = next((n for n, each in model.named_modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)), None)
    drawn, patches = training.batch_norm == "train", None
    with torch.enable_grad(), suppress(NotFullyConnectedError):
        patches = find_patch_embedding(model, ModelState.of(model), tuple(shape), fixed_norms=not drawn)
    if patches is not None:
        solved, mixed = size == 1 and training.is_gradient, size > _FEW_IMAGES
        sums = "that of one image's patches" if solved else "a sum over images or steps"
        outcome: Outcome = "reconstructible" if solved else "not by these attacks" if mixed else "unknown"
        return outcome, first.name, f"The position embedding's gradient is {sums}."
    if norm is not None and drawn:
        hopeless = size > _FEW_IMAGES and deep and called & _KINKED and not called & _OTHERS
        but = "running statistics, if uploaded, give them" if size <= _FEW_IMAGES else "batch_norm=eval fixes them"
        why = f"Batch norm in training mode adds the batch's statistics to the unknowns; {but}."
        return "not by these attacks" if hopeless else "unknown", norm, why
    for name, each in owners(model).items():
        sides = [sum(side > 1 for side in value.shape) for value in each.parameters(recurse=False)]
        if max(sides) > 1 and not isinstance(each, _WEIGHTED):
            return "unknown", name, f"The equations of a {type(each).__name__} are not counted."
    if deep:
        return _of_deep(layers, training, called, lambda: _is_solved(model, shape))
    rough, pixels = ", ".join(sorted(called & (_KINKED | _OTHERS))), math.prod(shape)
    share = sum(layer.gradient for layer in layers) / (size * pixels)
    counts = f"All layers together give {share:.2g} equations for each pixel of the batch"
    shallow = sum(layer.kind == "conv2d" for layer in layers) <= _SHALLOW
    alone = size == 1 and share >= 1 and (not rough or (shallow and first.ratio >= _SOLVED))
    if alone or (not rough and training.is_gradient and share >= _DESCENDED):
        return "reconstructible", first.name, f"{counts}, which is enough."
    few = share < _HOPELESS
    why = f"{counts}, which {'is too few' if few else 'may not be enough'}."
    if share >= 1 and rough and not shallow:
        why = f"{counts}, but descents often end early behind {rough} and more than {_SHALLOW} convolutions."
    return "not by these attacks" if few else "unknown", first.name, why


@torch.enable_grad()
def _is_solved(model: nn.Module, shape: Sequence[int]) -> bool:
    seen, parameters = list[Observation](), list(model.parameters())
    for image in search_of(model).proxies(model, tuple(shape), torch.Generator().manual_seed(0))[-_REHEARSED:]:
        loss = nn.functional.cross_entropy(model(image[None]), torch.zeros(1, dtype=torch.long))
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        seen.append(Observation.of_gradients(model, gradients, input_shape=shape, batch_size=1, number=len(seen)))
    return all(one.batch is not None for one in ExactInversion(evaluations=4)(seen, seed=0))


def _of_deep(layers: _Layers, training: PlannedTraining, called: Set[str], is_solved: Callable[[], bool]) -> _Decided:
    worst, size = min(layers, key=lambda layer: layer.ratio), training.batch_size
    no: Outcome = "not by these attacks"
    open_: Outcome = "unknown"
    rules: tuple[tuple[object, Outcome, str], ...] = (
        (not called & _KINKED or called & _OTHERS, open_, "This deep, attacks were measured for ReLUs only"),
        (size > 1, no if size > _FEW_IMAGES else open_, "The outputs of single images, which solve a layer, are mixed"),
        (not training.is_gradient, open_, "Only one step of SGD shows the gradients that solve a layer"),
        (worst.ratio < _TOO_FEW, no, "Too few"),
        (called & {"max_pool2d", "avg_pool2d"}, open_, "Pooling hides the places of a layer's outputs"),
        (worst.ratio < _SOLVED, open_, "Not enough"),
    )
    found = next(((outcome, why) for holds, outcome, why in rules if holds), None)
    if found is None and is_solved():
        found = "reconstructible", "Solved layer by layer, as for random images"
    outcome, why = found or (open_, "Enough, but not solved layer by layer for random images")
    return outcome, worst.name, f"{why}: {worst.equations:,} equations for {worst.unknowns:,} unknowns."
