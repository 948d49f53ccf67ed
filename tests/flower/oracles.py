"""A server that wants a bit of a client's example: defended clients of every kind, and questions that would tell it."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor, nn

from fl_privacy.data.examples import Examples
from fl_privacy.defenses import Defense, dp_noise, dp_sgd, pruning
from fl_privacy.federation import Client
from fl_privacy.flower import (
    ATSClient,
    DPClient,
    PassportClient,
    PrivacyClient,
    PruningClient,
    RefinerClient,
    SplitFedClient,
    SPNClient,
    answer_once_mod,
    defend,
    defense_mod,
    guard_mod,
    node_memory,
    numpy_client_app,
    train_step,
)
from fl_privacy.flower.clients import MaskableClient
from fl_privacy.flower.gate import Gate
from fl_privacy.flower.inside.identity import identify_process
from fl_privacy.flower.inside.legacy import NumPyClient
from fl_privacy.flower.records import NUMPY, state_records
from fl_privacy.rng import Secret
from fl_privacy.types import LocalPlan, ModelState

SIDE, CLASSES, WIDTH, DEPTH = 4, 2, 3, 6

POLICY = """
version: 1
receives: {records: {arrays: [arrays], config: {allow: [server-round, lr]}}}
sends:
  unnamed: drop
  refusals: bare
  train:
    arrays: {like: received, finite: true, dtype: float32, counters: received}
    metrics: {allow: {num-examples: {value: 1}}}
budget: {epsilon: 100, delta: 1e-5, per: data, ledger: LEDGER}
protect: {clip_norm: 1.0, noise: {mechanism: gaussian, noise_multiplier: 50, unit: client}}
"""


class Net(nn.Sequential):
    """Deep enough that weights of a moderate size overflow, where the first layer lets something through."""

    def __init__(self) -> None:
        hidden = [layer for _ in range(DEPTH - 2) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        first = (nn.Conv2d(1, 1, 1), nn.Flatten(), nn.Linear(SIDE * SIDE, WIDTH), nn.ReLU())
        super().__init__(*first, *hidden, nn.Linear(WIDTH, CLASSES))


def world(bright: bool) -> Examples:
    """Make two images; one pixel of the first is the bit."""
    images = torch.full((2, 1, SIDE, SIDE), 40, dtype=torch.uint8)
    images[0, 0, 1, 1] = 255 if bright else 0
    return Examples(images, torch.tensor([0, 1]), ("a", "b"))


@dataclass(frozen=True)
class Question:
    """Values of the model that are sent, the learning rate in the message's config, and the type of message."""

    values: Mapping[str, np.ndarray]
    lr: float = 0.1
    kind: str = "train"


def questions(number: int, kinds: tuple[str, ...] = ("train",)) -> Iterator[Question]:
    """Draw questions that go otherwise by the bit: an overflow in the forward pass, in the gradient, in the step."""
    rng = np.random.default_rng(0)
    pixel = SIDE + 1
    for turn in range(number):
        values = {name: np.zeros(tuple(t.shape), np.float32) for name, t in Net().state_dict().items()}
        values["0.weight"][:] = 1
        names = [name for name in values if name.endswith("weight")][1:]
        size = float(10 ** rng.uniform(5, 8.5))
        values[names[0]][:, pixel] = size
        values["2.bias"][:] = -size * rng.uniform(0.2, 0.9)
        for name in names[1:]:
            values[name][:] = size * np.sign(rng.uniform(-0.2, 1)) * rng.uniform(0.5, 1, values[name].shape)
        lr = (0.1, 10.0, 1e30, 3e38, math.inf, math.nan)[turn % 6]
        if turn % 5 == 4:  # beyond what a client takes
            values[names[0]][0, pixel] = (math.nan, math.inf, 2e37)[turn % 3]
        yield Question(values, lr, kinds[turn % len(kinds)])


def ordinary(kind: str = "train") -> Question:
    torch.manual_seed(0)
    return Question({name: t.numpy() for name, t in Net().state_dict().items()}, kind=kind)


def loaded(message: Message) -> nn.Module:
    net = Net()
    net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    return net


def lr_of(message: Message) -> float:
    return float(message.content.config_records["config"]["lr"])  # type: ignore[arg-type]


