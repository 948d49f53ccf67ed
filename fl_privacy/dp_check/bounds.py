"""Lower bounds on epsilon from draws or guesses, and the privacy of the Gaussian mechanism."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # its parts are imported when used: statistics alone take as long as PyTorch
from numpy.typing import ArrayLike, NDArray

from fl_privacy import checks
from fl_privacy.measure.intervals import binomial_lower, binomial_upper

Floats = NDArray[np.float64]

LARGEST_EPSILON = 200.0  # largest epsilon that is computed; exp of larger ones overflows


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return the delta of the Gaussian mechanism at ``epsilon`` (Balle and Wang 2018, Theorem 8).

    ``mu`` is the sensitivity divided by the standard deviation of the noise, at least 0.
    """
    if mu == 0:
        return 0.0
    if math.isinf(mu):
        return 1.0
    low = scipy.special.log_ndtr(-epsilon / mu + mu / 2)
    high = epsilon + scipy.special.log_ndtr(-epsilon / mu - mu / 2)
    return float(np.exp(low) * -np.expm1(min(high - low, 0.0)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the Gaussian mechanism's epsilon at ``delta``; ``mu``: sensitivity / standard deviation of the noise.

    >>> round(gaussian_epsilon(1.0, 1e-5), 2)
    4.38
    """
    checks.number("delta", delta, above=0, below=1, example=1e-5)
    if math.isinf(mu):
        return math.inf
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    return _zero(lambda epsilon: gaussian_delta(mu, epsilon) - delta, xtol=1e-9)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest mu for which the Gaussian mechanism is (epsilon, delta)-private."""
    checks.number("epsilon", epsilon, at_least=0, example=1.0)
    checks.number("delta", delta, above=0, below=1, example=1e-5)
    return _zero(lambda mu: delta - gaussian_delta(mu, epsilon), xtol=1e-12)


def _zero(function: Callable[[float], float], *, xtol: float, most: float = math.inf) -> float:
    high = 1.0
    while function(high) > 0 and high < most:
        high *= 2
    return float(scipy.optimize.brentq(function, 0.0, high, xtol=xtol)) if function(high) <= 0 else math.inf


@dataclass(frozen=True, kw_only=True)
class GuessCounts:
    """Counts (T,) of outputs on two neighboring data sets whose statistic reaches each of T thresholds."""

    hits: Floats  # of the first neighbor's outputs
    of_hits: int  # number of draws on the first neighbor
    misses: Floats  # of the other's
    of_misses: int  # number of draws on the other


def counts_above(first: ArrayLike, second: ArrayLike, thresholds: ArrayLike) -> GuessCounts:
    """Count the values of a statistic on two neighbors (``first``, ``second``) that reach each of T ``thresholds``."""
    positives, negatives, at = (np.asarray(values, dtype=np.float64) for values in (first, second, thresholds))
    hits, misses = (
        (len(values) - np.searchsorted(np.sort(values), at, side="left")).astype(np.float64)
        for values in (positives, negatives)
    )
    return GuessCounts(hits=hits, of_hits=len(positives), misses=misses, of_misses=len(negatives))


def counted_epsilon(counts: GuessCounts, *, delta: float, error: float) -> Floats:
    """Return lower bounds (T,) on epsilon for any noise, one for each of T thresholds (Nasr et al. 2021, section 3).

    Differential privacy limits an event's probability on one data set to e^epsilon times that on its neighbor, plus
    delta. Events are values above or below a threshold; Clopper-Pearson bounds replace the probabilities. ``counts``:
    at thresholds that were chosen on other draws. ``error``: probability with which each bound may be wrong.
    """
    bounds, of_hits, of_misses = [], counts.of_hits, counts.of_misses
    for hits, of, misses, out_of in (
        (counts.hits, of_hits, counts.misses, of_misses),
        (of_misses - counts.misses, of_misses, of_hits - counts.hits, of_hits),
    ):
        least = binomial_lower(hits, of, error / 4)
        largest = binomial_upper(misses, out_of, error / 4)
        with np.errstate(divide="ignore"):
            bounds.append(np.log(np.maximum(least - delta, 0.0)) - np.log(largest))
    return np.clip(np.maximum(*bounds), 0.0, LARGEST_EPSILON)


SINES = (0.9, 0.7, 0.4, 0.1, 1e-3, 1e-5)  # sines of the angles to the update below which releases are counted


def aligned_epsilon(sines: Floats, sizes: Sequence[int], *, delta: float, error: float) -> float:
    """Return a lower bound on epsilon from angles between a mechanism's outputs and an update of random direction.

    Outputs that contain the update have smaller angles to it than chance allows (Markov's inequality). ``sines``: sines
    (n, A) of the angles of n outputs, in each of A arrays. ``sizes``: number of values of each array, at least 2.
    ``error``: probability in (0, 1) with which the bound may be wrong.
    """
    if not len(sizes):
        return 0.0
    share, best = error / 2 / (len(sizes) * len(SINES)), 0.0
    for values, size in zip(sines.T, sizes, strict=True):
        for sine in SINES:
            least = float(binomial_lower(np.array([(values <= sine).sum()]), len(values), share)[0]) - delta
            near = float(scipy.special.betainc((size - 1) / 2, 0.5, sine**2)) / share
            if least > near:
                best = max(best, LARGEST_EPSILON if near == 0 else math.log(least / near))
    return min(best, LARGEST_EPSILON)


def measured_mu(first: ArrayLike, second: ArrayLike, *, error: float) -> float:
    """Return a lower bound on mu of the Gaussian mechanism; 0 if the two samples do not differ significantly.

    ``first`` (n,), ``second`` (m,): values of a statistic on two neighbors; it must have been chosen on other draws.
    ``error``: probability that the bound is wrong.
    """
    yes, no = (np.asarray(values, dtype=np.float64) for values in (first, second))
    degrees, size = len(yes) + len(no) - 2, math.sqrt(len(yes) * len(no) / (len(yes) + len(no)))
    shift = abs(float(yes.mean() - no.mean()))
    pooled = math.sqrt((float(np.square(yes - yes.mean()).sum()) + float(np.square(no - no.mean()).sum())) / degrees)
    if shift == 0:
        return 0.0
    if pooled <= 1e-12 * shift:
        return math.inf
    t = shift / pooled * size
    if scipy.stats.t.sf(t, degrees) >= error / 2:
        return 0.0
    # The noncentral t of many degrees is nearly normal, up to terms of t^2 / (2 degrees).
    half = scipy.stats.norm.isf(error / 2) * math.sqrt(1 + t**2 / (2 * degrees))
    return max(0.0, (t - half) / size)


def noticed_mu(mu: float, draws: int, *, error: float, power: float = 0.8) -> float:
    """Return the least true mu that ``measured_mu`` of ``draws`` finds to exceed ``mu`` with probability ``power``."""
    size, degrees = math.sqrt(draws / 2), 2 * draws - 2
    asked, given = scipy.stats.norm.isf(error / 2), scipy.stats.norm.isf(1 - power)
    t = mu * size
    for _ in range(100):
        t = mu * size + asked * math.sqrt(1 + t**2 / (2 * degrees))
    return float((t + given * math.sqrt(1 + t**2 / (2 * degrees))) / size)


def is_gaussian(values: ArrayLike, *, error: float = 1e-4) -> bool:
    """Return whether ``values`` (n,) look Gaussian, by two tests with error probability ``error`` each.

    Tests: third and fourth moments (D'Agostino and Pearson 1973), and mean deviation over standard deviation (Geary
    1936). Constant values, and fewer than 20, always pass.
    """
    found = np.asarray(values, dtype=np.float64)
    if len(found) < 20 or float(found.std()) <= 1e-9 * float(np.abs(found).max(initial=0.0)):
        return True
    ratio = float(np.abs(found - found.mean()).mean() / found.std())
    geary = abs(ratio - math.sqrt(2 / math.pi)) / math.sqrt((1 - 3 / math.pi) / len(found))
    moments = float(scipy.stats.normaltest(found).pvalue)
    return moments >= error and geary <= float(scipy.stats.norm.isf(error / 2))


def look_gaussian(first: ArrayLike, second: ArrayLike) -> bool:
    """Return whether two neighbors' statistics, (n,) and (m,), pass tests of normality, separately and pooled."""
    both = [np.asarray(values, dtype=np.float64) for values in (first, second)]
    if any(float(values.std()) <= 1e-9 * float(np.abs(values).max(initial=0.0)) for values in both):
        return False
    together = np.concatenate([(values - values.mean()) / values.std() for values in both])
    return is_gaussian(together, error=2e-3) and all(is_gaussian(values) for values in both)


def largest_counted_epsilon(draws: int, *, delta: float, error: float) -> float:
    """Return the largest ``counted_epsilon`` of ``draws`` outputs on each neighbor: that if all are guessed right."""
    perfect = GuessCounts(hits=np.array([draws * 1.0]), of_hits=draws, misses=np.array([0.0]), of_misses=draws)
    return float(counted_epsilon(perfect, delta=delta, error=error)[0])


def one_run_p_value(*, canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Bound the chance of >= ``right`` right guesses under (epsilon, delta)-privacy (Steinke et al. 2023, Theorem 5.2).

    ``canaries``: number of canaries, each of which participated with probability 1/2. ``guesses``: number of canaries
    about which a guess was made.
    """
    share = scipy.special.expit(epsilon)
    beta = float(scipy.stats.binom.sf(right - 1, guesses, share))
    if delta == 0 or right == 0:
        return min(1.0, beta)
    steps = np.arange(1, right + 1)
    mass = scipy.stats.binom.sf(right - steps - 1, guesses, share) - beta
    return float(min(1.0, beta + 2 * canaries * delta * np.max(mass / steps, initial=0.0)))


def one_run_epsilon(*, canaries: int, guesses: int, right: int, delta: float, error: float = 0.05) -> float:
    """Return a lower bound on epsilon: the largest that ``one_run_p_value`` rejects at level ``error``; 0 if none.

    >>> round(one_run_epsilon(canaries=1000, guesses=100, right=95, delta=1e-5), 2)
    2.17
    """
    _expect_counts(canaries, guesses, right, error)
    checks.number("delta", delta, at_least=0, below=1, example=1e-5)

    def excess(epsilon: float) -> float:
        return error - one_run_p_value(canaries=canaries, guesses=guesses, right=right, epsilon=epsilon, delta=delta)

    if guesses == 0 or excess(0.0) <= 0:
        return 0.0
    epsilon = _zero(excess, xtol=1e-9, most=LARGEST_EPSILON)
    return epsilon if math.isfinite(epsilon) else LARGEST_EPSILON


def _expect_counts(canaries: int, guesses: int, right: int, error: float) -> None:
    checks.whole("canaries", canaries, at_least=1, example=1000)
    checks.whole("guesses", guesses, at_least=0, at_most=canaries, example=canaries)
    checks.whole("right", right, at_least=0, at_most=guesses, example=0)
    checks.number("error", error, above=0, below=1, example=0.05)


def one_run_mu(*, canaries: int, guesses: int, right: int, error: float = 0.05) -> float:
    """Return a lower bound on mu of Gaussian differential privacy from one run (Mahloujifar, Melis and Chaudhuri 2025).

    It is the largest mu under which ``right`` or more right guesses have a probability below ``error``; 0 if there is
    none. For the arguments see ``one_run_p_value``.

    >>> round(gaussian_epsilon(one_run_mu(canaries=1000, guesses=100, right=95), 1e-5), 2)
    3.32
    """
    _expect_counts(canaries, guesses, right, error)

    def excess(mu: float) -> float:
        # Suppose that `right` or more guesses are right with probability `error`. To flip a canary turns n right
        # guesses into n - 1, so that the curve bounds the mass of n - 1 from below, for each n in turn.
        rights, wrongs = error * right / canaries, error * (guesses - right) / canaries
        for number in range(right - 1, -1, -1):
            least = float(scipy.special.ndtr(scipy.special.ndtri(min(rights, 1.0)) - mu))
            if least <= wrongs or rights + wrongs > 1:
                break
            rights, wrongs = rights + (least - wrongs) * number / (guesses - number), least
        return rights + wrongs - guesses / canaries

    if guesses == 0 or excess(0.0) <= 0:
        return 0.0
    return _zero(excess, xtol=1e-9)


def one_run_gaussian_epsilon(
    taken: ArrayLike, left_out: ArrayLike, *, delta: float, error: float = 0.05
) -> tuple[float, int, int]:
    """Return a lower bound on epsilon by ``one_run_mu``, the number of guesses, and the number of right ones.

    ``taken`` (k,), ``left_out`` (m - k,): scores of canaries that participated, and of the others. The m^(3/4) / 2
    canaries with the highest scores are guessed to have participated, and as many with the lowest not.
    """
    right = _right_guesses(taken, left_out)
    each = min(max(1, round((np.size(taken) + np.size(left_out)) ** 0.75 / 2)), len(right))
    counts = {"canaries": np.size(taken) + np.size(left_out), "guesses": 2 * each, "right": int(right[each - 1])}
    return gaussian_epsilon(one_run_mu(**counts, error=error), delta), counts["guesses"], counts["right"]


def _right_guesses(taken: ArrayLike, left_out: ArrayLike) -> NDArray[np.int64]:
    """Return how many guesses on m canaries are right, for n = 1, ..., m // 2.

    The n canaries with the highest scores are guessed to have participated, and the n with the lowest not.
    """
    scores = np.concatenate([np.asarray(taken, dtype=np.float64), np.asarray(left_out, dtype=np.float64)])
    truth = np.arange(len(scores)) < np.size(taken)
    scores[np.isnan(scores)] = -np.inf
    # Ties carry no information: wrong guesses come first.
    hits = np.cumsum(truth[np.lexsort((truth, -scores))], dtype=np.int64)
    rejections = np.cumsum(~truth[np.lexsort((~truth, scores))], dtype=np.int64)
    right: NDArray[np.int64] = (hits + rejections)[: len(scores) // 2]
    return right


def best_one_run_epsilon(
    taken: ArrayLike, left_out: ArrayLike, *, delta: float, error: float = 0.05, shares: int = 8
) -> tuple[float, int, int]:
    """Return the best lower bound on epsilon, its number of guesses, and the number of right ones.

    ``taken`` (k,), ``left_out`` (m - k,): scores of canaries that participated, and of the others. Those with the
    highest scores are guessed to have participated, and as many with the lowest not. ``shares``: number of attempts
    with different numbers of guesses; they share the error (Bonferroni).
    """
    right = _right_guesses(taken, left_out)
    canaries = np.size(taken) + np.size(left_out)
    numbers = sorted({min(max(1, round(canaries / 2 / 2**k)), len(right)) for k in range(shares)})
    best, share = (0.0, 0, 0), error / len(numbers)
    for each in numbers:
        counts = {"canaries": canaries, "guesses": 2 * each, "right": int(right[each - 1])}
        found = one_run_epsilon(**counts, delta=delta, error=share)
        best = max(best, (found, counts["guesses"], counts["right"]))
    return best


def two_gaussians_epsilon(*, mean: float, std: float, std_without: float, delta: float) -> float:
    """Return the least epsilon for which N(mean, std^2) and N(0, std_without^2) are (epsilon, ``delta``)-close.

    This is the estimate of Andrew et al. 2023, section 3, from a canary's score with and without participation.
    """
    checks.number("std", std, above=0, example=0.01)
    checks.number("std_without", std_without, above=0, example=0.01)
    checks.number("delta", delta, above=0, below=1, example=1e-5)
    span = np.concatenate([[mean - 40 * std, mean + 40 * std], [-40 * std_without, 40 * std_without]])
    grid = np.linspace(span.min(), span.max(), 200_001)
    with_it, without = (scipy.stats.norm.logpdf(grid, *at) for at in ((mean, std), (0.0, std_without)))
    width = grid[1] - grid[0]

    def largest(epsilon: float) -> float:
        found = (
            float(np.sum(np.where(p > epsilon + q, np.exp(p) * -np.expm1(np.minimum(epsilon + q - p, 0)), 0)))
            for p, q in ((with_it, without), (without, with_it))
        )
        return max(found) * width - delta

    return 0.0 if largest(0.0) <= 0 else _zero(largest, xtol=1e-6, most=LARGEST_EPSILON * 1000)
