"""Layers and initializations by name, the base class of image networks, and cuts of models at a layer."""

import inspect
import math
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any, Required, Self, TypedDict, cast

import torch
from torch import Tensor, nn

from fl_privacy import checks
from fl_privacy.errors import UserError
from fl_privacy.models.gradients.hooks import entering, owners, replaced_input

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
}


def activation(name: str) -> nn.Module:
    """Return a layer of the activation ``name``, one of ``ACTIVATIONS``."""
    checks.one_of("model.activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]()


def pooling(name: str, size: int = 2) -> nn.Module:
    """Return a layer for pooling over ``size`` by ``size`` pixels; ``name`` is ``max`` or ``avg``."""
    checks.one_of("model.pooling", name, ("max", "avg"))
    return nn.MaxPool2d(size) if name == "max" else nn.AvgPool2d(size)


class BatchNorm2d(nn.BatchNorm2d):
    """Batch norm without the counter of batches, an integer buffer that a server could not average."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.num_batches_tracked = None

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *lists: Any
    ) -> None:
        state_dict.pop(f"{prefix}num_batches_tracked", None)
        # From version 2 on, PyTorch does not add a counter to values without one.
        super()._load_from_state_dict(state_dict, prefix, {**local_metadata, "version": 2}, *lists)


def norm_2d(name: str, channels: int) -> nn.Module:
    """Return the normalization layer ``name``: ``batch``, ``group`` (up to 32 groups, Wu and He 2018) or ``none``."""
    checks.one_of("model.norm", name, ("batch", "group", "none"))
    if name == "batch":
        return BatchNorm2d(channels)
    if name == "group":
        return nn.GroupNorm(math.gcd(32, channels), channels)
    return nn.Identity()


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether ``model`` has a batch norm layer."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


class InputNormalization(nn.Module):
    """Normalization ``(x - mean) / std`` of images by constants, never exchanged, for each channel or all."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.mean: Tensor = torch.tensor([float(m) for m in mean]).view(-1, 1, 1)
        self.std: Tensor = torch.tensor([float(s) for s in std]).view(-1, 1, 1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.mean, self.std = fn(self.mean), fn(self.std)
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        # no buffers, which functional calls would have to provide
        return (inputs - self.mean.to(inputs.device)) / self.std.to(inputs.device)


def input_normalization(mean: Sequence[float] | None, std: Sequence[float] | None, in_channels: int) -> nn.Module:
    """Return an ``InputNormalization``, or the identity without values; ``UserError`` for a wrong number of values."""
    if mean is None and std is None:
        return nn.Identity()
    mean, std = [0.0] if mean is None else mean, [1.0] if std is None else std
    for name, values in (("mean", mean), ("std", std)):
        if not isinstance(values, Sequence) or len(values) not in (1, in_channels):
            raise UserError(
                f"model.{name} is expected to be a list of 1 or {in_channels} values, but got {values}; try [0.5]."
            )
    checks.number("model.std", min(std), above=0, example=0.25)
    return InputNormalization(mean, std)


class ImageArguments(TypedDict, total=False):
    """Arguments of every image network."""

    in_channels: Required[int]
    image_size: Required[int]
    num_classes: Required[int]
    mean: Sequence[float] | None
    std: Sequence[float] | None
    init: str


class ImageNetwork(nn.Module):
    """Base class of networks for images: normalization, ``features``, flattening, ``classifier``.

    Args:
        mean, std: normalization of the inputs, with one value or one per channel.
        init: name of the initialization, one of ``layers.INITIALIZERS``.
    """

    features: nn.Module
    classifier: nn.Module
    __signature__: inspect.Signature

    def __init__(
        self,
        *,
        in_channels: int,
        image_size: int,
        num_classes: int,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        init: str = "default",
    ) -> None:
        super().__init__()
        require_positive(in_channels=in_channels, image_size=image_size, num_classes=num_classes)
        self.init: str = init
        self.normalize: nn.Module = input_normalization(mean, std, in_channels)

    def __init_subclass__(cls) -> None:
        """Show the arguments of ``ImageNetwork`` in the signature of ``cls``, instead of ``**image``."""
        common, own = (inspect.signature(each.__init__).parameters.values() for each in (ImageNetwork, cls))
        needed, optional = ([p for p in common if (p.default is p.empty) is wanted] for wanted in (True, False))
        named = {p.name: p for p in (*needed, *own, *optional) if p.kind is p.KEYWORD_ONLY}
        cls.__signature__ = inspect.Signature(list(named.values()))

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(self.features(self.normalize(inputs)).flatten(1)))


def hidden_layers(inputs: int, widths: Sequence[int], function: str, *, example: str) -> nn.Sequential:
    """Return linear layers with ``widths`` outputs, each followed by the activation ``function``.

    ``UserError``, which suggests ``example``, unless ``widths`` is a list of whole numbers above 0.
    """
    if not isinstance(widths, Sequence) or isinstance(widths, str):
        raise UserError(f"model.widths is expected to be a list, but got {widths}; try {example}.")
    require_positive(**{f"widths[{i}]": width for i, width in enumerate(widths)})
    pairs = [(nn.Linear(inner, outer), activation(function)) for inner, outer in pairwise([inputs, *widths])]
    return nn.Sequential(*(module for pair in pairs for module in pair))


def resolve_strides(strides: Sequence[int] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``strides``, or ``default`` if they are ``None``; ``UserError`` unless all are whole numbers above 0."""
    if strides is None:
        return default
    if not isinstance(strides, Sequence):  # a single stride is no list of them
        raise UserError(f"model.strides is expected to be a list, but got {strides}; try {list(default)}.")
    return checks.shape("model.strides", strides, example=f"try {list(default)}")


def require_positive(**sizes: int) -> None:
    """Raise ``UserError`` unless every setting in ``sizes`` is a whole number above 0."""
    for name, value in sizes.items():
        checks.whole(f"model.{name}", value, at_least=1, example=8)


def require_pixels(name: str, image_size: int, *, least: int) -> None:
    """Raise ``UserError`` if ``image_size`` is smaller than the model ``name`` needs, ``least`` pixels."""
    if image_size < least:
        raise UserError(
            f"{name} expects images of at least {least}x{least} pixels, but got {image_size}x{image_size};"
            " set data.image_size=32."
        )


Initializer = Callable[[nn.Module, torch.Generator | None], None]
"""Function (model, generator or ``None`` for PyTorch's global one) that sets the values in place."""


def _uniform(bound: float) -> Initializer:
    def fill(model: nn.Module, generator: torch.Generator | None) -> None:
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -bound, bound, generator=generator)

    return fill


def _weights(fill: Callable[..., Tensor], *kinds: type[nn.Module], **options: Any) -> Initializer:
    def filled(model: nn.Module, generator: torch.Generator | None) -> None:
        for layer in model.modules():
            if isinstance(layer, kinds):
                fill(layer.weight, generator=generator, **options)
                if isinstance(layer.bias, Tensor):
                    nn.init.zeros_(layer.bias)

    return filled


INITIALIZERS: dict[str, Initializer] = {
    "default": lambda model, generator: None,
    "uniform_0.5": _uniform(0.5),
    "uniform_0.3": _uniform(0.3),
    "kaiming_uniform": _weights(nn.init.kaiming_uniform_, nn.Conv2d, nn.Linear, nonlinearity="relu"),
    "kaiming_normal_fan_out": _weights(nn.init.kaiming_normal_, nn.Conv2d, mode="fan_out", nonlinearity="relu"),
    "xavier_normal": _weights(nn.init.xavier_normal_, nn.Conv2d, nn.Linear, gain=1.0),
}


def initialize(model: nn.Module, name: str, *, generator: torch.Generator | None = None) -> None:
    """Initialize the parameters of ``model`` in place; ``UserError`` for an unknown ``name``.

    ``default`` keeps the values; ``uniform_0.5`` draws *every* parameter, biases included, from U(-0.5, 0.5) (DLG, Zhu
    et al. 2019), ``uniform_0.3`` from U(-0.3, 0.3) (SPN, Fan et al. 2020). ``kaiming_uniform`` (fan-in) and
    ``xavier_normal`` (gain 1, SAPAG) set the weights of convolutions and linear layers, with zero biases;
    ``kaiming_normal_fan_out`` sets those of convolutions only (He et al. 2015), like torchvision.
    """
    checks.one_of("model.init", name, INITIALIZERS)
    INITIALIZERS[name](model, generator)


NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)


def called_layers(model: nn.Module, image_shape: tuple[int, ...]) -> list[str]:
    """Return the names of modules with parameters of their own, in the order of the pass of an image (C, H, W)."""
    return _order(model, owners(model), image_shape)


def _order(model: nn.Module, modules: dict[str, nn.Module], image_shape: tuple[int, ...]) -> list[str]:
    modes = [(module, module.training) for module in model.modules()]
    with torch.no_grad(), entering(modules) as calls:
        try:
            model.eval()(next(model.parameters()).new_zeros(1, *image_shape))
        finally:
            for module, training in modes:
                module.training = training
    return list(dict.fromkeys(call.name for call in calls))


def cut_layer(model: nn.Module, image_shape: tuple[int, ...], public: Collection[str]) -> str:
    """Return the name of the layer after the last private layer; the second layer if none is private.

    A layer is private if its parameters are not ``public`` (names). Layers are in the order of a forward pass on images
    of ``image_shape``. ``UserError`` if there is no such layer.
    """
    layers = called_layers(model, image_shape)
    owned = {name: model.get_submodule(name).named_parameters(recurse=False) for name in layers}
    private = [name for name in layers if not any(f"{name}.{own}" in public for own, _ in owned[name])]
    behind = layers[layers.index(private[-1]) + 1 :] if private else layers[1:]
    if not behind:
        raise UserError(
            f"A model is expected to have a public layer behind the private ones, but {type(model).__name__} has"
            f" {', '.join(layers)}, of which {', '.join(private) or 'none'} is private; keep earlier layers private."
        )
    return behind[0]


def behind_activation(model: nn.Module, image_shape: tuple[int, ...], public: Collection[str]) -> str:
    """Return the name of the module after the activation that follows the last private layer (FDL-PP, Def. 4).

    A layer is private if its values are not ``public`` (names); if none is, the first one counts as private. Without
    such an activation, the result is that of :func:`cut_layer`.
    """
    layers = called_layers(model, image_shape)
    first = cut_layer(model, image_shape, public)
    last = layers[layers.index(first) - 1]
    leaves = {name: m for name, m in model.named_modules() if name and next(m.children(), None) is None}
    order = _order(model, leaves, image_shape)
    behind = order[order.index(last) + 1 :] if last in order else []
    for name, following in pairwise(behind):
        if type(leaves[name]).__module__ == nn.ReLU.__module__:
            return following
        if name in layers and not isinstance(leaves[name], NORMS):
            break
    return first


class Front(nn.Module):
    """Part of ``model`` (parameters: ``model.NAME``) from images (B, C, H, W) to the input (B, ...) of ``layer``."""

    def __init__(self, model: nn.Module, layer: str) -> None:
        super().__init__()
        if layer not in dict(model.named_modules()):
            raise UserError(
                f"A layer of the model is expected, but {type(model).__name__} has no {layer!r}; name one that it has."
            )
        self.model, self.layer = model, layer

    def forward(self, inputs: Tensor) -> Tensor:
        def stop(given: Tensor) -> Tensor:
            raise _ReachedError(given)

        try:
            with replaced_input(self.model.get_submodule(self.layer), stop):
                self.model(inputs)
        except _ReachedError as reached:
            return cast(Tensor, reached.args[0])
        raise UserError(
            f"{type(self.model).__name__} is expected to call {self.layer} on an image, but does not;"
            " cut the model at a module that is called."
        )


class _ReachedError(Exception):
    """Raised at a layer to end the forward pass; the argument is the layer's input."""


class Rest(nn.Module):
    """Part of ``model`` from ``layer`` on, from the input (B, ...) of the layer to logits (B, K).

    Parameters are called ``model.NAME``. The whole model runs on black images; the given input replaces that of
    ``layer``.
    """

    def __init__(self, model: nn.Module, layer: str, image_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.model, self.layer, self.image_shape = model, layer, image_shape

    def forward(self, features: Tensor) -> Tensor:
        black = features.new_zeros(len(features), *self.image_shape)
        with replaced_input(self.model.get_submodule(self.layer), lambda given: features):
            logits: Tensor = self.model(black)
        return logits
