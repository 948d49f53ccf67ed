"""Mechanisms of differential privacy whose epsilon is known, honest and faulty, for the experiments on claims.

Not a command of its own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from scipy import optimize
from torch import Tensor, nn

from fl_privacy.defenses import ClientState, Defense, LocalStep, dp_noise, dp_sgd, local_dp
from fl_privacy.dp_check import Claim, Neighbors
from fl_privacy.dp_check.bounds import gaussian_mu
from fl_privacy.dp_check.claims import composed_epsilons
from fl_privacy.dp_check.draws import ManyAtOnce, Mechanism
from fl_privacy.flower.dp_mechanisms import mechanism_of_mod, mechanism_of_strategy
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors

DELTA = 1e-5
EPSILONS = (0.5, 1.0, 3.0, 8.0)
CLIENTS = 1


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A mechanism, what is claimed of it and how it is drawn from.

    Attributes:
        mechanism: draws anew at each call.
        claim: that is true of an honest mechanism.
        like: shapes of an update; ``None`` where ``neighbors`` are given.
        neighbors: of a mechanism that takes something else than an update.
        clip_norm: to which one unit is said to be clipped.
        noise: see ``check_mechanism``.
    """

    mechanism: Mechanism
    claim: Claim
    like: Tensors | None = None
    neighbors: Neighbors | Sequence[Neighbors] | None = None
    clip_norm: float | None = 1.0
    noise: Literal["gaussian", "other"] = "gaussian"

    def asked(self) -> dict[str, Any]:
        """Return the arguments of ``check_mechanism``."""
        return {
            "claimed": self.claim,
            "like": self.like,
            "neighbors": self.neighbors,
            "clip_norm": self.clip_norm,
            "noise": self.noise,
        }


Make = Callable[[float, int], Subject]
"""(epsilon, seed) -> a mechanism of which that epsilon is claimed."""

THREE = {"conv.weight": torch.zeros(4, 1, 3, 3), "fc.weight": torch.zeros(5, 8), "fc.bias": torch.zeros(5)}
ONE = {"weight": torch.zeros(40)}


def std_for(epsilon: float) -> float:
    """Return the standard deviation of Gaussian noise for ``epsilon`` at a sensitivity of 1."""
    return 1 / gaussian_mu(epsilon, DELTA)


def claim(epsilon: float, **more: Any) -> Claim:
    return Claim(epsilon=epsilon, delta=DELTA, **more)


def norm(update: Tensors) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in update.values()))


def clipped(update: Tensors, bound: float = 1.0) -> dict[str, Tensor]:
    return {name: value * min(1.0, bound / max(norm(update), 1e-12)) for name, value in update.items()}


def gaussian(epsilon: float, seed: int, *, std: float | None = None, **more: Any) -> Subject:
    """Clip and add noise, in five lines of its own; of another standard deviation, or with more in the claim."""
    rng, spread = torch.Generator().manual_seed(seed), std_for(epsilon) if std is None else std

    def many(update: Tensors, n: int) -> Tensors:
        return {name: v + spread * torch.randn(n, *v.shape, generator=rng) for name, v in clipped(update).items()}

    return Subject(mechanism=ManyAtOnce(many=many), claim=claim(epsilon, **more), like=THREE)


def copies(update: Tensors, n: int) -> Tensors:
    """Stack n copies of an update, (n, ...); their joint norm is sqrt(n) times that of one."""
    return {name: value.expand(n, *value.shape).clone() for name, value in update.items()}


def of_defense(
    make: Callable[[float], Defense], epsilon: float, seed: int, like: Tensors = THREE, **more: Any
) -> Subject:
    """Wrap a defense's upload hooks, built for a clipping norm, to run on n copies of an update at once.

    Clipped to sqrt(n) together, each copy is clipped to 1; noise is drawn for each value in any case.
    """
    rng = torch.Generator().manual_seed(seed)

    def many(update: Tensors, n: int) -> Tensors:
        stacked = copies(update, n)
        for hook in make(math.sqrt(n)).upload:
            stacked = hook(stacked, ClientState(), rng)
        return stacked

    return Subject(mechanism=ManyAtOnce(many=many), claim=more.pop("claimed", claim(epsilon)), like=like, **more)


def laplace(epsilon: float, seed: int) -> Subject:
    """Build dp_noise with Laplace noise on one value in [-1, 1], private without any delta."""
    pure = Claim(epsilon=epsilon, delta=0.0)

    def make(norm: float) -> Defense:
        return dp_noise(noise="laplace", scale=1 / epsilon, clip_norm=norm)

    return of_defense(make, epsilon, seed, {"count": torch.zeros(1)}, claimed=pure, noise="other")


