"""Convert networks and optimizers of Keras 3 on PyTorch to PyTorch's own."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import attrgetter
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
_KERNELS: Mapping[str, tuple[int, ...]] = {
    "Dense": (1, 0), "Conv1D": (2, 1, 0), "Conv2D": (3, 2, 0, 1), "DepthwiseConv2D": (2, 3, 0, 1),
}  # fmt: skip
"""Layer -> order of its kernel's axes in PyTorch."""
_RECURRENT, _WEIGHTS = ("LSTM", "GRU", "SimpleRNN"), ("kernel", "recurrent_kernel", "bias")
_SIDES = ("forward_layer", "backward_layer")


def keras_on_torch() -> Any:
    """Return the module ``keras`` if an app imported it and it runs on PyTorch; else ``None``."""
    keras: Any = sys.modules.get("keras")
    backend = getattr(getattr(keras, "config", None), "backend", None)
    return keras if backend is not None and backend() == "torch" else None


def backend_blamed(errors: Iterable[str]) -> list[str]:
    """Return one sentence of advice if Keras runs on PyTorch and one of ``errors`` may come from that; else nothing."""
    blamed = keras_on_torch() is not None and any(re.search("(?i)keras|torch|backend", each) for each in errors)
    return ["Keras ran on PyTorch, which may have caused an error; KERAS_BACKEND=tensorflow avoids it."] * blamed


def is_keras(module: object) -> bool:
    """Return whether this is a Keras layer on PyTorch."""
    return (keras := keras_on_torch()) is not None and isinstance(module, keras.Layer)


def _has_own_code(layer: Any) -> bool:
    return type(layer).call.__module__.partition(".")[0] != keras_on_torch().__name__


def adds_channel(network: Any) -> bool:
    """Return whether a Keras network takes images, so that gray ones need an added channel."""
    return len(getattr(network, "input_shape", None) or ()) == 4


def owner_of(kind: type, name: str) -> type:
    """Return the class among ``kind`` and its bases that defines the method ``name``."""
    return next(each for each in kind.__mro__ if name in vars(each))


def as_optimizer(optimizer: Any, variables: Sequence[Any]) -> torch.optim.Optimizer:
    """Return a PyTorch optimizer with a Keras optimizer's settings, to be read only: it makes no step.

    If PyTorch has no equal optimizer, the class of the result has a name such as ``RMSprop of Keras``.
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


def state_taken(optimizer: Any) -> Callable[[], Any]:
    """Set a Keras optimizer's state, such as momentum, to zero; return a function that puts it back."""
    held = getattr(optimizer, "variables", ())
    held = [(each, each.numpy().copy()) for each in held if each is not optimizer._learning_rate]
    for each, value in held:
        each.assign(value * 0)
    return lambda: [each.assign(value) for each, value in held]


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
        self._adds_channel = adds_channel(network)
        self._add(network, 0)

    def _add(self, network: Any, entry: int) -> int:
        """Add the layers of ``network``; ``entry``: number of the tensor that they take. Return that of the output."""
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
        shape = tuple(getattr(layer.input, "shape", ()))
        if type(layer).__name__ == "TimeDistributed" and type(layer.layer).__name__ == "Dense":
            layer = layer.layer
        for made, weights in _converted(layer, shape):
            place = f"layers.{len(self.layers)}"
            self.layers.append(made)
            self.sources.append(sources)
            sources = (len(self.layers),)
            for name, variable in weights.items():
                value = variable.value.detach().clone()
                order = _KERNELS[type(layer).__name__] if name == "weight" and variable.name == "kernel" else ()
                held = attrgetter(name)(made)
                with torch.no_grad():
                    held.copy_(value.permute(order) if order else value)
                self.named[self._known[id(variable.value)]] = f"{place}.{name}"
                self.layouts |= {f"{place}.{name}": order} if order else {}
        return sources[0]

    def forward(self, inputs: Tensor, **kwargs: Any) -> Tensor:
        outputs = [inputs[:, None] if self._adds_channel and inputs.dim() == 3 else inputs]
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


