"""The one rule by which something counts as more than chance: every verdict, page and exit status asks it."""

from statistics import NormalDist

from fl_privacy.measure.counts import Counts
from fl_privacy.measure.intervals import binomial_tail
from fl_privacy.measure.roc import Estimate

LEVEL = 0.01
"""Probability with which chance alone may make a page red: beyond, it is more than chance."""

_QUANTILE = NormalDist().inv_cdf(0.975)
"""By which a 95 % interval is as wide as it is."""


def above_chance(
    found: Counts | Estimate,
    *,
    among: int = 1,
    control: Counts | Estimate | None = None,
    low_leaks: bool = False,
) -> bool:
    """Say whether more was found than chance allows, and than a control that never saw the uploads.

    Args:
        found: of one attacker and scenario: counts of examples, or a figure with its 95 % interval and chance.
        among: answers of which any makes a page red; chance may do so no more often than by a single one (Bonferroni).
        control: the same from uploads without these examples; ``None`` where there is none, so that chance decides.
        low_leaks: whether low figures mean that more was found, as of an error.
    """
    if isinstance(found, Estimate):
        sign = -1 if low_leaks else 1
        end = sure_end(found.value, found.high if low_leaks else found.low, among=among)
        floors = [found.chance, *([control.value] if isinstance(control, Estimate) else [])]
        return all(sign * end > sign * floor for floor in floors)
    chance = found.by_chance
    if isinstance(control, Counts) and control.read:
        chance = max(chance, binomial_tail(found.read, found.judged, control.share or 0.0))
    return found.read > 0 and chance < LEVEL / max(1, among)


def sure_end(value: float, end: float, *, among: int = 1) -> float:
    """Move the ``end`` of a 95 % interval of ``value`` to where chance passes it as seldom as ``LEVEL`` says.

    Args:
        value: estimated, with normal errors.
        end: of its interval, lower or upper.
        among: as of ``above_chance``.
    """
    return value + (end - value) * -NormalDist().inv_cdf(LEVEL / max(1, among)) / _QUANTILE
