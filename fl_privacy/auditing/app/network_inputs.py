"""Infer what a network takes and how it is trained: its input's shape, drawn examples, and its loss."""

import ast
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fl_privacy.auditing.app import stand_in
from fl_privacy.auditing.app.defaults import assigned
from fl_privacy.auditing.app.scripts import SourceFile, called, constant, dotted
from fl_privacy.auditing.instrument.keras_layers import is_keras
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import Failure, attempt

SIDES = (28, 32, 64, 96, 128, 224, 16, 48, 50, 100, 112, 150, 160, 180, 200, 256, 299, 300)
LENGTHS, LONGEST = (16, 32, 64, 100, 128, 187, 256, 512, 1000, 1024, 2048), 16
"""Sides of images and lengths of sequences in the order in which they are tried, and tokens of a text."""

EXAMPLES, MOST_DRAWN_CLASSES, MOST_LAYERS, MOST_SIZES = 104, 20, 4, 8
"""Numbers of a client's examples, of drawn classes, of layers that may take the input, and of the code's sizes."""

LOSSES: Mapping[str, Sequence[str]] = {
    "cross entropy": ("CrossEntropyLoss", "cross_entropy", "CategoricalCrossentropy", "categorical_crossentropy"),
    "negative log-likelihood": ("NLLLoss", "nll_loss"),
    "binary cross entropy of logits": ("BCEWithLogitsLoss", "binary_cross_entropy_with_logits"),
    "binary cross entropy": ("BCELoss", "binary_cross_entropy", "binary_crossentropy", "BinaryCrossentropy"),
    "mean squared error": ("MSELoss", "mse_loss", "mean_squared_error", "MeanSquaredError", "mse"),
    "mean absolute error": ("L1Loss", "l1_loss", "mean_absolute_error", "mae"),
}
"""Loss -> names in code of PyTorch or Keras, each also with ``Sparse`` or ``sparse_`` before it."""

_OF_NAME = {
    name: loss for loss, names in LOSSES.items() for each in names for name in (each, f"Sparse{each}", f"sparse_{each}")
}
_RESIZES = {"Resize", "CenterCrop", "RandomCrop", "RandomResizedCrop", "resize"}
_SIDE = re.compile(r"(?i)^(img|image|input|target|resize|crop)_?(size|dim|side|height|width|res|resolution|shape)$")
_LENGTH = re.compile(
    r"(?i)^(max_?)?(seq\w*|window|signal|sample|time|segment)_?(len|length|size|steps|points)$|^input_?len(gth)?$"
)
_RATE, _BATCH = re.compile(r"(?i)^(lr|learning_?rate|eta)$"), re.compile(r"(?i)^(train_?)?batch_?size$|^bs$")

Kind = Literal["images", "rows", "windows", "texts"]
Tried = tuple[Kind, tuple[int, ...], int]
"""Kind and shape of inputs without the batch, and the number of tokens of texts, or 0."""


