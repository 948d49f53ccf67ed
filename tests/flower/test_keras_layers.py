"""Keras on PyTorch: its layers as PyTorch's, and its steps as an audit sees them. A double stands for the package."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fl_privacy.auditing.app.bundle import read_app
from fl_privacy.auditing.app.check import reached_by
from fl_privacy.auditing.app.lent import code_of, keras_lent
from fl_privacy.auditing.instrument.keras_layers import FromKeras, as_optimizer, backend_blamed, laid_out
from fl_privacy.auditing.instrument.matching import matched
from fl_privacy.auditing.instrument.watch import OnlyExamples, TrainingWatch
from fl_privacy.auditing.scenario_members import losses_from
from fl_privacy.auditing.scenario_problem import NotAttackedError, WatchedReply, read_problem
from fl_privacy.errors import UserError
from fl_privacy.models.gradients.convolution import _VictimBatchNorm


class Layer(nn.Module):
    def __init__(self, shape: tuple[int | None, ...], **told: Any) -> None:
        super().__init__()
        self.input, self.weights_of = SimpleNamespace(shape=shape), dict[str, Any]()
        vars(self).update(told)

    def add(self, name: str, value: Tensor, *, trained: bool = True) -> None:
        held = nn.Parameter(value, requires_grad=trained)
        self.register_parameter(f"held_{name}", held)
        vars(self)[name] = SimpleNamespace(name=name, value=held)

    def __call__(self, inputs: Any, training: bool = True) -> Any:
        if not isinstance(inputs, Tensor):  # of Keras, whose shape is all that is known
            return nn.Module.__call__(self, inputs)
        return inputs if inputs.is_meta else self.call(inputs)

    def forward(self, inputs: Any) -> Any:
        return inputs

    def call(self, inputs: Tensor) -> Tensor:
        raise NotImplementedError


def activated(layer: Any, outputs: Tensor) -> Tensor:
    return {"relu": torch.relu, "softmax": lambda v: v.softmax(-1), "linear": lambda v: v}[layer.activation.__name__](
        outputs
    )


def named(name: str) -> Any:
    return type(name, (), {"__name__": name})()


def layer_of(kind: str, **told: Any) -> Any:
    return type(kind, (Layer,), {})((None, 4, 4, 3), **told)


class Dense(Layer):
    def __init__(self, width: int, units: int, activation: str = "linear") -> None:
        super().__init__((None, width), units=units, use_bias=True, activation=named(activation))
        self.add("kernel", torch.randn(width, units) / width**0.5)
        self.add("bias", torch.zeros(units))

    def call(self, inputs: Tensor) -> Tensor:
        return activated(self, inputs @ self.kernel.value + self.bias.value)


class Conv2D(Layer):
    def __init__(self, side: int, channels: int, filters: int, strides: int = 1) -> None:
        sizes = {"kernel_size": (3, 3), "strides": (strides, strides), "dilation_rate": (1, 1), "groups": 1}
        told = {"filters": filters, "padding": "same", "data_format": "channels_last", "use_bias": True}
        super().__init__((None, side, side, channels), **sizes, **told, activation=named("relu"))
        self.add("kernel", torch.randn(3, 3, channels, filters) / 3)
        self.add("bias", torch.zeros(filters))

    def call(self, inputs: Tensor) -> Tensor:
        padding = (1, 1, 1, 1) if self.strides == (1, 1) else (0, 1, 0, 1)  # TensorFlow pads an even side behind
        padded = nn.functional.pad(inputs.movedim(-1, 1), padding)
        kernel = self.kernel.value.permute(3, 2, 0, 1)
        made = nn.functional.conv2d(padded, kernel, self.bias.value, self.strides)
        return activated(self, made.movedim(1, -1))


class Flatten(Layer):
    def call(self, inputs: Tensor) -> Tensor:
        return inputs.flatten(1)


class Unknown(Layer):
    def call(self, inputs: Tensor) -> Tensor:
        return inputs


class Sequential(Layer):
    def __init__(self, *layers: Layer) -> None:
        super().__init__(layers[0].input.shape)
        self.layers = nn.ModuleList(layers)

    def call(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


class Optimizer:
    def __init__(self, rate: float, **told: Any) -> None:
        self.learning_rate, self.told, self._trainable_variables = rate, told, list[Any]()

    def get_config(self) -> dict[str, Any]:
        return {"momentum": 0.0, "nesterov": False, **self.told}

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        with torch.no_grad():
            for gradient, variable in zip(grads, trainable_variables, strict=True):
                variable.value -= self.learning_rate * gradient


class SGD(Optimizer):
    pass


class Model:
    def evaluate(self, loader: Any) -> list[int]:
        return [len(rows) for (rows,) in loader]

    predict = evaluate

    def _symbolic_build(self, loader: Any) -> None:
        next(iter(loader))


@pytest.fixture(autouse=True)
def keras(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    config = SimpleNamespace(backend=lambda: "torch")
    package = SimpleNamespace(__name__="tests", Layer=Layer, Optimizer=Optimizer, Model=Model, config=config)
    monkeypatch.setitem(sys.modules, "keras", package)
    yield


def network() -> Sequential:
    flat = Flatten((None, 4, 4, 6))
    return Sequential(Conv2D(8, 3, 4), Conv2D(8, 4, 6, strides=2), flat, Dense(96, 96, "relu"), Dense(96, 3, "softmax"))


def test_layers_compute_the_same_and_square_kernels_are_turned() -> None:
    net, images = network(), torch.rand(5, 8, 8, 3)
    plain = FromKeras(net)
    assert torch.allclose(plain(images.movedim(-1, 1)), net(images), atol=1e-6)
    assert plain.named["layers.3.held_kernel"] == "layers.6.weight"  # behind two convolutions, a padding, activations
    model, kernel = SimpleNamespace(parts=[plain]), net.layers[3].kernel.value
    assert torch.equal(laid_out(model, "parts.0.layers.6.weight", kernel), kernel.T)


class Functional(Sequential):
    """A network of layers that take the outputs of others, by their numbers; without any what enters."""

    def __init__(self, *layers: tuple[Layer, tuple[int, ...]]) -> None:
        super().__init__(*(layer for layer, _ in layers))
        for layer, before in layers:
            parents = [SimpleNamespace(operation=self.layers[n]) for n in before]
            vars(layer)["input"] = [layer.input] * len(before) if len(before) > 1 else layer.input
            vars(layer)["_inbound_nodes"] = [SimpleNamespace(parent_nodes=parents)]


class Depthwise(Layer):
    def __init__(self, channels: int) -> None:
        sizes = {"kernel_size": (3, 3), "strides": (2, 2), "dilation_rate": (1, 1), "depth_multiplier": 1}
        told = {"padding": "valid", "data_format": "channels_last", "use_bias": False, **sizes}
        super().__init__((None, 10, 10, channels), **told)
        self.add("kernel", torch.randn(3, 3, channels, 1))


def test_layers_of_a_graph_take_the_outputs_of_others() -> None:
    entry, depthwise = type("InputLayer", (Layer,), {})((None, 8, 8, 4)), type("DepthwiseConv2D", (Depthwise,), {})(4)
    relu = layer_of("ReLU", max_value=0.5, threshold=0.0, negative_slope=0.0)
    padded = layer_of("ZeroPadding2D", padding=((0, 1), (1, 2)), data_format="channels_last")
    plain = FromKeras(Functional(
        (entry, ()), (relu, (0,)), (padded, (1,)), (depthwise, (2,)), (layer_of("Multiply"), (3, 3)),
        (layer_of("Add"), (4, 3)), (layer_of("Concatenate", axis=-1), (5, 3)),
    ))  # fmt: skip
    images, kernel = torch.rand(2, 4, 8, 8), depthwise.kernel.value.permute(2, 3, 0, 1)
    made = nn.functional.conv2d(nn.functional.pad(images.clamp(max=0.5), (1, 2, 0, 1)), kernel, stride=2, groups=4)
    assert torch.equal(plain(images), torch.cat([made**2 + made, made], 1))
    assert plain.named["layers.3.held_kernel"] == "layers.2.weight"
    chain = Functional((entry, ()), (layer_of("Flatten"), (0,)))
    chain.layers = chain.layers[1:]  # a class of the app's, derived from Sequential, lists no input
    assert torch.equal(FromKeras(chain)(images), images.movedim(1, -1).flatten(1))
    net = Functional((entry, ()), (layer_of("Flatten"), (0,)))
    vars(net.layers[1])["_inbound_nodes"][0].parent_nodes.append(SimpleNamespace(operation=object()))
    with pytest.raises(UserError, match="Keras network has other operations"):
        FromKeras(net)
    with pytest.raises(UserError, match="one input and one output are expected"):
        FromKeras(Functional((entry, ()), (type("InputLayer", (Layer,), {})((None, 4)), ())))
    net = Functional((entry, ()), (layer_of("Flatten"), (0,)), (layer_of("Flatten"), (0,)))
    vars(net)["outputs"] = [torch.ones(1), torch.ones(1)]
    with pytest.raises(UserError, match="one input and one output are expected"):
        FromKeras(net)
    twice = Functional((layer_of("Flatten"), ()))
    vars(twice.layers[0])["_inbound_nodes"] *= 2
    with pytest.raises(UserError, match="used several times"):
        FromKeras(twice)
    flat = layer_of("Multiply")
    net = Functional((entry, ()), (relu, (0,)), (flat, (1, 0)))
    flat.input[1] = SimpleNamespace(shape=(None, 3))  # as Keras spreads over the places of images
    with pytest.raises(UserError, match="Keras layer Multiply is not supported"):
        FromKeras(net)


@pytest.mark.parametrize("kind", ["Sequential", "Net"])
def test_a_network_whose_layers_the_app_calls_is_no_chain(kind: str) -> None:
    def call(self: Any, inputs: Tensor) -> Tensor:
        return inputs + Sequential.call(self, inputs)

    call.__module__ = "app"
    own = type(kind, (Sequential,), {"call": call})(Dense(3, 3))
    with pytest.raises(UserError, match=f"{kind} is expected without a call method, but the app's has one"):
        FromKeras(own)
    with pytest.raises(UserError, match="Keras layer Dense is not supported"):  # one of the app's by that name
        FromKeras(Sequential(type("Dense", (Dense,), {"call": call})(3, 3)))


def test_what_is_not_known_is_named() -> None:
    pool = type("MaxPooling2D", (Layer,), {})((None, None, None, 3), strides=(2, 2), padding="valid", pool_size=(2, 2))
    with pytest.raises(UserError, match="images of any size"):
        FromKeras(Sequential(pool))
    with pytest.raises(UserError, match="Keras layer Unknown is not supported"):
        FromKeras(Sequential(Unknown((None, 4))))
    for layer in (
        layer_of("ReLU", max_value=6.0, threshold=0.0, negative_slope=0.1),  # none of PyTorch's computes these
        layer_of("ReLU", max_value=None, threshold=1.0),
        layer_of("DepthwiseConv2D", padding="valid", data_format="channels_last", depth_multiplier=2),
        layer_of("BatchNormalization", axis=1, gamma=None, beta=None, moving_mean=None, moving_variance=None),
        layer_of("Flatten", data_format="channels_first"),
    ):
        with pytest.raises(UserError, match="is not supported"):
            FromKeras(Sequential(layer))
    every = as_optimizer(SGD(0.1, gradient_accumulation_steps=4), [Dense(2, 2).kernel])
    assert type(every).__name__ == "SGD of Keras"
    clipped = as_optimizer(SGD(0.1, clipnorm=1.0), [Dense(2, 2).kernel])
    assert type(clipped).__name__ == "SGD of Keras"
    assert as_optimizer(SGD(0.1, momentum=0.5), [Dense(2, 2).kernel]).param_groups[0]["momentum"] == 0.5


class Cell:
    def __init__(self, layer: Layer, width: int, units: int, gates: int, biases: tuple[int, ...] = ()) -> None:
        self.dropout, self.recurrent_dropout, self.reset_after = 0.0, 0.0, True
        self.activation, self.recurrent_activation = named("tanh"), named("sigmoid")
        sizes = {"kernel": width, "recurrent_kernel": units}
        for name, size in sizes.items():
            layer.add(name, torch.randn(size, gates * units) / size**0.5)
        layer.add("bias", torch.randn(*biases, gates * units))
        for name in (*sizes, "bias"):
            vars(self)[name] = vars(layer).pop(name)


class Recurrent(Layer):
    """Computed by PyTorch's recurrent layers, whose gates are in another order, and which have two biases."""

    gates, makes, biases = 1, nn.RNN, ()

    def __init__(self, steps: int, width: int, units: int, *, whole: bool = False, backwards: bool = False) -> None:
        told = {"go_backwards": backwards, "return_sequences": whole, "return_state": False, "stateful": False}
        super().__init__((None, steps, width), units=units, activation=named("tanh"), **told)
        vars(self)["cell"] = Cell(self, width, units, self.gates, self.biases)

    def turned(self, value: Tensor) -> Tensor:
        parts = value.chunk(3, -1)
        return torch.cat([parts[1], parts[0], parts[2]], -1) if self.makes is nn.GRU else value

    def call(self, inputs: Tensor) -> Tensor:
        kernel, recurrent, bias = (
            self.turned(each.value) for each in (self.cell.kernel, self.cell.recurrent_kernel, self.cell.bias)
        )
        first, second = bias if bias.dim() == 2 else (bias, torch.zeros_like(bias))
        held = {"weight_ih_l0": kernel.T, "weight_hh_l0": recurrent.T, "bias_ih_l0": first, "bias_hh_l0": second}
        layer = self.makes(len(kernel), self.units, batch_first=True)
        outputs = torch.func.functional_call(layer, held, (inputs.flip(1) if self.go_backwards else inputs,))[0]
        return outputs if self.return_sequences else outputs[:, -1]


