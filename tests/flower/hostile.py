"""Messages of a server that is after one client's update, and the nodes that are asked."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from torch import nn

from fl_privacy import defend, defense_mod, probe_mod
from fl_privacy.data.examples import Examples
from fl_privacy.defenses import Defense, dp_noise
from fl_privacy.defenses.defense import LocalStep
from fl_privacy.effects import Part
from fl_privacy.federation import Client
from fl_privacy.flower import (
    DPClient,
    answer_once_mod,
    guard_mod,
    node_memory,
    node_secret,
    numpy_client_app,
    train_step,
)
from fl_privacy.flower.inside.legacy import NumPyClient
from fl_privacy.types import Batch, LocalPlan, Tensors
from tests.flower.liars import Small, own_pictures, pictures, train

NOISE = dp_noise(clip_norm=0.1, scale=10.0)
"""As strong as what a reply shows of the update has to be weak: a cosine of 0.5 comes of chance in none of 10^15."""

Seen = list[tuple[np.ndarray, np.ndarray]]
"""What an app was sent and what it made of it, undefended, of each large array."""

LARGE = 100

SEEN: Seen = []


def initial() -> dict[str, np.ndarray]:
    """Return the honest model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {name: t.numpy() for name, t in Small().state_dict().items()}


def noisy(gradient: Tensors, step: LocalStep) -> Tensors:
    """Add noise to the gradient within the training."""
    return {name: t + 100 * torch.randn(t.shape, generator=step.rng) for name, t in gradient.items()}


IN_TRAINING = Defense(parts=(Part("noise in the training"),), gradient=(noisy,))


def batch_of(context: Context) -> Batch:
    """Return the node's own examples."""
    examples = own_pictures(context)
    return Batch(torch.stack([image for image, _ in examples]), torch.tensor([label for _, label in examples]))


def _trained(net: nn.Module, context: Context) -> None:
    batch = batch_of(context)
    before = {n: t.detach().numpy().copy() for n, t in net.state_dict().items()}
    train(net, [(batch.inputs, batch.labels)])  # type: ignore[arg-type]
    SEEN.extend((before[n], t.detach().numpy().copy()) for n, t in net.state_dict().items() if t.numel() >= LARGE)


def _reply(net: nn.Module, message: Message) -> Message:
    metrics = MetricRecord({"num-examples": 4, "loss": 0.5})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


def _plain(mods: list[Any]) -> ClientApp:
    """Somebody's app, which trusts what it is sent and reads it by position."""
    app = ClientApp(mods=mods)

    @app.train()
    def train_message(message: Message, context: Context) -> Message:
        net = Small()
        record = next(iter(message.content.array_records.values()))
        arrays = [torch.from_numpy(np.array(array.numpy())).float() for array in record.values()]
        net.load_state_dict(dict(zip(net.state_dict(), arrays, strict=True)))
        _trained(net, context)
        return _reply(net, message)

    @app.evaluate()
    def evaluate_message(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 4, "loss": 0.5})}), reply_to=message)

    return app


def _stepping() -> ClientApp:
    """Build an app that has the defense in its training."""
    app = ClientApp(mods=[answer_once_mod()])

    @app.train()
    def train_message(message: Message, context: Context) -> Message:
        net = Small()
        net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        plain = Small()
        plain.load_state_dict(net.state_dict())
        _trained(plain, context)
        optimizer, batch = torch.optim.SGD(net.parameters(), lr=0.1), batch_of(context)
        round = message.content.config_records["config"]["server-round"]
        with train_step(IN_TRAINING, net, context, round=round) as step:  # type: ignore[arg-type]
            optimizer.zero_grad()
            step(batch.inputs, batch.labels)
            optimizer.step()
        return _reply(net, message)

    return app


