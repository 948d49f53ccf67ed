"""Confidence intervals, and probabilities that guesses made without the update score as well."""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import numpy as np

from fl_privacy.errors import UserError

_special = partial(import_module, "scipy.special")  # its import takes as long as all else of `advise`
ANY_VALUE = (-math.inf, math.inf)
FEW = 5  # least number of independent groups for a useful interval: Student's factor is 2.8 with 5, 12.7 with 2


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """Mean, 95 % confidence interval, median and range of a sample."""

    mean: float
    ci95: tuple[float, float] | None  # 95 % interval of the mean; ``None`` for a single group or an infinite value
    n: int  # sample size
    groups: int  # number of independent groups
    median: float
    min: float
    max: float


def aggregate(
    values: Sequence[float], *, groups: Sequence[Hashable] | None = None, within: tuple[float, float] = ANY_VALUE
) -> Statistic | None:
    """Return statistics of ``values`` without NaN; ``None`` if no value is left.

    The interval is Student's t; with ``groups``, one for each value, the cluster-robust CR2 interval of Bell and
    McCaffrey 2002, since images of one upload are not independent. ``within``: range to which the interval is cut.

    >>> found = aggregate([10.0, 12.0, 14.0, 16.0], groups=["a", "a", "b", "b"])
    >>> found.mean, found.n, found.groups
    (13.0, 4, 2)
    """
    sample = np.asarray(values, dtype=np.float64)
    known = ~np.isnan(sample)
    if not known.any():
        return None
    numbers: dict[Hashable, int] = {}
    numbered = range(sample.size) if groups is None else [numbers.setdefault(one, len(numbers)) for one in groups]
    labels = np.asarray(numbered, dtype=np.int64)
    sample, labels = sample[known], np.unique(labels[known], return_inverse=True)[1]
    mean = float(sample.mean())
    return Statistic(
        mean=mean,
        ci95=_interval(sample, labels, mean, within),
        n=int(sample.size),
        groups=int(labels.max()) + 1,
        median=float(np.median(sample)),
        min=float(sample.min()),
        max=float(sample.max()),
    )


FAR = 0.6  # least share of a sample's range that the gap of a split sample spans
LEAST_SPLIT = 8  # least number of groups of a split sample


def is_split(values: Sequence[float], *, groups: int) -> bool:
    """Return whether a few values are far from all others, such as a few exact guesses among bad ones.

    The mean's usual interval is then too narrow. ``groups``: number of independent uploads behind the values. With
    fewer than ``LEAST_SPLIT``, or if all values are 0 or 1, the result is ``False``.

    >>> is_split([11.0, 9.0, 12.0, 10.0, 13.0, 8.0, 9.5, 100.0], groups=8)
    True
    """
    known = np.sort([value for value in values if not math.isnan(value)])
    if groups < LEAST_SPLIT or len(known) < LEAST_SPLIT or set(known.tolist()) <= {0.0, 1.0}:
        return False
    if math.isinf(known[-1]) or math.isinf(known[0]):
        return bool(np.isinf(known).sum() <= len(known) / 3)
    gaps = np.diff(known)
    place = int(gaps.argmax()) + 1
    return bool(gaps.max() > FAR * (known[-1] - known[0]) and min(place, len(known) - place) <= len(known) / 3)


def pmm(accuracy: float, undefended_accuracy: float) -> float:
    """Return ``accuracy`` in percent of the undefended (Refiner's performance maintenance metric); NaN if that is 0.

    >>> pmm(0.45, 0.5)
    90.0
    """
    return 100 * accuracy / undefended_accuracy if undefended_accuracy > 0 else math.nan


def share_at_most(count: int, n: int, *, groups: int | None = None) -> float:
    """Return the one-sided 95 % upper bound of a proportion observed as ``count / n`` (Clopper and Pearson 1934).

    If there are fewer independent ``groups`` than ``n``, their number is the sample size.

    >>> round(share_at_most(0, 100), 3)  # none of a hundred
    0.03
    """
    number = n if groups is None else min(n, groups)
    seen = math.ceil(count * number / n)
    if seen == 0 < number:  # the same bits without scipy
        return -math.expm1(math.log1p(-0.95) / number)
    return 1.0 if seen >= number else float(_special().betaincinv(seen + 1, number - seen, 0.95))


