"""Convert networks and optimizers of Keras 3 on PyTorch to PyTorch's own."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from fl_privacy.errors import UserError

_ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "linear": nn.Identity, "relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "elu": nn.ELU, "selu": nn.SELU,
    "softplus": nn.Softplus, "silu": nn.SiLU, "swish": nn.SiLU, "gelu": nn.GELU, "softsign": nn.Softsign,
    "leaky_relu": lambda: nn.LeakyReLU(0.2), "relu6": nn.ReLU6, "hard_sigmoid": nn.Hardsigmoid,
    "hard_silu": nn.Hardswish, "hard_swish": nn.Hardswish,
}  # fmt: skip
_KERNELS: Mapping[str, tuple[int, ...]] = {"Dense": (1, 0), "Conv2D": (3, 2, 0, 1), "DepthwiseConv2D": (2, 3, 0, 1)}
"""Layer -> order of its kernel's axes in PyTorch."""


def keras_on_torch() -> Any:
    """Return the module ``keras`` if an app imported it and it runs on PyTorch; else ``None``."""
    keras: Any = sys.modules.get("keras")
    backend = getattr(getattr(keras, "config", None), "backend", None)
    return keras if backend is not None and backend() == "torch" else None


def is_keras(module: object) -> bool:
    """Return ``True`` for a layer of Keras on PyTorch."""
    return (keras := keras_on_torch()) is not None and isinstance(module, keras.Layer)


def _has_own_code(layer: Any) -> bool:
    return type(layer).call.__module__.partition(".")[0] != keras_on_torch().__name__


def owner_of(kind: type, name: str) -> type:
    """Return the class of ``kind`` or its bases that defines the method ``name``."""
    return next(each for each in kind.__mro__ if name in vars(each))


def as_optimizer(optimizer: Any, variables: Sequence[Any]) -> torch.optim.Optimizer:
    """Return a PyTorch optimizer that states the settings of a Keras optimizer of ``variables``; it makes no step.

    If PyTorch has no equal optimizer, the class of the result is named like ``RMSprop of Keras``.
    """
    settings, kind = optimizer.get_config(), type(optimizer).__name__
    parameters, lr = [each.value for each in variables], float(f"{float(optimizer.learning_rate):.7g}")
    options = ("weight_decay", "clipnorm", "global_clipnorm", "clipvalue", "use_ema", "gradient_accumulation_steps")
    changed = any(settings.get(name) for name in (*options, "loss_scale_factor"))
    if kind == "SGD" and not changed:
        return torch.optim.SGD(parameters, lr=lr, momentum=settings["momentum"], nesterov=settings["nesterov"])
    if kind == "Adam" and not changed:
        betas = (float(settings["beta_1"]), float(settings["beta_2"]))
        return torch.optim.Adam(parameters, lr=lr, betas=betas, eps=settings["epsilon"], amsgrad=settings["amsgrad"])
    unlike: Any = type(kind + " of Keras", (torch.optim.Optimizer,), {})
    return unlike(parameters, {"lr": lr})