class Veteran(NumPyClient):
    """Lists of arrays in, lists of arrays out."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def fit(self, parameters: Any, config: Any) -> Any:
        net = Small()
        values = [torch.from_numpy(np.array(array)).float() for array in parameters]
        net.load_state_dict(dict(zip(net.state_dict(), values, strict=True)))
        _trained(net, self.context)
        return [t.numpy() for t in net.state_dict().values()], 4, {"loss": 0.5}


def _own_client(context: Context) -> DPClient:
    number = int(context.node_config["partition-id"])
    images = torch.stack([(image * 255).round().to(torch.uint8) for image, _ in pictures(number)])
    examples = Examples(images, torch.tensor([label for _, label in pictures(number)]), tuple("abc"))
    plan = LocalPlan(shares="weights", lr=0.1, batch_size=4)
    seed = node_secret(context)
    client = Client(
        id=number, examples=examples, indices=torch.arange(len(examples)), model=Small(), plan=plan, seed=seed
    )
    undefended = replace(client, defense=Defense())
    made = DPClient(client, node_memory(context), clip_norm=0.1, scale=10.0)

    class Watched(DPClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            reply = super().fit(parameters, config)
            sent = self._sent(parameters, config)
            plain = undefended.update(sent, made.memory.load(), round=config["server-round"]).upload.tensors
            SEEN.extend((sent.parameters[n].numpy(), t.numpy()) for n, t in plain.items() if t.numel() >= LARGE)
            return reply

    return Watched(client, node_memory(context), clip_norm=0.1, scale=10.0)


APPS: dict[str, Callable[[], ClientApp]] = {
    "defense_mod": lambda: _plain([defense_mod(NOISE, model=Small)]),
    "defense_mod by names": lambda: _plain([defense_mod(NOISE, names=list(Small().state_dict()))]),
    "guard and defense_mod": lambda: _plain([guard_mod(Small(), batch_of), defense_mod(NOISE, model=Small)]),
    "defense_mod and probe_mod": lambda: _plain(
        [defense_mod(NOISE, model=Small), probe_mod(model=Small, train=train, dataset=own_pictures, images=4)]
    ),
    "defend": lambda: numpy_client_app(lambda context: defend(Veteran(context), NOISE, model=Small, memory=context)),
    "DPClient": lambda: numpy_client_app(_own_client),
    "train_step": _stepping,
}
"""Defended nodes, by what defends them."""


def undefended_app() -> ClientApp:
    """Build an app that gives its update away."""
    return _plain([])


def honest_message(round: int, node: int = 1) -> Message:
    """Make a message as a server sends it that follows the protocol."""
    arrays = ArrayRecord({name: Array.from_numpy_ndarray(a) for name, a in initial().items()})
    config = ConfigRecord({"server-round": round, "lr": 0.1})
    return Message(RecordDict({"arrays": arrays, "config": config}), node, "train")


Change = Callable[[RecordDict], None]
"""Makes an honest message another one."""

NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, -1, 1000, 1001, 10**9, 2**62, 2**63 - 1, -(2**63), 0.5, 1e300]),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 1200),
    st.floats(),
)
VALUES = st.one_of(
    NUMBERS,
    st.text(max_size=20),
    st.binary(max_size=20),
    st.booleans(),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    st.lists(st.text(max_size=5), max_size=4),
)
KEYS = st.one_of(
    st.sampled_from(["server-round", "names", "lr", "victim", "batch-size", "num-server-rounds", "fl-privacy.victim"]),
    st.text(max_size=10),
)
RECORDS = st.sampled_from(
    ["config", "arrays", "metrics", "more", "fl-privacy.images", "client", "parameters", "buffers"]
)
DTYPES = st.sampled_from(["f2", "f4", "f8", "i1", "i8", "u1", "?", "c8", "c16"])


def _told(record: str, values: dict[str, Any]) -> Change:
    def change(content: RecordDict) -> None:
        before = dict(content[record]) if record in content.config_records else {}
        content[record] = ConfigRecord({**before, **values})

    return change


def _rounded(number: Any) -> Change:
    return _told("config", {"server-round": number})


def _probe(number: Any, size: Any) -> Change:
    return _told("probe", {"fl-privacy.victim": number, "fl-privacy.batch-size": size})


def _arrays(act: Callable[[str, np.ndarray], tuple[str, np.ndarray]], which: int | None) -> Change:
    def change(content: RecordDict) -> None:
        made = {}
        for k, (key, array) in enumerate(content.array_records["arrays"].items()):
            name, value = act(key, array.numpy()) if which is None or k == which else (key, array.numpy())
            made[name] = Array.from_numpy_ndarray(np.asarray(value))
        content["arrays"] = ArrayRecord(made)

    return change


def _as_type(dtype: str) -> Any:
    return lambda key, array: (key, array.astype(dtype))


def _times(factor: float) -> Any:
    def act(key: str, array: np.ndarray) -> tuple[str, np.ndarray]:
        with np.errstate(all="ignore"):
            return key, (array * np.float64(factor)).astype(array.dtype)

    return act


def _claimed(shape: tuple[int, ...], dtype: str, stype: str, data: bytes) -> Change:
    def change(content: RecordDict) -> None:
        arrays = dict(content.array_records["arrays"])
        arrays["fc1.weight"] = Array(dtype=dtype, shape=shape, stype=stype, data=data)
        content["arrays"] = ArrayRecord(arrays)

    return change


def _second(name: str, factor: float) -> Change:
    def change(content: RecordDict) -> None:
        crafted = {k: Array.from_numpy_ndarray(a.numpy() * np.float32(factor)) for k, a in content["arrays"].items()}
        content[name] = ArrayRecord(crafted)

    return change


def _ordered(order: list[int]) -> Change:
    def change(content: RecordDict) -> None:
        items = list(content.array_records["arrays"].items())
        content["arrays"] = ArrayRecord(dict(items[k] for k in order if k < len(items)))  # some are gone before

    return change


def _renamed(names: list[str]) -> Change:
    def change(content: RecordDict) -> None:
        record = content.array_records["arrays"]
        content["arrays"] = ArrayRecord(dict(zip(names, record.values(), strict=False)))

    return change


def _emptied(content: RecordDict) -> None:
    for name in list(content):
        del content[name]


WHICH = st.one_of(st.none(), st.integers(0, 3))
CHANGES: st.SearchStrategy[Change] = st.one_of(
    VALUES.map(_rounded),
    st.tuples(VALUES, VALUES).map(lambda pair: _probe(*pair)),
    st.tuples(st.integers(0, 4), st.integers(1, 4)).map(lambda pair: _probe(*pair)),
    st.tuples(RECORDS, st.dictionaries(KEYS, VALUES, max_size=3)).map(lambda pair: _told(*pair)),
    st.tuples(DTYPES, WHICH).map(lambda pair: _arrays(_as_type(pair[0]), pair[1])),
    st.tuples(st.one_of(st.floats(), st.sampled_from([1e-3, 1.0, 100.0])), WHICH).map(
        lambda pair: _arrays(_times(pair[0]), pair[1])
    ),
    st.tuples(st.sampled_from([(1, -1), (-1,), (-1, 1, 1), (2, -1)]), WHICH).map(
        lambda pair: _arrays(
            lambda key, array: (key, array.reshape(pair[0]) if array.size % 2 == 0 else array), pair[1]
        )
    ),
    st.tuples(
        st.sampled_from([(8, 36), (2**40,), (2**31, 2**31), (0,), (-1,), (), (8, 35)]),
        st.sampled_from(["float32", "float64", "complex64", "object", "nonsense", ""]),
        st.sampled_from(["numpy.ndarray", "fl_privacy.encoded", "torch.tensor", "pickle", ""]),
        st.binary(max_size=40),
    ).map(lambda four: _claimed(*four)),
    st.tuples(RECORDS, st.sampled_from([0.0, 1.0, 1e6, -1.0])).map(lambda pair: _second(*pair)),
    st.permutations(range(4)).map(_ordered),
    st.lists(st.integers(0, 3), max_size=3, unique=True).map(_ordered),
    st.lists(
        st.one_of(
            st.sampled_from(["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "x.running_mean", "0", "1", "2", "3"]),
            st.text(max_size=6),
        ),
        min_size=3,
        max_size=4,
        unique=True,
    ).map(_renamed),
    st.just(_emptied),
)
KINDS = st.sampled_from(
    ["train"] * 7
    + ["train.default", "train.probe", "train.more", "evaluate", "evaluate.personalize", "query", "query.examples", "x"]
)
QUESTIONS = st.tuples(KINDS, st.lists(CHANGES, min_size=1, max_size=3), st.integers(1, 3))
"""Kind of message, what is changed in it, and the round that it starts from."""

Question = tuple[str, list[Change], int]


def hostile_message(question: Question, node: int = 1) -> Message | None:
    """Make the hostile message; ``None`` if Flower can't carry it."""
    kind, changes, round = question
    content = honest_message(round, node).content
    try:
        for change in changes:
            change(content)
        return Message(content, node, kind)
    except (TypeError, ValueError, OverflowError, KeyError, AssertionError):
        return None


