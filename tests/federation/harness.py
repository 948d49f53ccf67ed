"""A small federation with everything that may differ between backends: batch norm, noise, private layers, failures."""

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fl_privacy.data.examples import Examples
from fl_privacy.defenses import ClientState, Defense, LocalData
from fl_privacy.effects import Part
from fl_privacy.federation import (
    Audit,
    Client,
    ClientSource,
    Replay,
    Round,
    RoundReport,
    Server,
    ServerPlan,
    plain_rounds,
    spread_probes,
)
from fl_privacy.federation.interception import Interceptor
from fl_privacy.types import Batch, LocalPlan, ModelState, Observation, Tensors, VictimId

Kept = TypeVar("Kept")
CLASSES, SIDE, CLIENTS, EXAMPLES_EACH = 4, 6, 3, 12
FEDAVG = LocalPlan(shares="delta", lr=0.1, epochs=2, batch_size=5, momentum=0.9)
FEDSGD = LocalPlan(shares="gradient", batch_size=8)


class SmallNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.out = nn.Linear(3 * SIDE * SIDE, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.conv(x)).relu().flatten(1))


class NetWithPrivateHead(SmallNet):
    def __init__(self) -> None:
        super().__init__()
        self.private = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.private(super().forward(x))


def with_private_head(model: nn.Module, state: ClientState, rng: torch.Generator) -> nn.Module:
    return NetWithPrivateHead()


def with_noise(update: Tensors, state: ClientState, rng: torch.Generator) -> Tensors:
    return {name: t + 0.01 * torch.randn(t.shape, generator=rng) for name, t in update.items()}


def with_memory(update: Tensors, state: ClientState, rng: torch.Generator) -> Tensors:
    rounds = state.tensors.get("memory/rounds", torch.zeros(())) + 1
    state.tensors["memory/rounds"] = rounds
    return {name: t * (1 + 0.1 * rounds) for name, t in update.items()}


def withholding(update: Tensors, state: ClientState, rng: torch.Generator) -> Tensors:
    return {name: t for name, t in update.items() if name != "conv.bias"}


def exchanging(batch: Batch, data: LocalData) -> Batch:
    """Two thirds of the examples, inverted, with noise that is drawn once and kept."""
    kept = data.state.tensors
    if "exchange/noise" not in kept:
        kept["exchange/noise"] = torch.rand(batch.inputs.shape, generator=data.rng)
    rows = torch.arange(len(batch)) % 3 > 0
    return Batch((1 - batch.inputs + 0.1 * kept["exchange/noise"])[rows], batch.labels[rows])


def two_thirds(labels: Tensor, num_classes: int) -> Tensor:
    return labels[torch.arange(len(labels)) % 3 > 0]


def brightened(batch: Batch, state: ClientState, rng: torch.Generator) -> Batch:
    return Batch(batch.inputs * torch.rand(len(batch), 1, 1, 1, generator=rng), batch.labels)


NOISE = Defense(parts=(Part("noise"),), upload=(with_noise,))
DATA = Defense(
    parts=(Part("data"),), examples=(exchanging,), outcome=(two_thirds,), data=(brightened,), upload=(with_noise,)
)
HEAD = Defense(parts=(Part("head"),), model=(with_private_head,), upload=(with_memory, withholding, with_noise))


def examples(number: int = CLIENTS * EXAMPLES_EACH, seed: int = 5) -> Examples:
    rng = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (number, 1, SIDE, SIDE), generator=rng, dtype=torch.uint8)
    return Examples(images, torch.arange(number) % CLASSES, tuple("abcd"))


def small_net(seed: int = 3) -> SmallNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SmallNet()


def raising(batch: Batch, state: ClientState, rng: torch.Generator) -> Batch:
    state.tensors["memory/spoilt"] = torch.ones(1)
    raise RuntimeError("the disk of this client\nis on fire")