class SimpleRNN(Recurrent):
    pass


class LSTM(Recurrent):
    gates, makes = 4, nn.LSTM


class GRU(Recurrent):
    gates, makes, biases = 3, nn.GRU, (2,)


class Bidirectional(Layer):
    def __init__(self, there: Recurrent, back: Recurrent) -> None:
        super().__init__(there.input.shape, merge_mode="concat")
        self.forward_layer, self.backward_layer = there, back

    def call(self, inputs: Tensor) -> Tensor:
        there, back = self.forward_layer(inputs), self.backward_layer(inputs)
        return torch.cat([there, back.flip(1) if self.forward_layer.return_sequences else back], -1)


PADS = {"valid": (0, 0), "same": (0, 1), "causal": (2, 0)}  # of a kernel of 3 that moves by 2 over 8


class Conv1D(Layer):
    def __init__(self, padding: str) -> None:
        sizes = {"kernel_size": (3,), "strides": (2,), "dilation_rate": (1,), "groups": 1, "filters": 4}
        super().__init__((None, 8, 3), **sizes, padding=padding, use_bias=True, activation=named("relu"))
        self.add("kernel", torch.randn(3, 3, 4))
        self.add("bias", torch.randn(4))

    def call(self, inputs: Tensor) -> Tensor:
        padded = nn.functional.pad(inputs.mT, PADS[self.padding])
        made = nn.functional.conv1d(padded, self.kernel.value.permute(2, 1, 0), self.bias.value, 2)
        return activated(self, made.mT)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (LSTM(8, 3, 5, whole=True), LSTM(8, 5, 4, backwards=True)),
        lambda: (GRU(8, 3, 5, whole=True), GRU(8, 5, 4)),
        lambda: (SimpleRNN(8, 3, 5),),
        lambda: (Bidirectional(LSTM(8, 3, 5, whole=True), LSTM(8, 3, 5, whole=True, backwards=True)),),
        lambda: (Bidirectional(GRU(8, 3, 5), GRU(8, 3, 5, backwards=True)),),
        *(lambda padding=padding: (Conv1D(padding), Dense(4, 2)) for padding in PADS),
    ],
)
def test_layers_over_windows_have_the_same_outputs_and_gradients(make: Any) -> None:
    for dense in (layers := make()):
        vars(dense)["input"].shape = (None, 8, 3) if dense is layers[0] else (None, *dense.input.shape[-2:])
    net, windows = Sequential(*layers), torch.randn(5, 8, 3)
    plain, own = FromKeras(net), dict(net.named_parameters())
    ours, made = dict(plain.named_parameters()), plain(windows)
    assert torch.allclose(made, net(windows), atol=1e-6) and len(ours) == len(own) == len(plain.named)
    weights = torch.randn_like(made)
    expected = torch.autograd.grad((net(windows) * weights).sum(), list(own.values()))
    found = torch.autograd.grad((made * weights).sum(), [ours[plain.named[name]] for name in own])
    for name, there, here in zip(own, expected, found, strict=True):
        turned = laid_out(SimpleNamespace(parts=[plain]), f"parts.0.{plain.named[name]}", there)
        assert torch.allclose(turned, here, atol=1e-5), name


