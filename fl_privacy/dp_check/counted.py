"""Lower bounds on epsilon from draws, by tests that were chosen on other draws."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fl_privacy.dp_check.bounds import (
    aligned_epsilon,
    counted_epsilon,
    counts_above,
    largest_counted_epsilon,
    look_gaussian,
    measured_mu,
)
from fl_privacy.dp_check.claims import Claim
from fl_privacy.dp_check.draws import UNCHANGED, Statistics

TESTS_KEPT = 3  # number of tests, each a statistic with a threshold, that are chosen on the first draws
THRESHOLDS = 200  # number of thresholds that are tried for each statistic

Values = NDArray[np.float64]
Test = tuple[int, float]  # index of a statistic, and a threshold


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """Statistics of a mechanism's outputs on two neighboring data sets, with tests that were chosen on other outputs.

    ``first, second``: S statistics (n, S) of n outputs on each data set.
    """

    first: Values
    second: Values
    tests: Sequence[Test]  # pairs (index of a statistic, threshold)
    widest: int  # index of the projection with the largest distance of means, in standard deviations
    statistics: Statistics
    delta: float  # delta that the claim allows one release with the unit
    rate: float  # probability that a release holds the unit
    draws: int  # number of all draws per neighbor, including those for the choice of tests

    @classmethod
    def of(cls, drawn: tuple[Tensor, Tensor], statistics: Statistics, claim: Claim) -> "Drawn":
        """Choose statistics and thresholds on the first fifth of the outputs ``drawn``; keep the others for bounds."""
        first, second = drawn[0].numpy(), drawn[1].numpy()
        fixing, rate = len(first) // 5, 1.0 if claim.sampled is None else claim.sampled.sample_rate
        delta = min(1.0, claim.delta / rate)
        rated: list[tuple[float, Test]] = []
        for number, (ones, others) in enumerate(zip(first[:fixing].T, second[:fixing].T, strict=True)):
            thresholds = np.unique(np.quantile(np.concatenate([ones, others]), np.linspace(0, 1, THRESHOLDS)))
            found = counted_epsilon(counts_above(ones, others, thresholds), delta=delta, error=0.05)
            place = int(np.argmax(found))
            rated.append((float(found[place]), (number, float(thresholds[place]))))
        tests = [test for _, test in sorted(rated, key=lambda each: -each[0])[:TESTS_KEPT]]
        # the projection with noise whose means are most standard deviations apart
        projections = len(statistics.directions)
        yes, no = first[:fixing][:, :projections], second[:fixing][:, :projections]
        spread = np.sqrt((yes.var(0) + no.var(0)) / 2)
        shift = np.abs(yes.mean(0) - no.mean(0))
        widest = int(np.argmax(np.where(_varies(yes) & _varies(no), shift / np.maximum(spread, 1e-300), -1.0)))
        kept = {"first": first[fixing:], "second": second[fixing:]}
        return cls(**kept, tests=tests, widest=widest, statistics=statistics, delta=delta, rate=rate, draws=len(first))

    def aligned(self, error: float) -> float:
        lines = self.statistics.lines
        sizes = [place.stop - place.start for place in lines.values()]
        sines = self.first[:, self.first.shape[1] - len(lines) :]
        return aligned_epsilon(sines, sizes, delta=self.delta, error=error)

    @property
    def unchanged(self) -> float:
        names = list(self.statistics.names)
        return float(self.first[:, names.index(UNCHANGED)].mean()) if UNCHANGED in names else 0.0

    def epsilon(self, error: float) -> float:
        """Return a lower bound on epsilon for any noise: the larger of one from angles and one from counted outputs."""
        bounds, share = [self.aligned(error / 10)], 0.9 * error / len(self.tests)
        for number, threshold in self.tests:
            counts = counts_above(self.first[:, number], self.second[:, number], [threshold])
            bounds.append(float(counted_epsilon(counts, delta=self.delta, error=share)[0]))
        return self._sampled(max(bounds))

    def _sampled(self, epsilon: float) -> float:
        return epsilon if self.rate == 1 else math.log1p(self.rate * math.expm1(epsilon))

    def mu(self, error: float) -> float:
        return measured_mu(self.first[:, self.widest], self.second[:, self.widest], error=error)

    def showable(self, error: float) -> float:
        most = largest_counted_epsilon(len(self.first), delta=self.delta, error=error / len(self.tests))
        return self._sampled(most)

    @property
    def gaussian(self) -> bool:
        return look_gaussian(self.first[:, self.widest], self.second[:, self.widest])

    @property
    def moved(self) -> float:
        return abs(float(self.first[:, self.widest].mean() - self.second[:, self.widest].mean()))

    @property
    def pooled_std(self) -> float:
        return math.sqrt((float(self.first[:, self.widest].var()) + float(self.second[:, self.widest].var())) / 2)

    @property
    def noise_std(self) -> float:
        return float(self.second[:, self.widest].std())


def _varies(values: Values) -> NDArray[np.bool_]:
    varies: NDArray[np.bool_] = values.std(0) > 1e-9 * np.abs(values).max(0)
    return varies
