"""Predict from a network alone, without data or training, whether the attacks here reconstruct its clients' images."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from fl_privacy.attacks.gradient_inversion.other_modalities import search_of
from fl_privacy.models.gradients.hooks import ModuleCall, leaving
from fl_privacy.types.modality import modality_of

Outcome = Literal["reconstructible", "not by these attacks", "unknown"]

_WEIGHTED = (nn.Linear, nn.Conv2d, nn.Embedding)
_KINKED = (nn.ReLU, nn.LeakyReLU, nn.ReLU6)
_NOT_MONOTONE = (nn.SiLU, nn.Hardswish, nn.GELU)
_LARGEST_EXACT, _LEAST_OUTPUTS = 32, 16  # batch of an exact solution behind a ReLU, and outputs for each example
_SOLVED, _TOO_FEW = 0.45, 0.2  # equations for each unknown of a layer: enough for one image, and too few
_DESCENDED, _HOPELESS = 1.4, 0.5  # equations of all layers for each pixel of a batch: enough for a descent, and too few
_DEEP = 8  # layers with weights behind which no descent here found a batch
_FEW_IMAGES = 2  # images of a vision transformer that may be reconstructed together


@dataclass(frozen=True)
class LayerEquations:
    """Equations for the inputs of one layer in the update of a batch."""

    name: str
    kind: str
    unknowns: int  # numbers that enter the layer, of all examples
    gradient: int  # equations of its weight's gradient; its rank bounds those of a linear layer
    outputs: int  # equations of its known outputs, for one image: those with a slope, up to pooling
    positive: bool  # ``True`` if no negative number enters, so that a sum over images can't cancel
    equations: int = 0  # all of the layers that the same numbers enter

    @property
    def ratio(self) -> float:
        return self.equations / max(1, self.unknowns)


@dataclass(frozen=True)
class Prediction:
    """The predicted result of the attacks here, the layer that decides, and the reason in one sentence."""

    outcome: Outcome
    layer: str
    reason: str
    layers: tuple[LayerEquations, ...] = ()


_Decided = tuple[Outcome, LayerEquations | str, str]  # the outcome, the layer that decides or its name, the reason


@dataclass(frozen=True)
class PlannedTraining:
    """The clients' training, as far as it decides what an update shows."""

    batch_size: int = 1
    batch_norm: Literal["eval", "train"] = "eval"  # statistics of norms: fixed ones, or those of the batch
    steps: int = 1
    optimizer: str = "sgd"  # ``sgd``, ``adam`` or ``adamw``; Adam's steps hide the sizes of a gradient

    @property
    def is_gradient(self) -> bool:
        return self.steps == 1 and self.optimizer == "sgd"


@torch.no_grad()
def predict(model: nn.Module, shape: Sequence[int], training: PlannedTraining) -> Prediction:
    """Count equations against unknowns layer by layer, on random inputs.

    ``model`` has the values that are sent; ``shape`` is (C, H, W) of an image, (F,) of a row or (L,) of a text.
    """
    rng = torch.Generator().manual_seed(0)
    inputs = search_of(model).proxies(model, tuple(shape), rng)[:2]
    watched = {name: module for name, module in model.named_modules() if isinstance(module, _WEIGHTED)}
    mode = model.training
    try:
        with leaving(watched) as calls:
            model.eval()(inputs)
    finally:
        model.train(mode)
    pairs = zip(calls, [*calls[1:], None], strict=True)
    alone = [_counted(call, following, training.batch_size) for call, following in pairs]
    entering, sums = [call.inputs.data_ptr() for call in calls], Counter[int]()
    for place, own in zip(entering, alone, strict=True):
        sums[place] += own.gradient + own.outputs
    layers = tuple(replace(each, equations=sums[place]) for place, each in zip(entering, alone, strict=True))
    if not layers:
        return Prediction("unknown", "", "No linear layer, convolution or embedding was called.")
    first, pixels = layers[0], modality_of(model).pixels
    decided: _Decided
    if first.kind == "linear" and training.is_gradient and first.unknowns == training.batch_size * math.prod(shape):
        decided = _of_first_linear(model, first, training.batch_size)
    elif first.kind == "embedding" and training.steps == 1:
        decided = "reconstructible", first, "Each word that occurs has a row of its own in the update."
    elif not pixels:
        decided = "unknown", first, "No exact solution is known for this first layer and training."
    else:
        decided = _of_convolutions(model, layers, math.prod(shape), training)
    outcome, layer, reason = decided
    return Prediction(outcome, layer if isinstance(layer, str) else layer.name, reason, layers)


