"""Settings for checking a privacy claim, and the test of a mechanism."""

import math
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fl_privacy import checks
from fl_privacy.dp_check.bounds import gaussian_epsilon
from fl_privacy.dp_check.claims import Claim, Neighbors as NeighborKind, Recomputed, Stated, Unit, recompute
from fl_privacy.dp_check.draws import Mechanism, Neighbors
from fl_privacy.dp_check.mechanism import check_mechanism
from fl_privacy.dp_check.verdict import ClaimVerdict
from fl_privacy.types import Tensors

SECONDS = 60.0  # seconds for draws of one mechanism, if their number is not given

MOST_DRAWS, FEWEST_DRAWS = 4000, 200
PILOT_CALLS = 1800  # most calls of a mechanism in the pilot, before the counted draws


@dataclass(frozen=True, kw_only=True)
class DpCheckRequest:
    """Settings of a check of a differential privacy claim.

    Attributes:
        epsilon: claimed epsilon; ``None`` takes what the mechanism states.
        clip_norm: clipping norm of one client's change; ``None`` takes what the mechanism states.
        clients: number of clients whose replies a strategy aggregates; ``None`` takes its sample size.
        parameters: number of values of the test update, a matrix and a vector, if ``like`` is ``None``.
        like: tensors with the shapes of an update.
        draws: number of draws per neighbor; ``None`` takes as many as a minute allows.
    """

    epsilon: float | None = None
    delta: float = 1e-5
    rounds: int = 1
    neighbors: NeighborKind = "add_remove"
    clip_norm: float | None = None
    clients: int | None = None
    parameters: int = 1000
    like: Tensors | None = None
    draws: int | None = None
    noise: Literal["gaussian", "other"] = "gaussian"
    seed: int = 0

    def __post_init__(self) -> None:
        checks.one_of("neighbors", self.neighbors, ("add_remove", "replace"))
        checks.one_of("noise", self.noise, ("gaussian", "other"))
        if self.epsilon is not None:
            checks.number("--epsilon", self.epsilon, at_least=0, infinite=True, example=1.0)
        checks.number("--delta", self.delta, at_least=0, below=1, example=1e-5)
        checks.whole("--rounds", self.rounds, at_least=1, at_most=1_000_000, example=10)
        checks.whole("parameters", self.parameters, at_least=2, at_most=10_000_000, example=1000)
        if self.clip_norm is not None:
            checks.number("--clip-norm", self.clip_norm, above=0, example=1.0)
        if self.clients is not None:
            checks.whole("clients", self.clients, at_least=1, at_most=10_000, example=10)
        if self.draws is not None:
            checks.whole("--draws", self.draws, at_least=FEWEST_DRAWS, at_most=10_000_000, example=4000)

    @property
    def shapes(self) -> Tensors:
        if self.like is not None:
            return self.like
        rows = max(1, math.isqrt(9 * self.parameters // 10))
        columns = 9 * self.parameters // 10 // rows
        return {"weight": torch.zeros(rows, columns), "bias": torch.zeros(self.parameters - rows * columns)}

    def claim(self, stated: Claim | None, by: str, *, unit: Unit = "client") -> Claim | None:
        if self.epsilon is None:
            return stated
        settings: dict[str, Any] = {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "neighbors": self.neighbors,
            "rounds": self.rounds,
        }
        return Claim(**settings, unit=stated.unit if stated else unit, by=by)


def tested(
    name: str, mechanism: Mechanism, stated: Stated | None, asked: DpCheckRequest, *, pair: Neighbors | None = None
) -> ClaimVerdict:
    """Test by sampling whether ``mechanism`` has the epsilon that it claims or, without a claim, that its noise gives.

    ``mechanism``: function from an update, or an input of ``pair``, to its output. ``stated``: claim and noise that it
    states about itself. ``asked``: settings. ``pair``: two inputs of a mechanism that does not take an update.
    """
    claim = asked.claim(stated.claim if stated else None, name, unit=stated.unit if stated else "client")
    recomputed = recomputed_by(stated, asked, claim)
    unseen = "The server sees each reply before any noise is added: this claim covers only those who see the model."
    notes = stated.notes if stated else ()
    notes = (*notes, unseen) if stated and stated.facts.seen_by == "model" else notes
    held, multiplier = claim, stated.facts.noise_multiplier if stated else None
    if held is None and stated and multiplier and asked.delta > 0:
        rounds = stated.facts.rounds
        epsilon = gaussian_epsilon(rounds**0.5 / multiplier, asked.delta)
        held = Claim(epsilon=epsilon, delta=asked.delta, unit=stated.unit, rounds=rounds, by="its noise multiplier")
    if held is None:
        return ClaimVerdict(subject=name, claim=None, recomputed=recomputed, notes=notes)
    shapes, draws = asked.shapes, asked.draws
    if draws is None:  # as many as the time allows, by a few calls
        given = pair.second if pair else {n: torch.zeros_like(value) for n, value in shapes.items()}
        mechanism(given)
        started = time.perf_counter()
        for _ in range(5):
            mechanism(given)
        each = (time.perf_counter() - started) / 5
        draws = int(min(MOST_DRAWS, max(FEWEST_DRAWS, (SECONDS / max(each, 1e-9) - PILOT_CALLS) / 2.5)))
    check = check_mechanism(
        mechanism,
        claimed=held,
        like=None if pair else shapes,
        neighbors=pair,
        clip_norm=asked.clip_norm or (stated.clip_norm if stated else None),
        noise=asked.noise,
        draws=draws,
        seed=asked.seed,
    )
    return ClaimVerdict(subject=name, claim=held, recomputed=recomputed, check=check, notes=notes)


def recomputed_by(stated: Stated | None, asked: DpCheckRequest, claim: Claim | None) -> Recomputed | None:
    """Recompute epsilon from the noise in ``stated``, if any; delta is that of ``claim`` or else of ``asked``."""
    if stated is None:
        return None
    delta = claim.delta if claim else asked.delta
    return recompute(stated.facts, delta=delta, neighbors=claim.neighbors if claim else asked.neighbors)