def test_a_gru_that_resets_before_its_kernel() -> None:
    layer = GRU(2, 3, 4)
    layer.cell.reset_after, bias = False, layer.cell.bias.value[0].detach()
    layer.cell.bias.value = nn.Parameter(bias)
    layer.register_parameter("held_bias", layer.cell.bias.value)
    windows, state = torch.randn(5, 2, 3), torch.zeros(5, 4)
    kernel, recurrent = layer.cell.kernel.value, layer.cell.recurrent_kernel.value
    for step in windows.unbind(1):
        z, r, h = (step @ kernel + bias).chunk(3, -1)
        z, r = (z + state @ recurrent[:, :4]).sigmoid(), (r + state @ recurrent[:, 4:8]).sigmoid()
        state = z * state + (1 - z) * (h + (r * state) @ recurrent[:, 8:]).tanh()
    assert torch.allclose(FromKeras(Sequential(layer))(windows), state, atol=1e-6)


def test_windows_are_pooled_normed_padded_repeated_and_reshaped() -> None:
    told: dict[str, Any] = {"padding": "valid", "strides": (2,), "pool_size": (2,)}
    windows, images = torch.randn(5, 8, 3), torch.randn(5, 4, 2, 3)

    def made(kind: str, shape: tuple[int | None, ...], inputs: Tensor, **told: Any) -> Tensor:
        layer = layer_of(kind, **told)
        vars(layer)["input"].shape = (None, *shape)
        return FromKeras(Sequential(layer))(inputs)

    assert torch.equal(made("MaxPooling1D", (8, 3), windows, **told), windows.unflatten(1, (4, 2)).amax(2))
    mean = made("GlobalAveragePooling1D", (None, 3), windows, keepdims=False)
    assert torch.allclose(mean, windows.mean(1), atol=1e-6)
    assert made("ZeroPadding1D", (8, 3), windows, padding=(1, 2)).shape == (5, 11, 3)
    assert torch.equal(made("RepeatVector", (3,), windows[:, 0], n=2), windows[:, :1].expand(-1, 2, -1))
    assert torch.equal(made("Reshape", (4, 2, 3), images.movedim(-1, 1), target_shape=(4, 6)), images.flatten(2))
    square = made("Reshape", (8, 3), windows, target_shape=(4, 2, 3))
    assert torch.equal(square.movedim(1, -1), windows.unflatten(1, (4, 2)))
    norm = {"axis": -1, "epsilon": 1e-3, "scale": False, "center": False, "rms_scaling": False}
    assert torch.equal(
        made("LayerNormalization", (8, 3), windows, gamma=None, beta=None, **norm),
        nn.functional.layer_norm(windows, (3,), eps=1e-3),
    )
    told = {"axis": -1, "epsilon": 1e-3, "momentum": 0.9, "gamma": None, "beta": None}
    one = made("BatchNormalization", (3,), windows[:1, 0], moving_mean=None, moving_variance=None, **told)
    assert torch.equal(one, torch.zeros(1, 3)), "Keras also takes the mean of one example"
    pixel = made(
        "BatchNormalization", (1, 1, 3), torch.rand(1, 3, 1, 1), moving_mean=None, moving_variance=None, **told
    )
    assert torch.equal(pixel, torch.zeros(1, 3, 1, 1)), "and of one pixel"
    assert torch.equal(_VictimBatchNorm(1e-3, SimpleNamespace(count=2))(windows[:2, 0]), torch.zeros(2, 3))  # type: ignore[arg-type]
    over_time = layer_of("TimeDistributed")
    over_time.layer = Dense(3, 2)
    over_time.layer.input = None  # as it is called by itself in Keras
    vars(over_time)["input"].shape = (None, 8, 3)
    assert torch.allclose(FromKeras(Sequential(over_time))(windows), over_time.layer.call(windows), atol=1e-6)