def _counted(call: ModuleCall, following: ModuleCall | None, batch_size: int) -> LayerEquations:
    """Count the equations of a layer; those of its outputs by what of them enters the ``following`` layer."""
    module, kind = call.module, type(call.module).__name__.lower()
    inputs, outputs = call.inputs[0].numel(), call.output[0].numel()
    gradient, known = next(module.parameters()).numel(), outputs
    if isinstance(module, nn.Linear):
        gradient = min(gradient, batch_size * (inputs + outputs))
    if following is not None:  # one output of each pool, and none where a ReLU is silent
        known = int(min(outputs, following.inputs[0].numel()) * float((following.inputs != 0).float().mean()))
    known = 0 if batch_size > 1 or isinstance(module, nn.Embedding) else known
    return LayerEquations(call.name, kind, batch_size * inputs, gradient, known, bool((call.inputs >= 0).all()))


def _of_first_linear(model: nn.Module, first: LayerEquations, size: int) -> _Decided:
    module = model.get_submodule(first.name)
    assert isinstance(module, nn.Linear)
    outputs, rank = module.out_features, min(module.weight.shape)
    if module.bias is None:
        return "unknown", first, "The first layer has no bias, whose gradient divides the weight's."
    if size == 1:
        return "reconstructible", first, "The weight's gradient divided by the bias's is the example."
    if size > rank:
        return "not by these attacks", first, f"The gradient has rank {rank} at most, fewer than {size} examples."
    kinked = any(isinstance(each, nn.ReLU) for each in model.modules())
    if kinked and size <= _LARGEST_EXACT and outputs >= _LEAST_OUTPUTS * size:
        return (
            "reconstructible",
            first,
            f"A ReLU's zeros factor the gradient of {outputs} outputs into {size} examples.",
        )
    return "unknown", first, f"{outputs} outputs may be too few to factor their gradient into {size} examples."


def _of_convolutions(
    model: nn.Module, layers: Sequence[LayerEquations], pixels: int, training: PlannedTraining
) -> _Decided:
    first, size, deep = layers[0], training.batch_size, len(layers) > _DEEP
    kinds = list(model.named_modules())
    norm = next((name for name, each in kinds if isinstance(each, nn.modules.batchnorm._BatchNorm)), None)
    if norm is not None and training.batch_norm == "train":
        why = "Batch norm in training mode adds the batch's statistics to the unknowns; batch_norm=eval fixes them."
        return "not by these attacks" if deep else "unknown", norm, why
    module, normed = model.get_submodule(first.name), any(isinstance(each, nn.LayerNorm) for _, each in kinds)
    if normed and isinstance(module, nn.Conv2d) and module.kernel_size == module.stride:
        solved, mixed = size == 1 and training.is_gradient, size > _FEW_IMAGES
        outcome: Outcome = "reconstructible" if solved else "not by these attacks" if mixed else "unknown"
        sums = "that of one image's patches" if solved else "a sum over images or steps"
        return outcome, first, f"The position embedding's gradient is {sums}."
    if deep:
        return _of_deep(model, layers, training)
    smooth = not any(isinstance(each, (*_KINKED, *_NOT_MONOTONE)) for _, each in kinds)
    each = sum(layer.gradient for layer in layers) / (size * pixels)
    counts = f"all layers give {each:.2g} equations for each pixel of the batch"
    alone = size == 1 and each >= 1 and (smooth or first.ratio >= _SOLVED)
    if alone or (smooth and training.is_gradient and each >= _DESCENDED):
        return "reconstructible", first, f"Enough: {counts}."
    few = each < _HOPELESS
    return "not by these attacks" if few else "unknown", first, f"{'Too few' if few else 'Not enough'}: {counts}."


def _of_deep(model: nn.Module, layers: Sequence[LayerEquations], training: PlannedTraining) -> _Decided:
    worst = min(layers, key=lambda layer: layer.ratio)
    counts = f"{worst.equations:,} equations for {worst.unknowns:,} unknowns"
    if training.batch_size > 1:
        return "not by these attacks", worst, f"The outputs of single images, which solve a layer, are mixed: {counts}."
    if any(isinstance(each, _NOT_MONOTONE) for each in model.modules()):
        return "not by these attacks", worst, f"An activation that is not monotone hides a layer's outputs: {counts}."
    if not training.is_gradient:
        return "unknown", worst, "Only one step of SGD shows the gradients that solve a layer."
    if worst.ratio < _TOO_FEW:
        return "not by these attacks", worst, f"Too few: {counts}."
    if any(isinstance(each, nn.MaxPool2d | nn.AvgPool2d) for each in model.modules()):
        return "unknown", worst, "Pooling hides the places of a layer's outputs, which are not solved for."
    return "reconstructible" if worst.ratio >= _SOLVED else "unknown", worst, f"Solved layer by layer: {counts}."