def answer(net: nn.Module, number: int = 2, **figures: float) -> RecordDict:
    return RecordDict(
        {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": number, **figures})}
    )


def images_of(bright: bool) -> tuple[Tensor, Tensor]:
    examples = world(bright)
    return examples.images.float() / 255, examples.labels


def plain_app(bright: bool, fails: str = "") -> ClientAppCallable:
    """Return an app that trains as Flower's quickstart; ``fails``: what it does about values that are not finite."""
    x, y = images_of(bright)

    def train(message: Message, context: Context) -> Message:
        net = loaded(message)
        if message.metadata.message_type.startswith("evaluate"):
            loss = F.cross_entropy(net(x), y).item()
            if fails and not math.isfinite(loss):
                raise ValueError(f"the loss is {loss}")
            return Message(RecordDict({"metrics": MetricRecord({"loss": loss, "num-examples": 2})}), reply_to=message)
        loss = F.cross_entropy(net(x), y)
        if fails == "raises" and not loss.isfinite():
            raise ValueError(f"the loss is {loss}")
        if fails == "replies an error" and not loss.isfinite():
            return Message(Error(7, "no loss"), reply_to=message)
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.sub_(lr_of(message) * parameter.grad)
        if fails == "leaves out" and not all(p.isfinite().all() for p in net.parameters()):
            return Message(RecordDict({"metrics": MetricRecord({"num-examples": 2})}), reply_to=message)
        return Message(answer(net, loss=loss.item()), reply_to=message)

    return train


def behind(mods: list[Any], app: ClientAppCallable) -> ClientAppCallable:
    made = ClientApp(mods=mods)
    made.train()(app)
    made.evaluate()(app)
    return made


class Foreign(NumPyClient):
    """Somebody else's client."""

    def __init__(self, bright: bool, raises: bool = False) -> None:
        self.data, self.raises = images_of(bright), raises

    def fit(self, parameters: Any, config: Any) -> Any:
        net, (x, y) = Net(), self.data
        named = zip(net.state_dict(), parameters, strict=True)
        net.load_state_dict({name: torch.from_numpy(np.array(v)) for name, v in named})
        loss = F.cross_entropy(net(x), y)
        if self.raises and not loss.isfinite():
            raise ValueError(f"the loss is {loss}")
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.sub_(float(config["lr"]) * parameter.grad)
        return [t.detach().numpy() for t in net.state_dict().values()], 2, {"loss": loss.item()}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        net, (x, y) = Net(), self.data
        named = zip(net.state_dict(), parameters, strict=True)
        net.load_state_dict({name: torch.from_numpy(np.array(v)) for name, v in named})
        return F.cross_entropy(net(x), y).item(), 2, {"accuracy": 0.123456}


def own_client(bright: bool, defense: Defense, shares: Any = "weights") -> Client:
    plan = LocalPlan(shares=shares, lr=0.1, epochs=None if shares == "gradient" else 1, batch_size=1)
    return Client(
        id=0, examples=world(bright), indices=torch.arange(2), model=Net(), plan=plan, defense=defense,
        seed=Secret.draw(),
    )  # fmt: skip


def own(bright: bool, defense: Defense, shares: Any = "weights", memory: str = "file") -> ClientAppCallable:
    def make(context: Context) -> PrivacyClient:
        kept = node_memory(context) if memory == "file" else context.state
        return PrivacyClient(own_client(bright, defense, shares), kept)

    return numpy_client_app(make)


def of_class(bright: bool, kind: type[PrivacyClient], settings: Mapping[str, Any]) -> ClientAppCallable:
    def make(context: Context) -> PrivacyClient:
        return kind(own_client(bright, Defense()), context.state, **settings)

    app, public = numpy_client_app(make), set(kind(own_client(bright, Defense()), **settings)._public_names())

    def asked(message: Message, context: Context) -> Message:
        arrays = message.content.array_records["arrays"]
        message.content["arrays"] = ArrayRecord({name: a for name, a in arrays.items() if name in public})
        return app(message, context)

    return asked


def stepping(bright: bool, defense: Defense) -> ClientAppCallable:
    x, y = images_of(bright)

    def train(message: Message, context: Context) -> Message:
        net = loaded(message)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        round = int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type]
        with train_step(defense, net, context, lr=0.1, round=round) as step:
            optimizer.zero_grad()
            loss = step(x, y)
            optimizer.step()
        return Message(answer(net, loss=loss.item()), reply_to=message)

    return behind([answer_once_mod()], train)


