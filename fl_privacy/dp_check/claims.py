"""Claims of differential privacy, facts of the mechanism, and recomputation of epsilon from facts."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from fl_privacy import checks
from fl_privacy.checks.packages import lacks
from fl_privacy.dp_check.bounds import gaussian_epsilon, gaussian_mu
from fl_privacy.errors import UserError

Unit = Literal["example", "client"]
Neighbors = Literal["add_remove", "replace"]
Sampling = Literal["none", "poisson", "shuffle"]

MOST_BY_DISTRIBUTION = 50.0  # largest epsilon for which the privacy loss distribution is computed


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Claim of differential privacy.

    Attributes:
        epsilon: privacy parameter, at least 0; infinite claims nothing.
        delta: probability in [0, 1).
        unit: protected unit: one ``example`` of a client or all data of one ``client``.
        neighbors: difference of two data sets: ``add_remove`` adds or removes a unit, ``replace`` exchanges one.
        sampled: sampling rate and outputs of a round; tests then draw outputs with the unit. ``None``: one output.
    """

    epsilon: float
    delta: float
    unit: Unit = "client"
    neighbors: Neighbors = "add_remove"
    rounds: int = 1
    by: str = "the app"
    sampled: "Facts | None" = None

    def __post_init__(self) -> None:
        checks.number("claimed epsilon", self.epsilon, at_least=0, infinite=True, example=1.0)
        checks.number("claimed delta", self.delta, at_least=0, below=1, example=1e-5)
        checks.one_of("unit", self.unit, ("example", "client"))
        checks.one_of("neighbors", self.neighbors, ("add_remove", "replace"))
        checks.whole("claimed rounds", self.rounds, at_least=1, example=1)

    def total(self, mu: float) -> float:
        """Return the epsilon of all outputs of a training, if one unit (example or client) shifts each output's mean.

        ``mu``: shift in standard deviations. If sampling is not Poisson, a unit is in the share ``sample_rate`` of
        outputs.
        """
        rate, steps = 1.0, self.rounds
        if self.sampled is not None:
            rate, steps = self.sampled.sample_rate, self.rounds * self.sampled.releases
        if mu == 0 or self.delta == 0 or steps == 0:
            return math.inf if mu > 0 and steps else 0.0
        if rate == 1 or self.sampled is None or self.sampled.sampling != "poisson":
            return gaussian_epsilon(mu * math.floor(steps * rate + 1e-9) / math.sqrt(steps), self.delta)
        # steps ten times as coarse are ten times as fast and raise an epsilon by less than 0.1 %
        given: dict[str, Any] = {"sample_rate": rate, "steps": steps, "delta": self.delta, "interval": 1e-3}
        multiplier = max(1 / mu, 0.01)
        while (both := composed_epsilons(noise_multiplier=multiplier, **given))[0] > MOST_BY_DISTRIBUTION:
            multiplier *= 1.2  # more noise spends less
        return min(both) / 1.001

    @property
    def mu(self) -> float:
        """Return how far the claim lets one unit (example or client) shift an output's mean, in standard deviations."""
        if self.sampled is not None and self.sampled.noise_multiplier:
            return 1 / self.sampled.noise_multiplier
        return gaussian_mu(self.epsilon, self.delta) / math.sqrt(self.rounds)

    def in_words(self) -> str:
        over = "one round" if self.rounds == 1 else f"{self.rounds} rounds"
        return f"epsilon {self.epsilon:.4g} at delta {self.delta:.3g} for one {self.unit} over {over}"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Known facts of a mechanism that adds noise; a unit is the protected example or client.

    ``noise_multiplier``: standard deviation of the Gaussian noise over the l2 sensitivity to one unit, if known.
    ``sampling``: way of sampling, if known; ``shuffle`` (batches of a shuffled set) counts as no sampling, with a note.
    ``seen_by``: observer of the outputs: the ``server`` (each reply), or a reader of the ``model`` (their mean).
    """

    noise_multiplier: float | None
    sample_rate: float = 1.0  # share of the units in a release
    sampling: Sampling | None = "none"
    releases: int = 1  # number of noised releases in a round
    rounds: int = 1
    missing: Sequence[str] = ()
    seen_by: Literal["server", "model"] = "server"

    def __post_init__(self) -> None:
        if self.noise_multiplier is not None:
            checks.number("noise_multiplier", self.noise_multiplier, at_least=0, infinite=True, example=1.0)
        checks.number("sample_rate", self.sample_rate, above=0, at_most=1, example=0.1)
        checks.whole("releases", self.releases, at_least=0, example=1)
        checks.whole("rounds", self.rounds, at_least=1, example=10)


@dataclass(frozen=True, kw_only=True)
class Stated:
    """DP claim of a mod, strategy or defense about itself, and facts such as its noise and sampling."""

    claim: Claim | None
    facts: Facts
    clip_norm: float  # largest l2 norm of a unit's contribution
    unit: Unit = "client"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """Epsilon that follows from stated facts.

    ``rdp``: upper bound on epsilon by Renyi divergences; infinite without noise, ``None`` if the noise is unknown.
    ``missing``: facts that are not stated; the worst case replaces them if there is one.
    """

    rdp: float | None
    pld: float | None  # tight epsilon by the privacy loss distribution, with the same special values
    delta: float
    sampling: str = "without sampling"  # phrase on the sampling that is counted
    missing: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()  # sentences on differences between the mechanism and the accountants' theory

    @property
    def epsilon(self) -> float | None:
        known = [value for value in (self.rdp, self.pld) if value is not None]
        return min(known) if known else None


def recompute(facts: Facts, *, delta: float, neighbors: Neighbors = "add_remove") -> Recomputed:
    """Return the epsilon at ``delta`` of all outputs of a training together, by two accountants.

    Unknown sampling counts as none. For ``replace`` the sensitivity is doubled, and sampling counts as none.
    ``UserError`` if the package dp-accounting is missing.
    """
    checks.number("delta", delta, at_least=0, below=1, example=1e-5)
    missing, caveats, rate = list(facts.missing), [], facts.sample_rate
    if rate < 1 and facts.sampling != "poisson":
        if facts.sampling is None:
            missing.append("how the batches are sampled (taken to amplify nothing)")
        else:
            caveats.append(
                "Batches are cut from a shuffled set, not drawn by Poisson sampling; an accountant that counts them as"
                f" sampled at a rate of {rate:.3g} promises more than is proven. Counted here: no amplification."
            )
        rate = 1.0
    multiplier, steps = facts.noise_multiplier, facts.releases * facts.rounds
    if multiplier and neighbors == "replace":
        multiplier, rate = multiplier / 2, 1.0
        if facts.sample_rate < 1 and facts.sampling == "poisson":
            caveats.append(
                "No sampling is counted where a unit is replaced: the epsilon of a Poisson sample may be far smaller."
            )
    both: tuple[float | None, float | None] = (None, None)
    if multiplier == 0:
        both = math.inf, math.inf
    elif multiplier is not None and (steps == 0 or math.isinf(multiplier)):
        both = 0.0, 0.0
    elif multiplier is not None:
        both = composed_epsilons(noise_multiplier=multiplier, sample_rate=rate, steps=steps, delta=delta)
    sampling = "without sampling" if rate == 1 else f"with Poisson samples of {100 * rate:.3g} %"
    return Recomputed(
        rdp=both[0], pld=both[1], delta=delta, sampling=sampling, missing=tuple(missing), caveats=tuple(caveats)
    )


@cache
def composed_epsilons(
    *, noise_multiplier: float, sample_rate: float, steps: int, delta: float, interval: float = 1e-4
) -> tuple[float, float]:
    """Return epsilon after ``steps`` outputs of the Poisson-sampled Gaussian mechanism, by RDP and by PLD.

    ``interval``: width of the steps in which PLD (privacy loss distribution) counts privacy losses.
    """
    if delta == 0:
        return math.inf, math.inf
    try:
        import dp_accounting  # noqa: PLC0415
        from dp_accounting import pld, rdp  # noqa: PLC0415
    except ImportError as error:
        raise lacks("dp_accounting", "A recomputed epsilon") from error
    event: Any = dp_accounting.GaussianDpEvent(noise_multiplier)
    if sample_rate < 1:
        event = dp_accounting.PoissonSampledDpEvent(sample_rate, event)
    with errors_alone("absl"):  # on orders left out, which changes the bound upward at most
        by_rdp = float(rdp.RdpAccountant().compose(event, steps).get_epsilon(delta))
        if sample_rate == 1:
            return by_rdp, gaussian_epsilon(math.sqrt(steps) / noise_multiplier, delta)
        if by_rdp > MOST_BY_DISTRIBUTION:
            return by_rdp, by_rdp
        return by_rdp, float(
            pld.PLDAccountant(value_discretization_interval=interval).compose(event, steps).get_epsilon(delta)
        )


@contextmanager
def errors_alone(name: str) -> Iterator[None]:
    """Suppress the logger ``name`` below the level of errors."""

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger = logging.getLogger(name)
    logger.addFilter(is_error)
    try:
        yield
    finally:
        logger.removeFilter(is_error)


def expect_claim(epsilon: float | Claim, delta: float | None) -> Claim:
    """Return ``epsilon`` if it is a ``Claim``; else make one of ``epsilon`` and ``delta`` for one upload of a client.

    ``UserError`` if delta is missing, or differs from the claim's.
    """
    if isinstance(epsilon, Claim):
        if delta is not None and delta != epsilon.delta:
            raise UserError(f"delta is expected once, but got {delta} next to that of the claim; leave delta out.")
        return epsilon
    if delta is None:
        raise UserError("A claimed epsilon is expected with its delta, but got none; add delta=1e-5.")
    return Claim(epsilon=epsilon, delta=delta)