def binomial_tail(count: int, n: int, share: float) -> float:
    """Return the probability that at least ``count`` of ``n`` events of probability ``share`` happen.

    >>> round(binomial_tail(1, 10, 1 / 1001), 4)
    0.0099
    >>> f"{binomial_tail(6, 6, 0.001):.3g}"
    '1e-18'
    """
    if count <= 0:
        return 1.0
    return 0.0 if count > n or share <= 0 else float(_special().betainc(count, n - count + 1, min(share, 1.0)))


def poisson_tail(count: int, mean: float) -> float:
    """Return the probability of at least ``count`` rare events if ``mean`` are expected (Poisson).

    >>> round(poisson_tail(1, 0.01), 4)
    0.01
    """
    return 1.0 if count <= 0 else float(_special().gammainc(count, mean))


def share_interval(count: int, n: int, *, groups: int | None = None) -> tuple[float, float]:
    """Return the 95 % interval of a proportion observed as ``count / n`` (Clopper and Pearson 1934).

    If there are fewer independent ``groups`` than ``n``, their number is the sample size.

    >>> [round(end, 2) for end in share_interval(0, 4)]
    [0.0, 0.6]
    """
    number = n if groups is None else min(n, groups)
    low, high = (np.asarray([edge(count * number / n)]) for edge in (math.floor, math.ceil))
    return float(binomial_lower(low, number, 0.025)[0]), float(binomial_upper(high, number, 0.025)[0])


def binomial_lower(counts: np.ndarray, n: int, error: float) -> np.ndarray:
    """Return lower bounds of proportions observed as ``counts / n``, each wrong with probability at most ``error``."""
    return np.where(counts > 0, _special().betaincinv(np.maximum(counts, 1), n - counts + 1, error), 0.0)


def binomial_upper(counts: np.ndarray, n: int, error: float) -> np.ndarray:
    """Return upper bounds of proportions observed as ``counts / n``, each wrong with probability at most ``error``."""
    return np.where(counts < n, _special().betaincinv(counts + 1, np.maximum(n - counts, 1), 1 - error), 1.0)


def _interval(
    sample: np.ndarray, labels: np.ndarray, mean: float, within: tuple[float, float]
) -> tuple[float, float] | None:
    sizes = np.bincount(labels).astype(float)
    if len(sizes) < 2 or not math.isfinite(mean):
        return None
    # groups' squared sums of deviations over n (n - n_g), with Satterthwaite's degrees of freedom, at most G - 1
    weights = 1 / (sample.size * np.sqrt(1 - sizes / sample.size))
    variance = float(np.square(weights * np.bincount(labels, weights=sample - mean)).sum())
    # covariance of the groups' weighted sums for independent values: G = diag(a) - b b', by its traces
    alone, together = weights**2 * sizes, weights * sizes / math.sqrt(sample.size)
    trace = alone.sum() - np.square(together).sum()
    squared = np.square(alone).sum() - 2 * (alone * together**2).sum() + np.square(together).sum() ** 2
    half = float(_special().stdtrit(trace**2 / squared, 0.975)) * math.sqrt(variance)
    return max(mean - half, within[0]), min(mean + half, within[1])


GREEN_BELOW, RED_ABOVE = 1.0, 40.0
"""Bounds on ||B|| / ||E||: in the green region reconstruction should fail (SPN, Theorem 2.2), in the red one the
perturbation is so small that images are reconstructed (roughly SPN, Figure 5)."""


