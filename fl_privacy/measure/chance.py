"""Compute the probability that guesses made without the update score as well."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fl_privacy.measure.intervals import binomial_tail, poisson_tail

BAND = 0.95  # least share of guesses without the update that a reconstruction must exceed
LARGE = 16  # examples of an upload above which fewer draws are made
DRAWS = {False: 4999, True: 1999}  # more than ``LARGE`` examples in an upload -> draws of replacements
OVERLAP = 0.01  # share of the error probability spent on counting own examples among the best; draws get the rest
_ENOUGH = 10
"""Draws as good as the guess after which sampling stops (Besag and Clifford 1991, "Sequential Monte Carlo p-values").
"""


@dataclass(frozen=True, kw_only=True)
class Coincidences:
    """Probability that two examples are equal, and share of the others that equal the most frequent one."""

    of_two: float = 1.0
    of_usual: float = 1.0

    @classmethod
    def counted(cls, equal: np.ndarray) -> "Coincidences":
        """Estimate from the number ``equal`` (N,) of others that equal each example; 1 for fewer than two."""
        number = len(equal)
        if number < 2:
            return cls()
        pairs = number * (number - 1) / 2
        return cls(of_two=min(1.0, (float(equal.sum()) / 2 + 1) / pairs), of_usual=float(equal.max()) / (number - 1))

    def chance(self, exact: int, number: int) -> float:
        """Return the probability that at least ``exact`` of ``number`` guesses equal one of as many examples.

        Guesses are distributed as examples, or all the most frequent one, whichever fits more.
        """
        return poisson_tail(exact, max(number * self.of_usual, number**2 * self.of_two))


LEAST_OF_CLASS = 20  # least number of other examples of each class for replacement within classes


def chance_of_upload(values: np.ndarray, number: int, *, classes: Sequence[int] | None = None, seed: int = 0) -> float:
    """Return the probability in (0, 1] that an upload's guesses fit as many other examples as well as its own.

    A permutation test: examples are drawn as replacements and assigned to the guesses with the best fit. It is valid
    for guesses that do not depend on the upload's own examples, and 1 without other examples.

    Args:
        values: (G, B + N) fit of each guess to each example, the upload's own B first; larger is better.
        number: B.
        classes: (B + N,) classes; if there are enough of each, replacements have the same class, so that typical
            features of a class are no evidence.
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
    """Return the chance by draws or by the own examples among the best, so that draws set no lower limit."""
    found, mass = 0, np.ones(1)
    for own_of, columns in strata:
        there = np.isin(columns, best)
        here, total, found = int(there.sum()), len(columns), found + int(there[:own_of].sum())
        ways = [math.comb(here, k) * math.comb(total - here, own_of - k) for k in range(own_of + 1)]
        mass = np.convolve(mass, [way / math.comb(total, own_of) for way in ways])
    return min(1.0, drawn / (1 - OVERLAP), float(mass[found:].sum()) / OVERLAP)


def _strata(classes: np.ndarray, number: int) -> list[tuple[int, np.ndarray]]:
    """Return the number of own examples and all indices per class; one stratum if a class has too few others."""
    kinds = np.unique(classes[:number])
    if any((classes[number:] == kind).sum() < LEAST_OF_CLASS for kind in kinds):
        return [(number, np.arange(len(classes)))]
    return [(int((classes[:number] == kind).sum()), np.flatnonzero(classes == kind)) for kind in kinds]


def words_f1(truth: set[int], guess: set[int]) -> float:
    """Compute the F1 of distinct words."""
    return 2 * len(truth & guess) / (len(truth) + len(guess)) if truth or guess else 0.0


def chance_of_words(
    guess: set[int], own: Sequence[set[int]], others: Sequence[set[int]], *, few: bool = False
) -> float:
    """Return the probability that the guessed words fit as many other texts as well, by a permutation test.

    ``own`` and ``others`` are words of each text; ``few`` lets texts also fit by the number of right words.
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
    """Return the probability that the least of several chances is this small (Bonferroni)."""
    return min(1.0, len(chances) * min(chances)) if chances else 1.0


def combined(chances: Sequence[float]) -> float:
    """Return the probability that independent uploads have chances as small as these.

    It is the least over k of the probability that k are as small as the k-th smallest, times 1 + log2(number) for the
    choice of k.
    """
    number = len(chances)
    small = sorted(chance for chance in chances if chance <= 1 - BAND)
    if number < 2 or not small:
        return min(chances, default=1.0)
    least = min(binomial_tail(k, number, chance) for k, chance in enumerate(small, 1))
    return min(1.0, (1 + math.log2(number)) * least)
