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
from fl_privacy.dp_check.bounds import gaussian_epsilon, gaussian_mu
from fl_privacy.dp_check.claims import composed_epsilons
from fl_privacy.dp_check.draws import Mechanism
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
        """Arguments of ``check_mechanism``."""
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
    """Standard deviation of Gaussian noise at a sensitivity of 1."""
    return 1 / gaussian_mu(epsilon, DELTA)


def claim(epsilon: float, **more: Any) -> Claim:
    return Claim(epsilon=epsilon, delta=DELTA, **more)


def norm(update: Tensors) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in update.values()))


def clipped(update: Tensors, bound: float = 1.0) -> dict[str, Tensor]:
    return {name: value * min(1.0, bound / max(norm(update), 1e-12)) for name, value in update.items()}


def gaussian(epsilon: float, seed: int) -> Subject:
    """Clip and add noise, in five lines of its own."""
    rng, std = torch.Generator().manual_seed(seed), std_for(epsilon)

    def mechanism(update: Tensors) -> Tensors:
        return {name: v + std * torch.randn(v.shape, generator=rng) for name, v in clipped(update).items()}

    return Subject(mechanism=mechanism, claim=claim(epsilon), like=THREE)


def of_defense(defense: Defense, epsilon: float, seed: int, like: Tensors = THREE, **more: Any) -> Subject:
    """The upload hooks of one of the package's defenses."""
    rng = torch.Generator().manual_seed(seed)

    def mechanism(update: Tensors) -> Tensors:
        for hook in defense.upload:
            update = hook(update, ClientState(), rng)
        return update

    return Subject(mechanism=mechanism, claim=more.pop("claimed", claim(epsilon)), like=like, **more)


def laplace(epsilon: float, seed: int) -> Subject:
    """One value in [-1, 1]: dp_noise with Laplace noise, private without any delta."""
    pure = Claim(epsilon=epsilon, delta=0.0)
    made = dp_noise(noise="laplace", scale=1 / epsilon, clip_norm=1.0)
    return of_defense(made, epsilon, seed, {"count": torch.zeros(1)}, claimed=pure, noise="other")


@dataclass(frozen=True, eq=False)
class Batches:
    """A batch with a canary, and one that has a blank example without gradient in its place."""

    model: nn.Module
    with_it: Batch
    without: Batch

    @classmethod
    def made(cls, seed: int) -> "Batches":
        rng = torch.Generator().manual_seed(seed)
        model = nn.Linear(6, 4, bias=False)
        inputs, labels = torch.randn(4, 6, generator=rng), torch.randint(4, (4,), generator=rng)
        canary, blank = inputs.clone(), inputs.clone()
        canary[0], blank[0] = 100 * torch.randn(6, generator=rng), 0.0
        return cls(model, Batch(canary, labels), Batch(blank, labels))

    @property
    def neighbors(self) -> Neighbors:
        return Neighbors(first=self.with_it, second=self.without, what="a batch with a canary against one without it")


def example_unit(epsilon: float, seed: int) -> Subject:
    """One step of our dp_sgd, times the batch size."""
    made, rng = Batches.made(seed), torch.Generator().manual_seed(seed)
    (hook,) = dp_sgd(clip_norm=1.0, noise_multiplier=std_for(epsilon)).gradient
    sent = ModelState({name: p.detach() for name, p in made.model.named_parameters()}, {})
    plan = LocalPlan(lr=0.1, batch_size=4)

    def mechanism(batch: Batch) -> Tensors:
        step = LocalStep(model=made.model, sent=sent, batch=batch, plan=plan, state=ClientState(), rng=rng)
        return {name: value * len(batch) for name, value in hook(sent.parameters, step).items()}

    return Subject(mechanism=mechanism, claim=claim(epsilon, unit="example"), neighbors=made.neighbors)


def local_dp_mod(epsilon: float, seed: int) -> Subject:
    """Flower's LocalDpMod with a sensitivity of its clipping norm."""
    np.random.seed(seed)
    return Subject(
        mechanism=mechanism_of_mod(LocalDpMod(1.0, 1.0, epsilon, DELTA)),
        claim=claim(epsilon),
        neighbors=pair(ONE, seed),
    )


def fixed(kind: Any, *mods: Any) -> Make:
    """A strategy of Flower's with a fixed clipping norm."""

    def make(epsilon: float, seed: int) -> Subject:
        np.random.seed(seed)
        strategy = kind(FedAvg(), std_for(epsilon), 1.0, CLIENTS)
        return Subject(
            mechanism=mechanism_of_strategy(strategy, clients=CLIENTS, mods=mods),
            claim=claim(epsilon),
            neighbors=pair(ONE, seed),
        )

    return make


def adaptive(kind: Any, *mods: Any) -> Make:
    """A strategy of Flower's that adapts its clipping norm, with what its noisy count gives away counted in full."""

    def make(epsilon: float, seed: int) -> Subject:
        np.random.seed(seed)
        multiplier = std_for(epsilon)
        stddev = 3 * multiplier
        true = gaussian_epsilon(math.sqrt(multiplier**-2 - (2 * stddev) ** -2 + stddev**-2), DELTA)

        def fresh() -> Any:
            return kind(FedAvg(), multiplier, CLIENTS, initial_clipping_norm=1.0, clipped_count_stddev=stddev)

        mechanism = mechanism_of_strategy(fresh, clients=CLIENTS, mods=mods)
        return Subject(mechanism=mechanism, claim=claim(true), neighbors=pair(ONE, seed))

    return make