@dataclass(frozen=True, kw_only=True)
class PpcPoint:
    """A defense at one strength: accuracy of the model, and error of the attack (PPC, Fan et al. 2020)."""

    accuracy: float
    distance: float  # distance of the attack's guesses from the originals
    signal_to_distortion: float  # norm of the undefended update over that of the defense's change to it

    @property
    def calibrated(self) -> float:
        return self.accuracy * self.distance

    @property
    def abscissa(self) -> float:
        return math.log10(self.signal_to_distortion + 1)


def cap(points: Sequence[PpcPoint]) -> float:
    """Return the mean accuracy x distance of guesses from originals; more is better (CAP, Fan et al. 2020, Eq. 1)."""
    if not points:
        raise UserError("cap is expected to get at least one point, but got none; measure one strength of a defense.")
    return sum(point.calibrated for point in points) / len(points)


BAND = 0.95  # least share of guesses without the update that a reconstruction must exceed
LARGE = 16  # number of examples of an upload above which fewer draws are made
DRAWS = {False: 4999, True: 1999}  # ``True`` for more than ``LARGE`` examples in an upload -> number of draws
OVERLAP = 0.01  # share of the error probability for the count of own examples among the best; draws get the rest
_ENOUGH = 10  # number of draws that fit as well as the guess, after which sampling stops (Besag and Clifford 1991)


@dataclass(frozen=True, kw_only=True)
class Coincidences:
    """Probability ``of_two`` that two random examples are equal, and share ``of_usual`` of the most common example."""

    of_two: float = 1.0
    of_usual: float = 1.0

    @classmethod
    def counted(cls, equal: np.ndarray) -> "Coincidences":
        """Estimate ``of_two`` and ``of_usual``; ``equal`` (N,): for each of N examples, how many others equal it."""
        number = len(equal)
        if number < 2:
            return cls()
        pairs = number * (number - 1) / 2
        return cls(of_two=min(1.0, (float(equal.sum()) / 2 + 1) / pairs), of_usual=float(equal.max()) / (number - 1))

    def chance(self, exact: int, number: int) -> float:
        return poisson_tail(exact, max(number * self.of_usual, number**2 * self.of_two))


LEAST_OF_CLASS = 20  # least number of other examples of each class for draws within classes


def chance_of_upload(values: np.ndarray, number: int, *, classes: Sequence[int] | None = None, seed: int = 0) -> float:
    """Return the probability in (0, 1] that an upload's guesses fit other examples at least as well as its own.

    It is the p-value of a permutation test, whose statistic is the total fit of the best assignment of examples to
    guesses. It is valid for guesses that do not depend on the upload's own examples, and 1 without other examples.

    Args:
        values: fit (G, B + N) of each guess to each example, the upload's own B first; larger is better.
        number: number B of the upload's own examples.
        classes: classes (B + N,); if there are enough of each, other examples of the same classes are drawn, so that
            typical features of a class are no evidence.
    """
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415

    values = np.nan_to_num(np.asarray(values, dtype=np.float64), nan=-1e9, posinf=1e9, neginf=-1e9)
    total = int(values.shape[1])
    if total <= number or not len(values):
        return 1.0
    strata = _strata(np.zeros(total, dtype=int) if classes is None else np.asarray(classes), number)
    if number == 1:
        best = values.max(0)[strata[0][1]]
        return float((best >= values[:, 0].max() - _rounding(best[0])).sum()) / len(best)

    def fit(columns: np.ndarray) -> float:
        chosen = values[:, columns]
        return float(chosen[linear_sum_assignment(chosen, maximize=True)].sum())

    rng, own = np.random.default_rng(seed), fit(np.arange(number))
    least, reached, draws = own - _rounding(own), 0, DRAWS[number > LARGE]
    for draw in range(1, draws + 1):
        chosen = np.concatenate([rng.choice(columns, own_of, replace=False) for own_of, columns in strata])
        reached += fit(chosen) >= least
        if reached == _ENOUGH:
            return min(1.0, _ENOUGH / draw / (1 - OVERLAP))
    best = total - 1 - (values >= values.max(1, keepdims=True) - 1e-9)[:, ::-1].argmax(1)  # ties: not an own one
    return _with_overlap(float((1 + reached) / (1 + draws)), best, strata)