def directly(make: Callable[[Context], NumPyClient]) -> ClientAppCallable:
    """Ask a client itself, as Flower's own ``ClientApp(client_fn=...)`` does, whose errors leave with their text."""

    def app(message: Message, context: Context) -> Message:
        client, arrays = make(context), message.content.array_records["arrays"]
        config: Any = dict(message.content.config_records["config"])
        config["attempt"] = config["server-round"]
        values = [array.numpy() for array in arrays.values()]
        try:
            if message.metadata.message_type == "evaluate":
                loss, number, metrics = client.evaluate(values, config)
                record = MetricRecord({"loss": loss, "num-examples": number, **metrics})  # type: ignore[arg-type]
                return Message(RecordDict({"metrics": record}), reply_to=message)
            replied, number, metrics = client.fit(values, config)
        except Exception as error:  # noqa: BLE001
            return Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)
        named = {str(k): Array.from_numpy_ndarray(a) for k, a in enumerate(replied)}
        told: Any = {k: v for k, v in metrics.items() if not isinstance(v, str)}
        return Message(
            RecordDict({"arrays": ArrayRecord(named), "metrics": MetricRecord({"n": number, **told})}), reply_to=message
        )

    return app


def gated(bright: bool, folder: Path, fails: str = "") -> ClientAppCallable:
    path = folder / f"site-{bright}.yaml"
    path.write_text(POLICY.replace("LEDGER", str(folder / f"ledger-{bright}")))
    path.chmod(0o600)
    return Gate(path).around(plain_app(bright, fails))


NOISE = dp_noise(clip_norm=1.0, scale=50.0)
SGD = dp_sgd(clip_norm=1.0, noise_multiplier=50.0)
ATS = {"policies": "3-43-15"}

Make = Callable[[bool, Path], ClientAppCallable]


def _modded(fails: str, defense: Defense = NOISE, guarded: bool = False, buffers: Any = "withheld") -> Make:
    def make(bright: bool, folder: Path) -> ClientAppCallable:
        guard = [guard_mod(Net())] if guarded else []
        return behind([*guard, defense_mod(defense, model=Net, buffers=buffers)], plain_app(bright, fails))

    return make


def _defended(raises: bool, memory: str, defense: Defense = NOISE) -> Make:
    def make(bright: bool, folder: Path) -> ClientAppCallable:
        def client(context: Context) -> NumPyClient:
            kept = context if memory == "context" else context.state
            if memory == "class":
                return defend(Foreign, defense, model=Net)(bright, raises, memory=context)
            return defend(Foreign(bright, raises), defense, model=Net, memory=kept)

        return directly(client) if memory == "state" else numpy_client_app(client)

    return make


PRIVATE: dict[str, Make] = {
    "defense_mod(dp_noise)": _modded(""),
    "defend(NumPyClient), context, raises": _defended(True, "context"),
    "Gate, an app that raises": lambda b, folder: gated(b, folder, "raises"),
    "defense_mod(dp_noise), an app that raises": _modded("raises"),
    "guard_mod, defense_mod(dp_noise)": _modded("raises", guarded=True),
    "defend(NumPyClient), its state, raises": _defended(True, "state"),
    "defend(class), raises": _defended(True, "class"),
    "PrivacyClient, dp_noise, gradient": lambda b, _: own(b, NOISE, "gradient"),
    "PrivacyClient, dp_noise at each gradient": lambda b, _: own(b, dp_noise(clip_norm=1.0, scale=50.0, at="gradient")),
    "PrivacyClient, dp_noise, weights, context.state": lambda b, _: own(b, NOISE, memory="state"),
    "PrivacyClient itself, dp_sgd": lambda b, _: directly(lambda c: PrivacyClient(own_client(b, SGD), c.state)),
    "DPClient": lambda b, _: of_class(b, DPClient, {"clip_norm": 1.0, "scale": 50.0}),
    "train_step(dp_sgd), answer_once_mod": lambda b, _: stepping(b, SGD),
    "Gate, an app that leaves arrays out": lambda b, folder: gated(b, folder, "leaves out"),
    "defense_mod(dp_noise), buffers kept": _modded("", buffers="kept"),
    "defense_mod(dp_noise), an app that replies an error": _modded("replies an error"),
    "defense_mod(dp_noise), an app that leaves arrays out": _modded("leaves out"),
    "defend(NumPyClient), context": _defended(False, "context"),
    "PrivacyClient, dp_noise, delta": lambda b, _: own(b, NOISE, "delta"),
    "PrivacyClient, dp_noise by layer": lambda b, _: own(b, dp_noise(clip_norm=1.0, scale=50.0, clip_scope="layer")),
    "PrivacyClient, dp_sgd": lambda b, _: own(b, SGD),
    "Gate": gated,
}  # fmt: skip
"""Clients that promise differential privacy: nothing but noised values may depend on it. One of each kind first."""