@pytest.mark.parametrize("change", [{"stateful": True}, {"return_state": True}, {"go": 1}])
def test_a_recurrent_layer_that_keeps_more_is_named(change: dict[str, Any]) -> None:
    layer = LSTM(8, 3, 5)
    vars(layer).update(change)
    layer.cell.recurrent_dropout = float("go" in change)
    with pytest.raises(UserError, match="Keras layer LSTM is not supported"):
        FromKeras(Sequential(layer))
    both = Bidirectional(layer, LSTM(8, 3, 5))
    with pytest.raises(UserError, match="Keras layer Bidirectional is not supported"):
        FromKeras(Sequential(both))
    convolution = Conv1D("same")
    convolution.input.shape = (None, None, 3)
    with pytest.raises(UserError, match="windows of any size"):
        FromKeras(Sequential(convolution))


def test_only_code_that_clients_reach_keeps_keras_on_tensorflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = "flwr.simulation.start_simulation(num_clients=2, client_fn=None)\n"
    (tmp_path / "run.py").write_text(f"import flwr, net\nimport gpu, tensorflow as tf\n{start}")
    (tmp_path / "net.py").write_text("import tensorflow as tf\nNET = tf.keras.Sequential()  # without GradientTape\n")
    (tmp_path / "gpu.py").write_text("import net\nimport tensorflow as tf\nsess = tf.compat.v1.Session()\n")
    (tmp_path / "explain.py").write_text("import tensorflow as tf\nwith tf.GradientTape() as tape: pass\n")
    app = read_app(tmp_path)
    assert keras_lent(code_of(tmp_path), partial(reached_by, app))
    (blamed,) = backend_blamed(["ValueError: Layer 'dense' expects a torch.Tensor"])
    assert "KERAS_BACKEND=tensorflow" in blamed
    assert not backend_blamed(["FileNotFoundError: a.csv"])
    (tmp_path / "net.py").write_text("import explain\nimport tensorflow as tf\nNET = tf.keras.Sequential()\n")
    assert not keras_lent(code_of(tmp_path), partial(reached_by, app))
    monkeypatch.delitem(sys.modules, "keras")
    assert not backend_blamed(["no torch"])