class Heads(nn.Module):
    """n equal linear layers beside each other: the gradient of an example is n times that of one."""

    def __init__(self, weight: Tensor, n: int) -> None:
        super().__init__()
        self.classes = len(weight)
        self.weight = nn.Linear(weight.shape[1], self.classes * n, bias=False)
        self.weight.weight.data.copy_(weight.repeat(n, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight(inputs)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss: the sum over the heads, averaged over the batch."""
        each = outputs.view(len(labels), -1, self.classes)
        repeated = labels[:, None].expand(each.shape[:2])
        return nn.functional.cross_entropy(each.flatten(0, 1), repeated.flatten(), reduction="sum") / len(labels)


@dataclass(frozen=True, eq=False)
class Batches:
    """A batch with a canary, and one that has a blank example without gradient in its place."""

    weight: Tensor
    with_it: Batch
    without: Batch

    @classmethod
    def made(cls, seed: int) -> "Batches":
        rng = torch.Generator().manual_seed(seed)
        inputs, labels = torch.randn(4, 6, generator=rng), torch.randint(4, (4,), generator=rng)
        canary, blank = inputs.clone(), inputs.clone()
        canary[0], blank[0] = 100 * torch.randn(6, generator=rng), 0.0
        return cls(torch.randn(4, 6, generator=rng), Batch(canary, labels), Batch(blank, labels))

    @property
    def neighbors(self) -> Neighbors:
        return Neighbors(first=self.with_it, second=self.without, what="a batch with a canary against one without it")


def example_unit(epsilon: float, seed: int) -> Subject:
    """Build one step of our dp_sgd, times the batch size."""
    made, rng = Batches.made(seed), torch.Generator().manual_seed(seed)
    (hook,) = dp_sgd(clip_norm=1.0, noise_multiplier=std_for(epsilon)).gradient
    heads, plan = Heads(made.weight, 1), LocalPlan(lr=0.1, batch_size=4)
    sent = ModelState({name: p.detach() for name, p in heads.named_parameters()}, {})

    def mechanism(batch: Batch) -> Tensors:
        step = LocalStep(model=heads, sent=sent, batch=batch, plan=plan, state=ClientState(), rng=rng)
        return {name: value * len(batch) for name, value in hook(sent.parameters, step).items()}

    return Subject(mechanism=mechanism, claim=claim(epsilon, unit="example"), neighbors=made.neighbors)


def local_dp_mod(epsilon: float, seed: int) -> Subject:
    """Build Flower's LocalDpMod at its clipping norm, on n copies of an update at once."""
    np.random.seed(seed)

    def many(update: Tensors, n: int) -> Tensors:
        return mechanism_of_mod(LocalDpMod(math.sqrt(n), 1.0, epsilon, DELTA))(copies(update, n))

    return Subject(mechanism=ManyAtOnce(many=many), claim=claim(epsilon), like=ONE)


def fixed(kind: Any, *mods: Any) -> Make:
    """Wrap a Flower strategy with a fixed clipping norm, to run on n copies of an update at once.

    Its noise is the multiplier times the clipping norm of all copies together, hence the multiplier over sqrt(n).
    """

    def make(epsilon: float, seed: int) -> Subject:
        np.random.seed(seed)

        def many(update: Tensors, n: int) -> Tensors:
            strategy = kind(FedAvg(), std_for(epsilon) / math.sqrt(n), math.sqrt(n), CLIENTS)
            return mechanism_of_strategy(strategy, clients=CLIENTS, mods=mods)(copies(update, n))

        return Subject(mechanism=ManyAtOnce(many=many), claim=claim(epsilon), like=ONE)

    return make


def adaptive(kind: Any, *mods: Any) -> Make:
    """Wrap one round of a Flower strategy with adaptive clipping; epsilon is that of its mean and its noised count."""

    def make(epsilon: float, seed: int) -> Subject:
        np.random.seed(seed)
        multiplier, count = std_for(epsilon) * 1.25, std_for(epsilon) * 5 / 3  # 1 / 1.25^2 + 1 / (5 / 3)^2 = 1
        given = (1 / (multiplier**-2 + (2 * count) ** -2)) ** 0.5  # Flower counts the count's sensitivity as a half

        def fresh() -> Any:
            return kind(FedAvg(), given, 1, initial_clipping_norm=1.0, clipped_count_stddev=count)

        return Subject(mechanism=mechanism_of_strategy(fresh, clients=1, mods=mods), claim=claim(epsilon), like=ONE)

    return make


RATE = 0.5


@cache
def sampled_multiplier(epsilon: float) -> float:
    """Find the noise multiplier of one step that samples each example with probability ``RATE``."""

    def excess(log: float) -> float:
        got = composed_epsilons(noise_multiplier=math.exp(log), sample_rate=RATE, steps=1, delta=DELTA)
        return math.log(min(got)) - math.log(epsilon)

    return math.exp(optimize.brentq(excess, math.log(0.3), math.log(20), xtol=1e-3)) * 1.001


def opacus(epsilon: float, seed: int) -> Subject:
    """Build one step of Opacus' optimizer on a Poisson sample, with the canary in the data or not.

    Steps that sampled the same examples are one step of a network of as many heads.
    """
    made, rng = Batches.made(seed), torch.Generator().manual_seed(seed)
    noise, multiplier = torch.Generator().manual_seed(seed + 1), sampled_multiplier(epsilon)

    def steps(batch: Batch, taken: Tensor, n: int) -> Tensor:
        from opacus import GradSampleModule  # noqa: PLC0415
        from opacus.optimizers import DPOptimizer  # noqa: PLC0415

        heads = Heads(made.weight, n)
        model = GradSampleModule(heads)
        optimizer = DPOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            noise_multiplier=multiplier / math.sqrt(n),
            max_grad_norm=math.sqrt(n),
            expected_batch_size=1,
            generator=noise,
        )
        # Opacus' loader makes an empty batch of no sample, whose step is noise alone, as that of a blank example.
        inputs = batch.inputs[taken] if bool(taken.any()) else torch.zeros(1, batch.inputs.shape[1])
        labels = batch.labels[taken] if bool(taken.any()) else batch.labels[:1]
        heads.loss(model(inputs), labels).backward()
        optimizer.step()
        return made.weight.repeat(n, 1).view(n, -1) - heads.weight.weight.detach().view(n, -1)

    def many(batch: Batch, n: int) -> Tensors:
        taken = torch.rand(n, len(batch), generator=rng) < RATE
        rows = torch.zeros(n, made.weight.numel())
        kinds, of = taken.unique(dim=0, return_inverse=True)
        for number, kind in enumerate(kinds):
            rows[of == number] = steps(batch, kind, int((of == number).sum()))
        return {"weight": rows}

    return Subject(
        mechanism=ManyAtOnce(many=many),
        claim=claim(epsilon, unit="example"),
        neighbors=made.neighbors,
        noise="other",
    )


def sparse_vector(epsilon: float, seed: int, *, queries_noised: bool = True) -> Subject:
    """Build the sparse vector technique: find the first of ten queries above a noisy threshold.

    Source: Lyu, Su, Li 2017.
    """
    rng = np.random.default_rng(seed)

    def many(answers: Tensor, n: int) -> Tensors:
        threshold = 1.0 + rng.laplace(scale=2 / epsilon, size=(n, 1))
        noise = rng.laplace(scale=4 / epsilon, size=(n, len(answers))) if queries_noised else 0.0
        above = answers.numpy() + noise >= threshold
        first = np.where(above.any(1), above.argmax(1), len(answers))
        return {"first": torch.nn.functional.one_hot(torch.from_numpy(first), len(answers) + 1).double()}

    pair = Neighbors(first=torch.ones(10), second=torch.zeros(10), what="counts that a unit raises by one")
    pure = Claim(epsilon=epsilon, delta=0.0)
    return Subject(mechanism=ManyAtOnce(many=many), claim=pure, neighbors=pair, clip_norm=None, noise="other")


@dataclass(frozen=True, kw_only=True)
class Honest:
    """A mechanism of which the claim is true.

    Attributes:
        make: it, at an epsilon and a seed.
        draws: on either neighbor in a check.
        epsilons: at which it is checked.
    """

    make: Make
    draws: int = 4000
    epsilons: Sequence[float] = field(default=EPSILONS)


HONEST: dict[str, Honest] = {
    "clipped Gaussian noise": Honest(make=gaussian),
    "dp_noise": Honest(make=lambda e, s: of_defense(lambda norm: dp_noise(scale=std_for(e), clip_norm=norm), e, s)),
    "dp_noise, Laplace": Honest(make=laplace),
    "local_dp": Honest(
        make=lambda e, s: of_defense(
            lambda norm: local_dp(round_epsilon=e, delta=DELTA, clip_norm=norm, sensitivity=1.0), e, s
        )
    ),
    "dp_sgd": Honest(make=example_unit, draws=200),
    "Opacus, Poisson sampling": Honest(make=opacus),
    "Flower LocalDpMod": Honest(make=local_dp_mod),
    "Flower server-side fixed clipping": Honest(make=fixed(DifferentialPrivacyServerSideFixedClipping)),
    "Flower client-side fixed clipping": Honest(
        make=fixed(DifferentialPrivacyClientSideFixedClipping, fixedclipping_mod)
    ),
    "Flower server-side adaptive clipping": Honest(
        make=adaptive(DifferentialPrivacyServerSideAdaptiveClipping), draws=400
    ),
    "Flower client-side adaptive clipping": Honest(
        make=adaptive(DifferentialPrivacyClientSideAdaptiveClipping, adaptiveclipping_mod), draws=400
    ),
    "clipped Gaussian noise, a client replaced": Honest(
        make=lambda e, s: gaussian(e, s, std=2 * std_for(e), neighbors="replace")
    ),
    "clipped Gaussian noise over 50 rounds": Honest(
        make=lambda e, s: gaussian(e, s, std=math.sqrt(50) * std_for(e), rounds=50)
    ),
    "sparse vector": Honest(make=sparse_vector),
}
