"""Decision whether a result is above chance, for all verdicts, pages and exit statuses."""

from statistics import NormalDist

from fl_privacy.measure.counts import Counts
from fl_privacy.measure.intervals import binomial_tail
from fl_privacy.measure.roc import Estimate

LEVEL = 0.01  # largest probability that chance alone makes any answer to one question red
_QUANTILE = NormalDist().inv_cdf(0.975)  # half the width of a 95 % interval, in standard errors


def above_chance(
    found: Counts | Estimate, *, among: int = 1, control: Counts | Estimate | None = None, low_leaks: bool = False
) -> bool:
    """Return whether ``found`` exceeds chance and ``control``, a result of guesses that never saw the uploads.

    ``among``: number of results that are tested together (Bonferroni). ``low_leaks=True``: low figures, such as errors,
    mean leakage.
    """
    if isinstance(found, Estimate):
        sign, end = (-1, found.high) if low_leaks else (1, found.low)
        # move the end of the 95 % interval, with normal errors, to the level
        end = found.value + (end - found.value) * -NormalDist().inv_cdf(LEVEL / max(1, among)) / _QUANTILE
        floors = [found.chance, *([control.value] if isinstance(control, Estimate) else [])]
        return all(sign * end > sign * floor for floor in floors)
    chance = found.by_chance
    if isinstance(control, Counts) and control.read:
        chance = max(chance, binomial_tail(found.read, found.judged, control.share or 0.0))
    return found.read > 0 and chance < LEVEL / max(1, among)