def pair(like: Tensors, seed: int) -> Neighbors:
    """A random update of ten times the clipping norm against none: the one pair of a mechanism that is slow to call."""
    rng = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(value.shape, generator=rng) for name, value in like.items()}
    first = {name: value * 10 / norm(drawn) for name, value in drawn.items()}
    second = {name: torch.zeros_like(value) for name, value in first.items()}
    return Neighbors(first=first, second=second, what="a random update of norm 10 against none", norm=10.0)


RATE = 0.5


@cache
def sampled_multiplier(epsilon: float) -> float:
    """Noise multiplier of one step whose batch takes each example with probability ``RATE``."""

    def excess(log: float) -> float:
        got = composed_epsilons(noise_multiplier=math.exp(log), sample_rate=RATE, steps=1, delta=DELTA)
        return math.log(min(got)) - math.log(epsilon)

    return math.exp(optimize.brentq(excess, math.log(0.3), math.log(20), xtol=1e-3)) * 1.001


def opacus(epsilon: float, seed: int) -> Subject:
    """One step of Opacus' optimizer on a Poisson sample, with the canary in the data or not."""
    from opacus import GradSampleModule  # noqa: PLC0415
    from opacus.optimizers import DPOptimizer  # noqa: PLC0415

    made, rng = Batches.made(seed), torch.Generator().manual_seed(seed)
    model = GradSampleModule(made.model)
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        noise_multiplier=sampled_multiplier(epsilon),
        max_grad_norm=1.0,
        expected_batch_size=1,
        generator=torch.Generator().manual_seed(seed + 1),
    )

    def mechanism(batch: Batch) -> Tensors:
        taken = torch.rand(len(batch), generator=rng) < RATE
        for parameter, value in zip(model.parameters(), start, strict=True):
            parameter.data.copy_(value)
        optimizer.zero_grad()
        if not bool(taken.any()):  # Opacus' loader makes an empty batch, whose gradient is noise alone
            taken[1] = True
            scale = 0.0
        else:
            scale = 1.0
        loss = nn.functional.cross_entropy(model(batch.inputs[taken] * scale), batch.labels[taken])
        loss.backward()
        optimizer.step()
        return {
            f"{number}": value - parameter.detach()
            for number, (value, parameter) in enumerate(zip(start, model.parameters(), strict=True))
        }

    return Subject(mechanism=mechanism, claim=claim(epsilon, unit="example"), neighbors=made.neighbors, noise="other")


def sparse_vector(epsilon: float, seed: int, *, queries_noised: bool = True) -> Subject:
    """The sparse vector technique: which of ten queries is the first above a noisy threshold (Lyu, Su, Li 2017)."""
    rng = np.random.default_rng(seed)

    def mechanism(answers: Tensor) -> Tensors:
        threshold = 1.0 + rng.laplace(scale=2 / epsilon)
        noise = rng.laplace(scale=4 / epsilon, size=len(answers)) if queries_noised else 0.0
        above = answers.numpy() + noise >= threshold
        first = int(np.argmax(above)) if above.any() else len(answers)
        return {"first": torch.nn.functional.one_hot(torch.tensor(first), len(answers) + 1).double()}

    pair = Neighbors(first=torch.ones(10), second=torch.zeros(10), what="counts that a unit raises by one")
    pure = Claim(epsilon=epsilon, delta=0.0)
    return Subject(mechanism=mechanism, claim=pure, neighbors=pair, clip_norm=None, noise="other")


@dataclass(frozen=True, kw_only=True)
class Honest:
    """A mechanism of which the claim is true.

    Attributes:
        make: it, at an epsilon and a seed.
        draws: on either neighbor in a check.
        epsilons: at which it is checked.
    """

    make: Make
    draws: int
    epsilons: Sequence[float] = field(default=EPSILONS)


HONEST: dict[str, Honest] = {
    "clipped Gaussian noise": Honest(make=gaussian, draws=400),
    "dp_noise": Honest(make=lambda e, s: of_defense(dp_noise(scale=std_for(e), clip_norm=1.0), e, s), draws=400),
    "dp_noise, Laplace": Honest(make=laplace, draws=400),
    "local_dp": Honest(make=lambda e, s: of_defense(local_dp(round_epsilon=e, delta=DELTA), e, s), draws=400),
    "dp_sgd": Honest(make=example_unit, draws=200),
    "Opacus, Poisson sampling": Honest(make=opacus, draws=200),
    "Flower LocalDpMod": Honest(make=local_dp_mod, draws=200),
    "Flower server-side fixed clipping": Honest(make=fixed(DifferentialPrivacyServerSideFixedClipping), draws=200),
    "Flower client-side fixed clipping": Honest(
        make=fixed(DifferentialPrivacyClientSideFixedClipping, fixedclipping_mod), draws=200
    ),
    "Flower server-side adaptive clipping": Honest(
        make=adaptive(DifferentialPrivacyServerSideAdaptiveClipping), draws=200
    ),
    "Flower client-side adaptive clipping": Honest(
        make=adaptive(DifferentialPrivacyClientSideAdaptiveClipping, adaptiveclipping_mod), draws=200
    ),
    "sparse vector": Honest(make=sparse_vector, draws=400),
}