def trained(net: Sequential, images: Tensor) -> WatchedReply:
    watch = TrainingWatch(program=True)
    with watch.looking() as seen:
        net(images.to("meta"))  # Keras asks for shapes first
        labels = torch.arange(len(images)) % 3
        loss = -(torch.nn.functional.one_hot(labels, 3) * net(images, training=True).log()).sum(-1).mean()
        loss.backward()
        weights = [
            each
            for layer in net.layers
            for each in vars(layer).values()
            if hasattr(each, "value") and each.value.requires_grad
        ]
        SGD(0.1).apply([each.value.grad for each in weights], weights)
    reply = {f"arrays/{k}": each.value.detach().numpy().copy() for k, each in enumerate(weights)}
    found = matched(reply, {}, seen.before, seen.values(), seen.gradients)
    return WatchedReply(reply=reply, watched=seen, matched=found)


def test_losses_are_of_examples_of_bytes() -> None:
    net, images = network(), torch.randint(3, (1, 8, 8, 3)).byte()
    seen = trained(net, images.float()).watched
    wanted = nn.functional.one_hot(torch.arange(1), 3)
    seen.batches = [[images, wanted]]
    losses = losses_from(seen).of([[images, wanted], [2 - images, wanted]], {})
    assert np.isfinite(losses).all() and losses[0] != losses[1]