@dataclass(frozen=True, kw_only=True)
class CodeSizes:
    """Sizes and settings that a project's code names: sides of images (H, W), losses, learning rate, batch size."""

    sides: Sequence[tuple[int, int]] = ()
    lengths: Sequence[int] = ()  # numbers of steps of a sequence
    losses: Counter[str] = field(default_factory=Counter)
    rate: float = 0.01
    batch: int = 8

    @classmethod
    def of(cls, files: Iterable[SourceFile], drawing: stand_in.Drawing, config: Mapping[str, object]) -> "CodeSizes":
        """Collect sizes and losses from code (``files``), run ``config``, and the example's shape in ``drawing``."""
        sides, losses = list[Any](), Counter[str]()
        pairs: list[tuple[str, Any]] = [(key.replace("-", "_"), value) for key, value in config.items()]
        texts = list[str]()
        for node in (node for file in files for node in ast.walk(file.tree)):
            pairs += [(name, constant(value)) for name, value in assigned(node)]
            if isinstance(node, ast.Call):
                first = constant(node.args[0]) if node.args else None
                sides += (
                    [first] if called(node) in _RESIZES and (called(node) != "resize" or type(first) is tuple) else []
                )
                losses[_OF_NAME.get(called(node), "")] += 1
                pairs += [(each.arg or "", constant(each.value)) for each in node.keywords]
                if called(node) == "add_argument":
                    flags = [str(constant(each)).lstrip("-").replace("-", "_") for each in node.args]
                    default = [constant(each.value) for each in node.keywords if each.arg == "default"]
                    pairs += [(flag, value) for flag in flags for value in default]
                texts.append(dotted(node.func))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 60:
                losses[_OF_NAME.get(node.value, "")] += 1
                texts.append(node.value)

        def numbers(named: re.Pattern[str], kind: type[int | float], most: int) -> list[Any]:
            return [value for key, value in pairs if named.match(key) and type(value) is kind and 0 < value <= most]

        sides += [value for key, value in pairs if _SIDE.match(key)]
        del losses[""]
        entry = [drawing.entry[:2]] if len(drawing.entry) == 3 and drawing.entry[-1] <= 4 else []
        known = next((s for pattern, s, *_ in stand_in.PICTURES if any(pattern.search(t.lower()) for t in texts)), None)
        pairs_of = dict[tuple[int, int], None]()
        for value in (*entry, *sides, *([] if known is None else [known.side])):
            plain = [value, value] if type(value) is int else list(value) if isinstance(value, list | tuple) else []
            if len(plain) >= 2 and all(type(each) is int for each in plain) and all(4 <= n <= 512 for n in plain[:2]):
                pairs_of[plain[0], plain[1]] = None
        return cls(
            sides=list(pairs_of)[:MOST_SIZES],
            lengths=list(dict.fromkeys(numbers(_LENGTH, int, LENGTHS[-1])))[:MOST_SIZES],
            losses=losses,
            rate=next(iter(numbers(_RATE, float, 10)), 0.01),
            batch=next(iter(numbers(_BATCH, int, 32)), 8),
        )


@dataclass(frozen=True, kw_only=True)
class Task:
    """A network's inputs, of ``shape`` without the batch, their kind, its number of classes, and its loss."""

    kind: Kind
    shape: tuple[int, ...]
    classes: int
    loss: str
    inputs_are_targets: bool
    last: bool  # ``True`` if the channels of images come last
    symbols: int  # number of tokens, for texts
    outputs: tuple[int, ...]  # shape of an example's output

    @property
    def in_words(self) -> str:
        size = " x ".join(map(str, self.shape))
        return f"random {self.kind} of {size} {'tokens' if self.kind == 'texts' else 'values'}"

    def draw(self, number: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Draw ``number`` examples: inputs (N, ...), images in [0, 1], and targets."""
        classes = max(1, min(self.classes, MOST_DRAWN_CLASSES))
        labels, order = torch.from_numpy(stand_in.labels(number, classes)), torch.from_numpy(rng.permutation(number))
        if self.kind == "images":
            *sides, channels = self.shape if self.last else (*self.shape[1:], self.shape[0])
            drawn = stand_in.pictures(number, stand_in.Shape(side=max(sides), channels=channels, classes=classes), rng)
            images = torch.from_numpy(drawn[:, : sides[0], : sides[1]]).float() / 255
            inputs = images if self.last else images.permute(0, 3, 1, 2).contiguous()
        elif self.kind == "texts":
            inputs = torch.from_numpy(rng.integers(1, max(2, self.symbols), (number, *self.shape)))
        else:
            drawn = stand_in.numbers(number, math.prod(self.shape), classes, rng)
            inputs = torch.from_numpy(drawn).float().reshape(number, *self.shape)
        inputs = inputs[order]
        return inputs, inputs if self.inputs_are_targets else self._targets(number, labels[order], rng)

    def _targets(self, number: int, labels: Tensor, rng: np.random.Generator) -> Tensor:
        if self.loss in _OF_CLASSES:
            inner = self.outputs[:-1] if len(self.outputs) == 2 else self.outputs[1:]
            of_parts = torch.from_numpy(rng.integers(0, max(1, self.classes), (number, *inner)))
            return of_parts if inner else labels
        if self.loss.startswith("binary"):
            return torch.from_numpy(rng.integers(0, 2, (number, *self.outputs))).float()
        return torch.from_numpy(rng.normal(size=(number, *self.outputs))).float()

    def loss_of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss (scalar) of a batch's ``outputs``."""
        if self.loss in _OF_CLASSES and outputs.dim() == 3:
            outputs = outputs.movedim(-1, 1)
        return _MEANS[self.loss](outputs, targets)


_MEANS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": functional.cross_entropy,
    "cross entropy of probabilities": lambda outputs, targets: functional.nll_loss(
        outputs.clamp_min(1e-7).log(), targets
    ),
    "negative log-likelihood": functional.nll_loss,
    "binary cross entropy of logits": functional.binary_cross_entropy_with_logits,
    "binary cross entropy": lambda outputs, targets: functional.binary_cross_entropy(
        outputs.clamp(1e-6, 1 - 1e-6), targets
    ),
    "mean squared error": functional.mse_loss,
    "mean absolute error": functional.l1_loss,
}
_OF_CLASSES = {"cross entropy", "cross entropy of probabilities", "negative log-likelihood"}