def _with_overlap(drawn: float, best: np.ndarray, strata: Sequence[tuple[int, np.ndarray]]) -> float:
    # Bonferroni with a second test: the number of the upload's examples in best, the guesses' best matches
    found, mass = 0, np.ones(1)
    for own_of, columns in strata:
        there = np.isin(columns, best)
        here, total, found = int(there.sum()), len(columns), found + int(there[:own_of].sum())
        ways = [math.comb(here, k) * math.comb(total - here, own_of - k) for k in range(own_of + 1)]
        mass = np.convolve(mass, [way / math.comb(total, own_of) for way in ways])
    return min(1.0, drawn / (1 - OVERLAP), float(mass[found:].sum()) / OVERLAP)


def _strata(classes: np.ndarray, number: int) -> list[tuple[int, np.ndarray]]:
    kinds = np.unique(classes[:number])
    if any((classes[number:] == kind).sum() < LEAST_OF_CLASS for kind in kinds):
        return [(number, np.arange(len(classes)))]
    return [(int((classes[:number] == kind).sum()), np.flatnonzero(classes == kind)) for kind in kinds]


def words_f1(truth: set[int], guess: set[int]) -> float:
    """Return the F1 of two sets of words."""
    return 2 * len(truth & guess) / (len(truth) + len(guess)) if truth or guess else 0.0


def chance_of_words(
    guess: set[int], own: Sequence[set[int]], others: Sequence[set[int]], *, few: bool = False
) -> float:
    """Return the probability that other texts match the guessed words at least as well as the upload's own texts do.

    It is the p-value of a permutation test on the F1 score, and 1 without texts. ``guess``: guessed words; ``own``,
    ``others``: words of each text of the upload, and of each other text. With ``few``, shared words are also counted.
    """
    texts = [*own, *others]
    if not others or not own:
        return 1.0

    def fit(chosen: Iterable[set[int]]) -> np.ndarray:
        words = set().union(*chosen)
        return np.array([words_f1(words, guess), len(words & guess)][: 1 + few])

    least = fit(own) - _rounding(1.0)
    if len(own) == 1:
        return either(*(np.sum([fit([text]) >= least for text in texts], 0) / len(texts)).tolist())
    rng, reached, draws = np.random.default_rng(0), np.zeros(1 + few), DRAWS[len(own) > LARGE]
    for draw in range(1, draws + 1):
        chosen = rng.choice(len(texts), len(own), replace=False)
        reached += fit(texts[k] for k in chosen) >= least
        if (reached >= _ENOUGH).all():
            return min(1.0, either(*(reached / draw).tolist()) / (1 - OVERLAP))
    drawn = either(*((1 + reached) / (1 + draws)).tolist())
    share = np.array([len(text & guess) / max(1, len(text)) for text in texts])
    best = np.argsort(-share[::-1], kind="stable")[: len(own)]
    return _with_overlap(drawn, len(texts) - 1 - best, [(len(own), np.arange(len(texts)))])


def _rounding(value: float) -> float:
    return 1e-9 * max(1.0, abs(value))


def either(*chances: float) -> float:
    """Return a bound on the probability that the smallest of several p-values is as small as it is (Bonferroni)."""
    return min(1.0, len(chances) * min(chances)) if chances else 1.0


def combined(chances: Sequence[float]) -> float:
    """Return one p-value for several independent uploads with the p-values ``chances``.

    It is small if more of them are small than chance explains. Those above 1 - ``BAND`` are ignored. If none remains,
    or if there is only one, the result is the least of all.
    """
    number = len(chances)
    small = sorted(chance for chance in chances if chance <= 1 - BAND)
    if number < 2 or not small:
        return min(chances, default=1.0)
    # probability that at least k of n p-values are at most the k-th smallest, the least over k
    least = min(binomial_tail(k, number, chance) for k, chance in enumerate(small, 1))
    return min(1.0, (1 + math.log2(number)) * least)