def test_an_evaluation_while_a_network_trains_has_examples() -> None:
    loader, net = DataLoader(TensorDataset(torch.rand(8, 2)), batch_size=4), Model()
    with TrainingWatch(only=OnlyExamples(number=1)).looking() as seen:
        Dense(2, 1)(SimpleNamespace(shape=(None, 2)))
        net._symbolic_build(loader)
        assert [len(rows) for (rows,) in loader] == [1] and not seen.modules
        nn.Linear(2, 1)(torch.rand(1, 2))
        assert not [*loader], "training is over"
        assert len(net.evaluate(loader)) == len(net.predict(loader)) == 1
    assert net.evaluate(loader) == [4, 4]


class Gray(Sequential):
    """A network that adds a channel to images (B, H, W), as Keras does if its input has one."""

    input_shape = (None, 8, 8, 1)

    def call(self, inputs: Tensor) -> Tensor:
        return super().call(inputs[..., None] if inputs.dim() == 3 else inputs)


Gray.__name__ = "Sequential"  # by which chains are known


@pytest.mark.parametrize("channels", [3, 0])
def test_a_step_is_seen_and_replayed_in_pytorchs_layers(channels: int) -> None:
    net, images = network(), torch.rand(1, 8, 8, 3)
    if not channels:
        flat = Flatten((None, 4, 4, 6))
        layers = Conv2D(8, 1, 4), Conv2D(8, 4, 6, strides=2), flat, Dense(96, 96, "relu"), Dense(96, 3, "softmax")
        net, images = Gray(*layers), torch.rand(1, 8, 8)
    net.layers[0].add("seed", torch.tensor([1, 2]), trained=False)
    net.layers[0]._parameters = dict(reversed(net.layers[0]._parameters.items()))  # first, as in layers that draw
    reply = trained(net, images)
    seen = reply.watched
    assert [name for name, _ in seen.optimizers] == ["SGD"] and sum(seen.optimizers.values()) == 1
    assert len(seen.modules) == 1 and len(reply.matched.parameters) == 8 and reply.matched.shares == "weights"
    problem = read_problem(seen, [images])
    assert problem.kind == "image" and problem.truth.shape == (1, channels or 1, 8, 8) and problem.labels is not None
    observed = problem.observed_reply(0, reply, uploaded=True)
    problem.model.load_state_dict({**observed.sent.parameters, **observed.sent.buffers}, strict=False)
    problem.loss(problem.model(problem.truth), problem.labels).backward()
    own = dict(problem.model.named_parameters())
    for name, value in observed.upload.tensors.items():  # which are one step of a rate of 0.1 away
        step = (observed.sent.parameters[name] - value) / 0.1
        assert own[name].grad is not None and torch.allclose(step, own[name].grad, atol=1e-4), name


