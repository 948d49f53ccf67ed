"""The one rule by which something counts as more than chance: every verdict, page and exit status asks it."""

from statistics import NormalDist

from fl_privacy.measure.counts import Counts
from fl_privacy.measure.intervals import binomial_tail

LEVEL = 0.01
"""Probability with which chance alone may make a page red: beyond, it is more than chance."""

_QUANTILE = NormalDist().inv_cdf(0.975)
"""By which a 95 % interval is as wide as it is."""


def above_chance(counts: Counts, *, among: int = 1, control: Counts | None = None) -> bool:
    """Say whether more was reconstructed than chance allows, and than a control that never saw the uploads.

    Args:
        counts: of one attacker and round.
        among: answers of which any makes a page red; chance may do so no more often than by a single one (Bonferroni).
        control: the same of guesses at others' uploads; ``None`` where there is none, so that ``by_chance`` decides.
    """
    chance = counts.by_chance
    if control is not None and control.read:
        chance = max(chance, binomial_tail(counts.read, counts.judged, control.share or 0.0))
    return counts.read > 0 and chance < LEVEL / max(1, among)


def sure_end(value: float, end: float, *, among: int = 1) -> float:
    """Move the ``end`` of a 95 % interval of ``value`` to where chance passes it as seldom as ``LEVEL`` says.

    Args:
        value: estimated, with normal errors.
        end: of its interval, lower or upper.
        among: as of ``above_chance``.
    """
    return value + (end - value) * -NormalDist().inv_cdf(LEVEL / max(1, among)) / _QUANTILE