def first_tensor(made: Any) -> Tensor:
    """Return the main tensor in a network's output ``made``, such as its logits; ``UserError`` if it has none."""
    while not isinstance(made, Tensor):
        values = made.values() if isinstance(made, Mapping) else made if isinstance(made, list | tuple) else ()
        made = getattr(made, "logits", next(iter(values), None))
        if made is None:
            raise UserError("its output is no tensor")
    return made


def task_for(network: nn.Module, sizes: CodeSizes, built_losses: Counter[str]) -> Task:
    """Find inputs that ``network`` takes, and a loss for its outputs; ``UserError`` with the reason if none fit.

    ``sizes``: sizes and losses that the app's code names. ``built_losses``: loss class -> how often the code built it.
    """
    if not any(parameter.requires_grad for parameter in network.parameters()) and not is_keras(network):
        raise UserError("it has no parameters that train")
    given = attempt(partial(inspect.signature, network.forward))
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    those = [] if isinstance(given, Failure) else given.parameters.values()
    needed = sum(each.kind in kinds and each.default is each.empty for each in those)
    if not is_keras(network) and needed > 1:
        raise UserError(f"its forward takes {needed} inputs")
    losses = [_OF_NAME[name] for name, _ in built_losses.most_common() if name in _OF_NAME]
    losses += [name for name, _ in sizes.losses.most_common()]
    said = "no usual input fits it"
    for tried in _tried(network, sizes):
        inputs = torch.randint(0, tried[2], (2, *tried[1])) if tried[2] else torch.rand(2, *tried[1])
        made = attempt(partial(_outputs, network, inputs))
        if isinstance(made, Failure) and made.reason.startswith("TimeoutError"):
            raise UserError(f"its forward does not end: {made.reason}")
        if isinstance(made, Failure):
            said = f"no usual input fits it ({made.reason[:160]})"
        elif made.dim() and len(made) == 2 and made.is_floating_point() and made[0].numel():
            return _task(network, tried, inputs, made, losses)
    raise UserError(said)


def _outputs(network: nn.Module, inputs: Tensor) -> Tensor:
    training = network.training
    with torch.no_grad():
        try:
            return first_tensor(network.eval()(inputs))
        finally:
            network.train(training)