def test_an_unknown_layer_is_the_reason_that_nothing_is_attacked() -> None:
    net = Sequential(Unknown((None, 4)), Dense(4, 3, "softmax"))
    with pytest.raises(NotAttackedError, match="Keras layer Unknown is not supported"):
        read_problem(trained(net, torch.rand(2, 4)).watched, [])
    assert np.isfinite(net.layers[1].kernel.value.detach().numpy()).all()


@pytest.mark.parametrize(("steps", "begins_at"), [(0, 0.1), (3, 0.0)])
def test_an_optimizer_begins_anew_only_if_it_made_steps(steps: int, begins_at: float) -> None:
    class Held:
        value = np.full(2, 0.1)  # such as the first sums of Adagrad

        def numpy(self) -> np.ndarray:
            return self.value

        def assign(self, value: np.ndarray) -> None:
            self.value = value

    optimizer, held, found = SGD(0.1), Held(), list[float]()
    vars(optimizer).update(variables=[held], iterations=steps, _learning_rate=None)
    watch = TrainingWatch(only=OnlyExamples(anew=True))
    with watch.looking():
        kernel = Dense(2, 2).kernel
        watch.on_step(lambda *_: found.append(held.value[0]), optimizer, [torch.zeros(2, 2)], [kernel])
    assert (found, held.value[0]) == ([begins_at], 0.1)