def drawn(number: int, questions: st.SearchStrategy[Any] = QUESTIONS) -> list[Any]:
    """Draw ``number`` examples, the same in each process."""
    found: list[Any] = []

    @settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(questions)
    def draw(question: Any) -> None:
        found.append(question)

    draw()
    return found


def expect_kept(reply: Message, seen: Seen) -> None:
    """Check that the reply is a line, or that nothing in it shows what the app has learned."""
    if reply.has_error():
        reason = reply.error.reason
        assert reason.strip() and "\n" not in reason and "Traceback" not in reason, reason
        assert len(reason) < 2000 and ".py" not in reason, reason
        return
    for record in reply.content.array_records.values():
        for array in record.values():
            shown = array.numpy()
            for sent, trained in seen:
                if shown.size == trained.size and shown.dtype.kind in "fc":
                    update = (trained - sent).ravel().astype(np.float64)
                    for change in (shown.ravel() - sent.ravel(), shown.ravel()):
                        assert abs(cosine(np.real(change).astype(np.float64), update)) < 0.5


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Of two changes; 0 where one of them is none, or is not finite."""
    lengths = np.linalg.norm(one) * np.linalg.norm(other)
    return float(one @ other / lengths) if np.isfinite(lengths) and lengths > 0 else 0.0