def not_finite(update: Tensors, state: ClientState, rng: torch.Generator) -> Tensors:
    return {name: t * float("nan") for name, t in update.items()}


def misshapen(update: Tensors, state: ClientState, rng: torch.Generator) -> Tensors:
    return {name: t.flatten() for name, t in update.items()}


FAULTS = {
    "raises": Defense(data=(raising,)),
    "nan": Defense(upload=(not_finite,)),
    "shape": Defense(upload=(misshapen,)),
}


def clients(
    plan: LocalPlan = FEDAVG, defense: Defense = NOISE, faults: tuple[tuple[int, str], ...] = ()
) -> dict[int, Client]:
    data = examples()
    clients = {
        i: Client(
            id=i,
            examples=data,
            indices=torch.arange(len(data))[i::CLIENTS],
            model=small_net(),
            plan=plan,
            defense=defense,
            seed=11,
        )
        for i in range(CLIENTS)
    }
    return clients | {i: replace(clients[i], defense=FAULTS[fault]) for i, fault in faults}


def server(plan: LocalPlan = FEDAVG, rules: ServerPlan | None = None, seed: int = 11) -> Server:
    return Server(
        state=ModelState.of(small_net()),
        local_plan=plan,
        plan=rules or ServerPlan(),
        clients=range(CLIENTS),
        seed=seed,
    )


def probes(*rounds: int, victims: int = 4, batch_size: int = 2) -> Audit:
    sizes = dict.fromkeys(range(CLIENTS), EXAMPLES_EACH)
    return Audit(rounds=frozenset(rounds), probes=spread_probes(victims, batch_size, sizes), batch_size=batch_size)


def updates(*rounds: int, clients: tuple[int, ...] = tuple(range(CLIENTS))) -> Audit:
    return Audit(rounds=frozenset(rounds), uploads="update", clients=frozenset(clients))


@dataclass
class Recording:
    """What a run let its server and its attacker see."""

    observations: list[Observation] = field(default_factory=list)
    reports: list[RoundReport] = field(default_factory=list)

    def follow(self, rounds: Generator[Round, None, Kept]) -> Kept:
        """Run all rounds, and return what they return."""
        while True:
            try:
                round = next(rounds)
            except StopIteration as end:
                kept: Kept = end.value
                return kept
            self.observations.extend(round)
            self.reports.append(round.report)

    def through(self, backend: Any, server: Server, source: ClientSource, **settings: Any) -> Any:
        """Run all rounds of a backend; the plain loop takes clients, others what makes them."""
        return self.follow(backend(server, source() if backend is plain_rounds else source, **settings))

    def interceptor(self, plan: LocalPlan = FEDAVG) -> Interceptor:
        return Interceptor(
            model=small_net(),
            plan=plan,
            input_shape=(1, SIDE, SIDE),
            num_classes=CLASSES,
            sink=self.observations.append,
        )


def assert_same_tensors(left: Tensors, right: Tensors) -> None:
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert tensor.shape == right[name].shape, name
        assert tensor.numpy().tobytes() == right[name].numpy().tobytes(), name


def assert_same_state(left: ModelState, right: ModelState) -> None:
    assert_same_tensors(left.parameters, right.parameters)
    assert_same_tensors(left.buffers, right.buffers)


def assert_same_observations(left: list[Observation], right: list[Observation]) -> None:
    assert [o.id for o in left] == [o.id for o in right]
    for a, b in zip(left, right, strict=True):
        assert_same_state(a.sent, b.sent)
        assert_same_tensors(a.upload.tensors, b.upload.tensors)
        assert_same_tensors(a.upload.buffers, b.upload.buffers)
        assert a.upload.num_examples == b.upload.num_examples


def replay(client: Client, victim: VictimId, batch_size: int = 1) -> Replay:
    """Of what ``client`` made of the initial model, before it kept anything."""
    sent = ModelState.of(small_net())
    return Replay(client=client, victim=victim, sent=sent, state=ClientState(), batch_size=batch_size)