def _task(network: nn.Module, tried: Tried, inputs: Tensor, outputs: Tensor, losses: Sequence[str]) -> Task:
    kind, shape, symbols = tried
    several = outputs.dim() > 1 and outputs.shape[-1 if outputs.dim() <= 3 else 1] > 1
    shares = bool(((outputs >= 0) & (outputs <= 1)).all())
    same = not symbols and outputs.shape == inputs.shape
    fits = {
        "cross entropy": several,
        "negative log-likelihood": several and bool((outputs <= 0).all()),
        "binary cross entropy of logits": True,
        "binary cross entropy": shares,
        "mean squared error": True,
        "mean absolute error": True,
    }
    of_one = "binary cross entropy" if shares else "mean squared error"
    usual = "mean squared error" if same else "cross entropy" if several else of_one
    losses = sorted(losses, key=lambda loss: (loss in _OF_CLASSES) == (same or not several))
    loss = next((each for each in losses if fits[each] and (several or each not in _OF_CLASSES)), usual)
    if loss == "binary cross entropy of logits" and shares and not several:
        loss = "binary cross entropy"
    if loss == "cross entropy" and is_keras(network) and shares:
        loss = "cross entropy of probabilities"
    classes = (
        int(outputs.shape[-1 if outputs.dim() <= 3 else 1]) if loss in _OF_CLASSES else 1 + loss.startswith("binary")
    )
    return Task(
        kind=kind, shape=shape, classes=classes, loss=loss, symbols=symbols, last=is_keras(network),
        inputs_are_targets=same and loss not in _OF_CLASSES, outputs=tuple(outputs.shape[1:]),
    )  # fmt: skip


def _tried(network: nn.Module, sizes: CodeSizes) -> Iterator[Tried]:
    sides = [*sizes.sides, *((side, side) for side in SIDES)]
    lengths = [*sizes.lengths, *LENGTHS]
    if is_keras(network):
        yield from _tried_of_keras(network, sides)
        return
    layers = [each for each in network.modules() if next(each.parameters(recurse=False), None) is not None]
    lazy = [each for each in network.modules() if isinstance(each, nn.modules.lazy.LazyModuleMixin)]
    for layer in [*lazy, *layers][:MOST_LAYERS]:
        if isinstance(layer, nn.Conv2d | nn.LazyConv2d):
            for channels in [layer.in_channels] if layer.in_channels else [3, 1]:
                yield from (("images", (channels, *pair), 0) for pair in sides)
        elif isinstance(layer, nn.Conv1d):
            alone = layer.in_channels == 1
            yield from (("windows", (layer.in_channels, length), 0) for length in lengths)
            yield from (("rows", (length,), 0) for length in lengths if alone)
            yield from (("windows", (length, layer.in_channels), 0) for length in lengths)
        elif isinstance(layer, nn.Conv3d):
            yield from (("windows", (layer.in_channels, side, side, side), 0) for side in (16, 32, 64))
        elif isinstance(layer, nn.Embedding):
            yield from (("texts", (length,), layer.num_embeddings) for length in (*sizes.lengths, LONGEST, *LENGTHS))
        elif isinstance(layer, nn.RNNBase):
            yield from (("windows", (length, layer.input_size), 0) for length in lengths)
            yield ("rows", (layer.input_size,), 0)
        elif not isinstance(layer, nn.BatchNorm2d):
            normal = (getattr(layer, "normalized_shape", None) or (0,))[-1]
            sizes_of = (getattr(layer, name, None) for name in ("in_features", "num_features", "embed_dim"))
            width = next((size for size in sizes_of if isinstance(size, int) and size), normal)
            for channels in (1, 3):
                side = math.isqrt(width // channels)
                if channels * side * side == width and side >= 16:
                    yield ("images", (channels, side, side), 0)
            if width:
                yield ("rows", (width,), 0)
                yield from (("windows", (length, width), 0) for length in lengths)


def _tried_of_keras(network: Any, sides: Sequence[tuple[int, int]]) -> Iterator[Tried]:
    layers = [
        each for each in network._flatten_layers() if hasattr(each, "input_dim") and "Embedding" in str(type(each))
    ]
    shape = attempt(lambda: tuple(network.input_shape[1:]))
    if isinstance(shape, Failure):
        yield from (("images", (*pair, channels), 0) for channels in (3, 1) for pair in sides)
        return
    if layers:
        yield ("texts", tuple(each or LONGEST for each in shape), int(layers[0].input_dim))
    elif len(shape) == 3:
        for pair in sides:
            yield "images", tuple(a or b for a, b in zip(shape, (*pair, 3), strict=True)), 0
    else:
        kind: Kind = "rows" if len(shape) == 1 else "windows"
        yield from ((kind, tuple(each or length for each in shape), 0) for length in LENGTHS)