OTHERS: dict[str, Make] = {
    "defense_mod(pruning)": _modded("", pruning(rate=0.9)),
    "defense_mod(pruning), an app that raises": _modded("raises", pruning(rate=0.9)),
    "defend(NumPyClient, pruning), raises": _defended(True, "context", pruning(rate=0.9)),
    "defend(NumPyClient, pruning), its state, raises": _defended(True, "state", pruning(rate=0.9)),
    "PruningClient": lambda b, _: of_class(b, PruningClient, {"rate": 0.9}),
    "ATSClient": lambda b, _: of_class(b, ATSClient, ATS),
    "RefinerClient": lambda b, _: of_class(b, RefinerClient, {"privacy": "mse", "iterations": 2}),
    "SPNClient": lambda b, _: of_class(b, SPNClient, {}),
    "SplitFedClient": lambda b, _: of_class(b, SplitFedClient, {}),
    "MaskableClient itself": lambda b, _: directly(
        lambda c: MaskableClient(own_client(b, pruning(rate=0.9)), c.state, clip=1e6)
    ),
    "PassportClient": lambda b, _: of_class(b, PassportClient, {}),
}
"""Clients that promise no such thing: each question is counted, answered once, and its errors are alike."""


@dataclass
class Asked:
    """A client in one world, and the server that asks it."""

    app: ClientAppCallable
    folder: Path
    own_records: bool = False
    round: int = 0
    context: Context = field(init=False)

    def __post_init__(self) -> None:
        node = {"partition-id": 0, "num-partitions": 2, "fl-privacy-state": str(self.folder)}
        self.context = Context(1, 1, UserConfig(node), RecordDict(), UserConfig({}))

    def ask(self, question: Question, *, again: bool = False) -> Message:
        """Ask in the next round, or ``again`` in the last one."""
        self.round += not again
        values = {name: torch.from_numpy(value.copy()) for name, value in question.values.items()}
        config = ConfigRecord({"lr": question.lr, "server-round": self.round})
        records = state_records(ModelState(values, {})) if self.own_records else {"arrays": ArrayRecord(values)}
        return self.app(Message(RecordDict({**records, "config": config}), 1, question.kind), self.context)


def worlds(make: Make, name: str, folder: Path) -> tuple[Asked, Asked]:
    """Return the same kind of client in both worlds."""
    identify_process()
    own_records = name.startswith("PrivacyClient,")
    dark, bright = (Asked(make(bit, folder), folder / str(bit), own_records) for bit in (False, True))
    return dark, bright


def seen(reply: Message) -> dict[str, object]:
    """Return all that a server sees of a reply, except for the numbers that noise is on."""
    if reply.has_error():
        return {"error": (reply.error.code, reply.error.reason)}
    content = reply.content
    return {
        "records": list(content),
        "arrays": {
            f"{name}/{key}": (a.dtype, tuple(a.shape), a.stype != NUMPY or np.isfinite(a.numpy()).all())
            for name, record in content.array_records.items()
            for key, a in record.items()
        },
        "figures": {name: [(k, repr(v)) for k, v in r.items()] for name, r in content.metric_records.items()},
        "settings": {name: dict(record) for name, record in content.config_records.items()},
    }