def _converted(layer: Any, shape: tuple[int, ...]) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Yield PyTorch layers that together equal a Keras layer, with their weights by name; ``UserError`` if none do.

    ``shape``: shape of the input, with the batch's size, and channels last.
    """
    kind, padding = type(layer).__name__, getattr(layer, "padding", "")
    strided = kind in ("Conv1D", "Conv2D", "DepthwiseConv2D") and padding == "same" and max(layer.strides) > 1
    if None in shape[1:] and (len(shape) == 4 or strided):
        what = "image" if len(shape) == 4 else "window"
        raise UserError(f"one {what} size is expected, but the app's Keras network takes {what}s of any size; set it")
    along = kind.endswith("1D") or (kind == "BatchNormalization" and len(shape) == 3)  # windows, with channels last
    if along:
        yield _turned(), {}
    if strided:  # pads more at the end
        sides = zip(shape[1:-1], layer.kernel_size, layer.strides, strict=True)
        each = [max((-(-side // stride) - 1) * stride + width - side, 0) for side, width, stride in sides]
        yield _padding([(pad // 2, pad - pad // 2) for pad in each]), {}
    elif padding == "causal":
        yield _padding([((layer.kernel_size[0] - 1) * layer.dilation_rate[0], 0)]), {}
    usual = getattr(layer, "data_format", "channels_last") == "channels_last" and not _has_own_code(layer)
    made = _made(layer, kind, shape) if usual else None
    if made is None:
        raise UserError(f"the app's Keras layer {kind} is not supported; use one that PyTorch has, too")
    weights = {name: attrgetter(own)(layer) for name, own in _names(layer, kind).items()}
    yield made, {name: weight for name, weight in weights.items() if weight is not None}
    if along and getattr(layer, "keepdims", True):
        yield _turned(), {}
    own = None if isinstance(made, _Recurrent) else getattr(layer, "activation", None)
    name = getattr(own, "__name__", "linear")
    if name != "linear":
        yield nn.Softmax(1 if len(shape) == 4 else -1) if name == "softmax" else _activation(own), {}


def _names(layer: Any, kind: str) -> dict[str, str]:
    if kind == "BatchNormalization":
        return {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}
    if kind == "LayerNormalization":
        return {"weight": "gamma", "bias": "beta"}
    if kind in _RECURRENT:
        return {name: f"cell.{name}" for name in _WEIGHTS}
    if kind == "Bidirectional":
        return {f"{side}.{name}": f"{side}.cell.{name}" for side in _SIDES for name in _WEIGHTS}
    return {name: own for name, own in {"weight": "kernel", "bias": "bias"}.items() if hasattr(layer, own)}


def _activation(function: Any) -> nn.Module:
    if (name := getattr(function, "__name__", "linear")) not in _ACTIVATIONS:
        raise UserError(f"the app's Keras activation {name} is not supported; use relu or another that PyTorch has")
    return _ACTIVATIONS[name]()


def _padding(sides: Sequence[tuple[int, int]]) -> nn.Module:
    amounts = tuple(amount for side in reversed(sides) for amount in side)
    make: Any = nn.ZeroPad1d if len(sides) == 1 else nn.ZeroPad2d
    made: nn.Module = make(amounts)
    return made


def _made(layer: Any, kind: str, shape: tuple[int, ...]) -> nn.Module | None:
    made: nn.Module | None = _PLAIN[kind](layer) if kind in _PLAIN else None
    match kind:
        case "Dense" if len(shape) <= 3:
            made = nn.Linear(shape[-1], layer.units, bias=layer.use_bias)
        case "Conv1D" | "Conv2D" | "DepthwiseConv2D" if getattr(layer, "depth_multiplier", 1) == 1:
            padding: Any = "same" if layer.padding == "same" and max(layer.strides) == 1 else 0
            filters, groups = (shape[-1], shape[-1]) if kind[0] == "D" else (layer.filters, layer.groups)
            sizes = layer.kernel_size, layer.strides, padding, layer.dilation_rate, groups
            conv: Any = nn.Conv1d if len(shape) == 3 else nn.Conv2d
            made = conv(shape[-1], filters, *sizes, bias=layer.use_bias)
        case "LayerNormalization" if len(shape) < 4 and layer.axis in (-1, [-1], len(shape) - 1, [len(shape) - 1]):
            plain = (layer.scale or not layer.center) and not layer.rms_scaling
            made = nn.LayerNorm(shape[-1], layer.epsilon, layer.scale, layer.center) if plain else None
        case "BatchNormalization" if len(shape) in (2, 3, 4) and layer.axis in (-1, len(shape) - 1):
            made = _BatchNorm(shape[-1], eps=layer.epsilon, momentum=1 - layer.momentum)
        case "Reshape" if tuple(layer.target_shape) == {3: (*shape[1:], 1), 2: (1, 1, *shape[1:])}.get(len(shape)):
            made = nn.Unflatten(1, (layer.target_shape[-1], *layer.target_shape[: 4 - len(shape)]))
        case "Reshape" if len(layer.target_shape) < 4 and len(shape) < 5:
            made = _Reshaped(tuple(layer.target_shape))
        case "Add" | "Multiply" | "Concatenate" if len(axes := {len(each.shape) for each in layer.input}) == 1:
            made = _Applied(_JOINED[kind]) if getattr(layer, "axis", -1) in (-1, max(axes) - 1) else None
        case "MaxPooling1D" | "AveragePooling1D" | "MaxPooling2D" | "AveragePooling2D":
            cut = any(side is None or side % stride for side, stride in zip(shape[1:-1], layer.strides, strict=True))
            pool: Any = getattr(nn, f"{kind[:3]}Pool{kind[-2]}d".replace("Ave", "Avg"))
            known = layer.padding == "valid" or (not cut and tuple(layer.pool_size) == tuple(layer.strides))
            made = pool(layer.pool_size, layer.strides) if known else None
        case "GlobalAveragePooling1D" | "GlobalMaxPooling1D" | "GlobalAveragePooling2D" | "GlobalMaxPooling2D":
            whole: Any = getattr(nn, f"Adaptive{'Avg' if 'Average' in kind else 'Max'}Pool{kind[-2]}d")
            made = whole(1) if layer.keepdims else nn.Sequential(whole(1), nn.Flatten())
        case "Rescaling" if isinstance(layer.scale, int | float) and isinstance(layer.offset, int | float):
            scale, offset = float(layer.scale), float(layer.offset)
            made = _Applied(lambda inputs: scale * inputs + offset)
        case "ReLU" if not layer.threshold and (layer.max_value is None or not layer.negative_slope):
            top, slope = layer.max_value, float(layer.negative_slope or 0.0)
            made = nn.LeakyReLU(slope) if top is None else nn.Hardtanh(0.0, float(top))
        case "Softmax" if layer.axis in (-1, len(shape) - 1):
            made = nn.Softmax(1 if len(shape) == 4 else -1)
    return made


class _BatchNorm(nn.modules.batchnorm._BatchNorm):
    """Also normalizes one value of a channel in training mode, as Keras does; PyTorch refuses it."""

    def _check_input_dim(self, inputs: Tensor) -> None: ...

    def forward(self, inputs: Tensor) -> Tensor:
        if (self.training or self.running_mean is None) and inputs[:, 0].numel() == 1:
            return ((inputs - inputs).movedim(1, -1) * self.weight + self.bias).movedim(-1, 1)
        return super().forward(inputs)


class _Flatten(nn.Flatten):
    """Flattens images in the order of Keras, whose channels come last."""

    def forward(self, inputs: Tensor) -> Tensor:
        last = inputs.movedim(1, -1) if inputs.dim() == 4 and inputs.shape[1] > 1 else inputs
        return last.flatten(1)


class _Applied(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


_JOINED: Mapping[str, Callable[..., Tensor]] = {
    "Add": lambda *inputs: reduce(torch.add, inputs),
    "Multiply": lambda *inputs: reduce(torch.mul, inputs),
    "Concatenate": lambda *inputs: torch.cat(inputs, 1 if inputs[0].dim() == 4 else -1),
}


class _Reshaped(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, inputs: Tensor) -> Tensor:
        made = (inputs.movedim(1, -1) if inputs.dim() == 4 else inputs).reshape(len(inputs), *self.shape)
        return made.movedim(-1, 1) if made.dim() == 4 else made


def _turned() -> nn.Module:
    """Return a layer that swaps the last two axes, steps and channels, of windows (B, T, F)."""
    return _Applied(lambda windows: windows.mT)


class _Recurrent(nn.Module):
    """A recurrent layer with its weights laid out as in Keras: gates i, f, c, o in LSTM, and z, r, h in GRU."""

    kernel: nn.Parameter
    recurrent_kernel: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.kind, cell = type(layer).__name__, layer.cell
        for name in _WEIGHTS:
            held = getattr(cell, name)
            self.register_parameter(name, None if held is None else nn.Parameter(held.value.detach().clone()))
        self.backwards, self.whole = layer.go_backwards, layer.return_sequences
        self.reset_after = getattr(cell, "reset_after", False)
        self.dropout, self.activation = nn.Dropout(cell.dropout), _activation(cell.activation)
        self.gate = _activation(getattr(cell, "recurrent_activation", None))

    @staticmethod
    def equals(layer: Any) -> bool:
        known = type(layer).__name__ in _RECURRENT and not _has_own_code(layer)
        return known and not (layer.stateful or layer.return_state or layer.cell.recurrent_dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        windows = inputs.flip(1) if self.backwards else inputs
        windows = windows * self.dropout(torch.ones_like(windows[:, :1]))  # one mask for all steps
        bias, again = (self.bias, None) if self.bias is None or self.bias.dim() == 1 else self.bias.unbind()
        entered = windows @ self.kernel
        entered = entered if bias is None else entered + bias
        state = carry = entered.new_zeros(len(inputs), len(self.recurrent_kernel))
        states = []
        for each in entered.unbind(1):
            state, carry = self._step(each, state, carry, again)
            states.append(state)
        return torch.stack(states, 1) if self.whole else state

    def _step(self, entered: Tensor, state: Tensor, carry: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        inner = state @ self.recurrent_kernel
        inner = inner if bias is None else inner + bias
        if self.kind == "SimpleRNN":
            return self.activation(entered + inner), carry
        if self.kind == "LSTM":
            i, f, c, o = (entered + inner).chunk(4, -1)
            carry = self.gate(f) * carry + self.gate(i) * self.activation(c)
            return self.gate(o) * self.activation(carry), carry
        (z, r, h), (inner_z, inner_r, inner_h) = entered.chunk(3, -1), inner.chunk(3, -1)
        z, r = self.gate(z + inner_z), self.gate(r + inner_r)
        inner_h = r * inner_h if self.reset_after else (r * state) @ self.recurrent_kernel.chunk(3, -1)[-1]
        return z * state + (1 - z) * self.activation(h + inner_h), carry


class _Bidirectional(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.forward_layer, self.backward_layer = _Recurrent(layer.forward_layer), _Recurrent(layer.backward_layer)

    @staticmethod
    def equals(layer: Any) -> bool:
        return layer.merge_mode == "concat" and all(_Recurrent.equals(getattr(layer, side)) for side in _SIDES)

    def forward(self, inputs: Tensor) -> Tensor:
        there, back = self.forward_layer(inputs), self.backward_layer(inputs)
        return torch.cat([there, back.flip(1) if self.forward_layer.whole else back], -1)


_PLAIN: Mapping[str, Callable[[Any], nn.Module | None]] = {
    **dict.fromkeys(_RECURRENT, lambda layer: _Recurrent(layer) if _Recurrent.equals(layer) else None),
    "Bidirectional": lambda layer: _Bidirectional(layer) if _Bidirectional.equals(layer) else None,
    "Activation": lambda layer: nn.Identity(),
    "Dropout": lambda layer: nn.Dropout(layer.rate),
    "ELU": lambda layer: nn.ELU(float(layer.alpha)),
    "Flatten": lambda layer: _Flatten(),
    "RepeatVector": lambda layer: nn.Sequential(nn.Unflatten(1, (-1, 1)), nn.Upsample(scale_factor=layer.n), _turned()),
    "SpatialDropout1D": lambda layer: nn.Dropout1d(layer.rate),
    "ZeroPadding1D": lambda layer: _padding([tuple(layer.padding)]),
    "LeakyReLU": lambda layer: nn.LeakyReLU(float(layer.negative_slope)),
    "ZeroPadding2D": lambda layer: _padding(layer.padding),
}
"""Layers that are converted for any shape of input."""
