"""What is claimed of a mechanism, what is known of it, and the epsilon that follows from what is known."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from fl_privacy import checks
from fl_privacy.checks.packages import lacks
from fl_privacy.dp_check.bounds import gaussian_epsilon
from fl_privacy.errors import UserError

Unit = Literal["example", "client"]
Neighbors = Literal["add_remove", "replace"]
Sampling = Literal["none", "poisson", "shuffle"]

MOST_BY_DISTRIBUTION = 50.0
"""Epsilon beyond which the privacy loss distribution is not computed."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A promise of differential privacy, as somebody states it.

    Attributes:
        epsilon: above 0.
        delta: in [0, 1).
        unit: whose data are protected, one ``example`` of a client or all data of one ``client``.
        neighbors: whether that unit is added or removed, or replaced by another.
        rounds: for how many rounds of taking part it is claimed.
        by: who claims it, as a page names it.
    """

    epsilon: float
    delta: float
    unit: Unit = "client"
    neighbors: Neighbors = "add_remove"
    rounds: int = 1
    by: str = "the app"

    def __post_init__(self) -> None:
        checks.number("claimed epsilon", self.epsilon, at_least=0, infinite=True, example=1.0)
        checks.number("claimed delta", self.delta, at_least=0, below=1, example=1e-5)
        checks.one_of("unit", self.unit, ("example", "client"))
        checks.one_of("neighbors", self.neighbors, ("add_remove", "replace"))
        checks.whole("claimed rounds", self.rounds, at_least=1, example=1)

    def in_words(self) -> str:
        """Return the claim in words, such as ``epsilon 8 at delta 1e-05 for one client over 50 rounds``."""
        over = "one round" if self.rounds == 1 else f"{self.rounds} rounds"
        return f"epsilon {self.epsilon:.4g} at delta {self.delta:.3g} for one {self.unit} over {over}"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts known of the mechanism that runs.

    Attributes:
        noise_multiplier: standard deviation of its Gaussian noise over the l2 sensitivity to one unit, as the observer
            sees it; 0 where there is no noise, ``None`` where it is not known.
        sample_rate: share of the units that a release uses; 1 where all are used.
        sampling: how they are drawn; ``shuffle`` (fixed batches of a shuffled set) amplifies less than is known, so
            that it counts as no sampling and the difference is a caveat; ``None`` where it is not known.
        releases: noised releases in a round.
        rounds: that run.
        missing: facts that nobody states, a phrase each.
        seen_by: who reads the release: the ``server`` each reply, or whoever reads the ``model`` the aggregate alone.
    """

    noise_multiplier: float | None
    sample_rate: float = 1.0
    sampling: Sampling | None = "none"
    releases: int = 1
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
    """What a mod, a strategy or a defense states of itself.

    Attributes:
        claim: ``None`` where it states no epsilon.
        facts: of the mechanism that it is configured to be.
        clip_norm: l2 norm to which what one unit changes is clipped.
        unit: what is protected, where no claim says so.
    """

    claim: Claim | None
    facts: Facts
    clip_norm: float
    unit: Unit = "client"


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """The epsilon that follows from the facts.

    Attributes:
        rdp: by Renyi divergences, an upper bound; infinite without noise, ``None`` where a fact is missing.
        pld: by the privacy loss distribution, tight; as ``rdp``.
        delta: at which both are.
        missing: the facts without which there is no number, or which were assumed for the worst.
        caveats: where practice is another than theory, a sentence each.
    """

    rdp: float | None
    pld: float | None
    delta: float
    missing: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()

    @property
    def epsilon(self) -> float | None:
        """Return the smaller of both, as both are upper bounds."""
        known = [value for value in (self.rdp, self.pld) if value is not None]
        return min(known) if known else None


def recompute(facts: Facts, *, delta: float, neighbors: Neighbors = "add_remove") -> Recomputed:
    """Compute epsilon at ``delta`` of all releases together by two accountants.

    Sampling of which nobody states how it is done is taken to amplify nothing. Under ``replace`` a unit moves a release
    by twice the sensitivity, and no sampling is counted.

    Raises:
        UserError: the package dp-accounting is missing.
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
    if facts.noise_multiplier is None:
        return Recomputed(rdp=None, pld=None, delta=delta, missing=tuple(missing), caveats=tuple(caveats))
    if facts.noise_multiplier == 0:
        return Recomputed(rdp=math.inf, pld=math.inf, delta=delta, missing=tuple(missing), caveats=tuple(caveats))
    multiplier = facts.noise_multiplier
    if neighbors == "replace":
        multiplier, rate = multiplier / 2, 1.0
        if facts.sample_rate < 1 and facts.sampling == "poisson":
            caveats.append(
                "No sampling is counted where a unit is replaced: the epsilon of a Poisson sample may be far smaller."
            )
    steps = facts.releases * facts.rounds
    if steps == 0 or math.isinf(multiplier):
        return Recomputed(rdp=0.0, pld=0.0, delta=delta, missing=tuple(missing), caveats=tuple(caveats))
    rdp, pld = composed_epsilons(noise_multiplier=multiplier, sample_rate=rate, steps=steps, delta=delta)
    return Recomputed(rdp=rdp, pld=pld, delta=delta, missing=tuple(missing), caveats=tuple(caveats))


def composed_epsilons(*, noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> tuple[float, float]:
    """Compute epsilon of the Poisson-subsampled Gaussian mechanism after ``steps``, by RDP and by PLD.

    Without sampling the privacy loss distribution is that of one Gaussian release, in closed form. An epsilon so large
    that it promises nothing is by RDP alone, since the distribution would take minutes.

    Args:
        noise_multiplier: above 0.
        sample_rate: in (0, 1].
        steps: at least 1.
        delta: in (0, 1); at 0 both are infinite.

    Raises:
        UserError: the package dp-accounting is missing.
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
        return by_rdp, float(pld.PLDAccountant().compose(event, steps).get_epsilon(delta))


@contextmanager
def errors_alone(name: str) -> Iterator[None]:
    """Hold back what the logger ``name`` says that is no error.

    A filter, as a new level would empty what every logger of the process has cached.
    """
    logger = logging.getLogger(name)
    logger.addFilter(_is_error)
    try:
        yield
    finally:
        logger.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def expect_claim(epsilon: float | Claim, delta: float | None) -> Claim:
    """Take a number with ``delta`` for a claim on one release of one client.

    Raises:
        UserError: delta is missing, or given twice.
    """
    if isinstance(epsilon, Claim):
        if delta is not None and delta != epsilon.delta:
            raise UserError("delta is expected once, but the claim has one of its own; leave delta out.")
        return epsilon
    if delta is None:
        raise UserError("A claimed epsilon is expected with its delta, but delta is missing; add delta=1e-5.")
    return Claim(epsilon=epsilon, delta=delta)
