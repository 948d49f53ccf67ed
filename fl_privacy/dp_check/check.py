"""What is asked about a claim, and the whole answer: recomputed, drawn from, and what is not covered."""

import math
import time
from dataclasses import dataclass
from typing import Literal

import torch

from fl_privacy import checks
from fl_privacy.dp_check.bounds import gaussian_epsilon
from fl_privacy.dp_check.claims import Claim, Neighbors as NeighborKind, Recomputed, Stated, Unit, recompute
from fl_privacy.dp_check.draws import Mechanism, Neighbors
from fl_privacy.dp_check.mechanism import check_mechanism
from fl_privacy.dp_check.verdict import ClaimVerdict
from fl_privacy.types import Tensors

SECONDS = 60.0
"""That the draws of one subject may take where their number is not given."""

MOST_DRAWS, FEWEST_DRAWS = 4000, 200
PILOT_CALLS = 1800
"""Of a mechanism before draws are counted, at most."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Settings of a test of a claim.

    Attributes:
        epsilon: that is claimed, instead of what the subject states; ``None`` takes that.
        delta: of epsilon.
        rounds: for which the claim is made.
        neighbors: see ``Claim``.
        clip_norm: to which one client's change is clipped, instead of what the subject states.
        clients: that a strategy aggregates; ``None`` takes the number that it samples.
        parameters: values of an update that is drawn.
        like: an update's shapes; ``None`` takes a matrix and a vector of ``parameters`` values together.
        draws: on either neighbor; ``None`` takes as many as a minute allows.
        noise: see ``check_mechanism``.
        seed: of the directions.
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
        """Return tensors of an update's names and shapes."""
        if self.like is not None:
            return self.like
        rows = max(1, math.isqrt(9 * self.parameters // 10))
        columns = 9 * self.parameters // 10 // rows
        return {"weight": torch.zeros(rows, columns), "bias": torch.zeros(self.parameters - rows * columns)}

    def claim(self, stated: Claim | None, by: str, *, unit: Unit = "client") -> Claim | None:
        """Give what is asked for, or else what is ``stated``; ``unit`` is protected where nothing says so."""
        if self.epsilon is None:
            return stated
        unit = stated.unit if stated else unit
        return Claim(
            epsilon=self.epsilon, delta=self.delta, unit=unit, neighbors=self.neighbors, rounds=self.rounds, by=by
        )


def tested(
    name: str, mechanism: Mechanism, stated: Stated | None, asked: Asked, *, pair: Neighbors | None = None
) -> ClaimVerdict:
    """Test ``mechanism`` against its claim; without one, against what its stated noise spends in one round.

    Args:
        name: of the subject, for pages.
        mechanism: turns an update, or what ``pair`` has, into what is sent.
        stated: of it; ``None`` where nothing is.
        asked: how.
        pair: inputs of the mechanism, where it takes something else than an update.
    """
    claim = asked.claim(stated.claim if stated else None, name, unit=stated.unit if stated else "client")
    recomputed = recomputed_by(stated, asked, claim)
    held = claim or _own_claim(stated, asked)
    notes = notes_on(stated)
    if held is None:
        return ClaimVerdict(subject=name, claim=None, recomputed=recomputed, notes=notes)
    shapes = asked.shapes
    given = pair.second if pair else {n: torch.zeros_like(value) for n, value in shapes.items()}
    check = check_mechanism(
        mechanism,
        claimed=held,
        like=None if pair else shapes,
        neighbors=pair,
        clip_norm=asked.clip_norm or (stated.clip_norm if stated else None),
        noise=asked.noise,
        draws=asked.draws or affordable_draws(mechanism, given),
        seed=asked.seed,
    )
    return ClaimVerdict(subject=name, claim=held, recomputed=recomputed, check=check, notes=notes)


def recomputed_by(stated: Stated | None, asked: Asked, claim: Claim | None) -> Recomputed | None:
    """Recompute epsilon of what is ``stated``, at the delta and for the rounds of ``claim``."""
    if stated is None:
        return None
    delta = claim.delta if claim else asked.delta
    return recompute(stated.facts, delta=delta, neighbors=claim.neighbors if claim else asked.neighbors)


def _own_claim(stated: Stated | None, asked: Asked) -> Claim | None:
    """Return what the stated noise multiplier amounts to, over the rounds that are asked for."""
    multiplier = stated.facts.noise_multiplier if stated else None
    if not multiplier or asked.delta == 0:
        return None
    assert stated is not None
    epsilon = gaussian_epsilon(stated.facts.rounds**0.5 / multiplier, asked.delta)
    return Claim(
        epsilon=epsilon, delta=asked.delta, unit=stated.unit, rounds=stated.facts.rounds, by="its noise multiplier"
    )


def notes_on(stated: Stated | None) -> tuple[str, ...]:
    """Say whom a statement does not protect against."""
    if stated is None or stated.facts.seen_by == "server":
        return ()
    return ("The server reads each reply before any noise is added: this is about whoever reads the model alone.",)


def affordable_draws(mechanism: Mechanism, given: object, *, seconds: float = SECONDS) -> int:
    """Count how many draws on either neighbor ``seconds`` allow, by timing a few on ``given``."""
    mechanism(given)
    started = time.perf_counter()
    for _ in range(5):
        mechanism(given)
    each = (time.perf_counter() - started) / 5
    return int(min(MOST_DRAWS, max(FEWEST_DRAWS, (seconds / max(each, 1e-9) - PILOT_CALLS) / 2.5)))