class FromKeras(nn.Module):
    """A Keras network in PyTorch's layers, with copies of its weights; images are (B, C, H, W).

    ``named``: parameter's name in the Keras network -> name here. ``layouts``: parameter's name here -> its axes in
    Keras, in the order of PyTorch.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.layers, self.named, self.layouts = nn.Sequential(), dict[str, str](), dict[str, tuple[int, ...]]()
        self.sources: list[
            tuple[int, ...]
        ] = []  # inputs of each layer: 0 is the network's, n the output of layer n - 1
        self._known = {id(value): name for name, value in network.named_parameters()}
        self._add(network, 0)

    def _add(self, network: Any, entry: int) -> int:
        """Add the layers of ``network``; return the number of the network's output.

        ``entry``: number of the network's input. 0 is the outermost network's input, n + 1 the output of layer n.
        """
        sequential, places, last = type(network).__name__ == "Sequential", dict[int, int](), entry
        layers = [layer for layer in network.layers if type(layer).__name__ != "InputLayer"]
        if _has_own_code(network):
            raise UserError(
                f"{type(network).__name__} is expected without a call method, but the app's has one; drop it"
            )
        if len(layers) + 1 < len(network.layers) or len(getattr(network, "outputs", None) or ()) > 1:
            raise UserError("one input and one output are expected, but the app's Keras network has more; keep one")
        for layer in layers:
            nodes = () if sequential else layer._inbound_nodes
            if not sequential and len(nodes) != 1:
                raise UserError("each Keras layer is expected once, but one is used several times; copy it")
            parents = [each.operation for node in nodes for each in node.parent_nodes]
            before = [entry if type(each).__name__ == "InputLayer" else places.get(id(each), -1) for each in parents]
            if -1 in before:
                raise UserError("only layers are expected, but the Keras network has other operations; use layers")
            before = before or [last]
            last = self._add(layer, before[0]) if hasattr(layer, "layers") else self._add_layer(layer, tuple(before))
            places[id(layer)] = last
        return last

    def _add_layer(self, layer: Any, sources: tuple[int, ...]) -> int:
        for made, weights in _converted(layer):
            place = f"layers.{len(self.layers)}"
            self.layers.append(made)
            self.sources.append(sources)
            sources = (len(self.layers),)
            for name, variable in weights.items():
                value = variable.value.detach().clone()
                order = _KERNELS[type(layer).__name__] if name == "weight" and variable.name == "kernel" else ()
                held = getattr(made, name)
                with torch.no_grad():
                    held.copy_(value.permute(order) if order else value)
                self.named[self._known[id(variable.value)]] = f"{place}.{name}"
                self.layouts |= {f"{place}.{name}": order} if order else {}
        return sources[0]

    def forward(self, inputs: Tensor, **kwargs: Any) -> Tensor:
        outputs = [inputs]
        for layer, sources in zip(self.layers, self.sources, strict=True):
            outputs.append(layer(*(outputs[n] for n in sources)))
        return outputs[-1]


def laid_out(model: Any, name: str, value: Tensor) -> Tensor:
    """Return a client's tensor with its axes ordered as in the parameter ``name`` of ``model``.

    ``name`` is ``parts.<number>.<name>``. Only tensors of Keras and scikit-learn have another order.
    """
    _, place, rest = name.split(".", 2)
    order = getattr(model.parts[int(place)], "layouts", {}).get(rest)
    return value if order is None else value.permute(order).contiguous()


def _converted(layer: Any) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Yield PyTorch layers that together equal a Keras layer, with their weights by name; ``UserError`` if none do."""
    kind, shape = type(layer).__name__, tuple(getattr(layer.input, "shape", ()))
    if len(shape) == 4 and None in shape[1:]:
        raise UserError("one image size is expected, but the app's Keras network takes images of any size; set it")
    weights = {"weight": getattr(layer, "kernel", None), "bias": getattr(layer, "bias", None)}
    if (
        kind in ("Conv2D", "DepthwiseConv2D") and layer.padding == "same" and max(layer.strides) > 1
    ):  # pads more at the end
        sides = zip(shape[1:-1], layer.kernel_size, layer.strides, strict=True)
        above, left = (max((-(-side // stride) - 1) * stride + width - side, 0) for side, width, stride in sides)
        yield nn.ZeroPad2d((left // 2, left - left // 2, above // 2, above - above // 2)), {}
    if kind == "BatchNormalization":
        names = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}
        weights = {name: getattr(layer, own) for name, own in names.items()}
    usual = getattr(layer, "data_format", "channels_last") == "channels_last" and not _has_own_code(layer)
    made = _made(layer, kind, shape) if usual else None
    if made is None:
        raise UserError(f"the app's Keras layer {kind} is not supported; use one that PyTorch has, too")
    yield made, {name: weight for name, weight in weights.items() if weight is not None}
    name = getattr(getattr(layer, "activation", None), "__name__", "linear")
    if name != "softmax" and name not in _ACTIVATIONS:
        raise UserError(f"the app's Keras activation {name} is not supported; use relu or another that PyTorch has")
    if name != "linear":
        yield nn.Softmax(1 if len(shape) == 4 else -1) if name == "softmax" else _ACTIVATIONS[name](), {}


def _made(layer: Any, kind: str, shape: tuple[int, ...]) -> nn.Module | None:
    made: nn.Module | None = _PLAIN[kind](layer) if kind in _PLAIN else None
    match kind:
        case "Dense" if len(shape) <= 3:
            made = nn.Linear(shape[-1], layer.units, bias=layer.use_bias)
        case "Conv2D" | "DepthwiseConv2D" if getattr(layer, "depth_multiplier", 1) == 1:
            padding: Any = "same" if layer.padding == "same" and max(layer.strides) == 1 else 0
            filters, groups = (shape[-1], shape[-1]) if kind[0] == "D" else (layer.filters, layer.groups)
            sizes = layer.kernel_size, layer.strides, padding, layer.dilation_rate, groups
            made = nn.Conv2d(shape[-1], filters, *sizes, bias=layer.use_bias)
        case "BatchNormalization" if len(shape) in (2, 4) and layer.axis in (-1, len(shape) - 1):
            norm = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
            made = norm(shape[-1], eps=layer.epsilon, momentum=1 - layer.momentum)
        case "Reshape" if tuple(layer.target_shape) == {3: (*shape[1:], 1), 2: (1, 1, *shape[1:])}.get(len(shape)):
            made = nn.Unflatten(1, (layer.target_shape[-1], *layer.target_shape[: 4 - len(shape)]))
        case "Add" | "Multiply" | "Concatenate" if len(axes := {len(each.shape) for each in layer.input}) == 1:
            made = _Joined(kind) if getattr(layer, "axis", -1) in (-1, max(axes) - 1) else None
        case "MaxPooling2D" | "AveragePooling2D":
            cut = any(side % stride for side, stride in zip(shape[1:-1], layer.strides, strict=True))
            pool: Any = nn.MaxPool2d if kind[0] == "M" else nn.AvgPool2d
            known = layer.padding == "valid" or (not cut and tuple(layer.pool_size) == tuple(layer.strides))
            made = pool(layer.pool_size, layer.strides) if known else None
        case "GlobalAveragePooling2D" | "GlobalMaxPooling2D":
            whole: Any = nn.AdaptiveAvgPool2d if "Average" in kind else nn.AdaptiveMaxPool2d
            made = whole(1) if layer.keepdims else nn.Sequential(whole(1), nn.Flatten())
        case "Rescaling" if isinstance(layer.scale, int | float) and isinstance(layer.offset, int | float):
            made = _Rescaling(float(layer.scale), float(layer.offset))
        case "ReLU" if not layer.threshold and (layer.max_value is None or not layer.negative_slope):
            top, slope = layer.max_value, float(layer.negative_slope or 0.0)
            made = nn.LeakyReLU(slope) if top is None else nn.Hardtanh(0.0, float(top))
        case "Softmax" if layer.axis in (-1, len(shape) - 1):
            made = nn.Softmax(1 if len(shape) == 4 else -1)
    return made


class _Flatten(nn.Flatten):
    """Flattens images in the order of Keras, whose channels come last."""

    def forward(self, inputs: Tensor) -> Tensor:
        last = inputs.movedim(1, -1) if inputs.dim() == 4 and inputs.shape[1] > 1 else inputs
        return last.flatten(1)


class _Joined(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        if self.kind == "Concatenate":
            return torch.cat([first, *others], 1 if first.dim() == 4 else -1)
        return reduce(torch.add if self.kind == "Add" else torch.mul, others, first)


class _Rescaling(nn.Module):
    def __init__(self, scale: float, offset: float) -> None:
        super().__init__()
        self.scale, self.offset = scale, offset

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * inputs + self.offset


_PLAIN: Mapping[str, Callable[[Any], nn.Module]] = {
    "Activation": lambda layer: nn.Identity(),
    "Dropout": lambda layer: nn.Dropout(layer.rate),
    "ELU": lambda layer: nn.ELU(float(layer.alpha)),
    "Flatten": lambda layer: _Flatten(),
    "LeakyReLU": lambda layer: nn.LeakyReLU(float(layer.negative_slope)),
    "ZeroPadding2D": lambda layer: nn.ZeroPad2d((*layer.padding[1], *layer.padding[0])),
}
"""Layers that are converted for any shape of input."""
