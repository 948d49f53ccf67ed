"""The noise is the discrete Gaussian, also where floating point can't decide, and leaves no trace of what it hides."""

import math
import os
from collections.abc import Callable
from decimal import Decimal, getcontext
from random import Random

import numpy as np
import pytest
import torch
from scipy import stats

from fl_privacy.site.gate import discrete_gaussian as dg
from fl_privacy.site.gate.protecting import Noising, noised


@pytest.mark.parametrize(("numerator", "denominator"), [(0, 1), (1, 1), (1, 2), (529, 2), (7, 1 << 41), (40, 3)])
def test_probabilities_are_right_to_all_bits(numerator: int, denominator: int) -> None:
    getcontext().prec = 120
    exact = (-Decimal(numerator) / Decimal(denominator)).exp() * Decimal(2) ** 256
    assert abs(Decimal(dg.exp_of_minus(numerator, denominator)) - exact) <= 1


def test_the_distribution_is_the_discrete_gaussian() -> None:
    drawn = dg.discrete_gaussian(400_000).astype(float)
    assert abs(drawn.mean()) < 5 * dg.SCALE / math.sqrt(len(drawn))
    assert abs(drawn.std() / dg.SCALE - 1) < 5 / math.sqrt(2 * len(drawn))
    assert stats.kstest(drawn / dg.SCALE, "norm").pvalue > 1e-4
    assert abs(stats.kurtosis(drawn)) < 0.05
    assert abs((drawn < 0).mean() - 0.5) < 0.005
    odd = dg.discrete_gaussian(100_000) % 2
    assert abs(odd.mean() - 0.5) < 0.01, "every step of the grid is drawn"


def test_with_a_coarse_grid_each_integer_has_its_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dg, "LOG2_SCALE", 1)
    monkeypatch.setattr(dg, "SCALE", 2)
    values = range(-6, 7)
    weights = {y: math.exp(-y * y / 8) for y in range(-60, 61)}
    chances = [weights[y] / sum(weights.values()) for y in values]
    number = 200_000
    for margin in (dg._MARGIN, 2.0):  # with 2, integers alone decide
        monkeypatch.setattr(dg, "_MARGIN", margin)
        some = number if margin < 1 else 20_000
        drawn = dg.discrete_gaussian(some)
        counts = [int((drawn == y).sum()) for y in values]
        rest = some - sum(counts)
        assert stats.chisquare([*counts, rest], [*(some * p for p in chances), some * (1 - sum(chances))]).pvalue > 1e-4


def test_integers_and_floating_point_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = os.urandom(1 << 16)

    def fixed() -> dg.Bytes:
        further = Random(0)  # what decides words on a bound, asked for before all that only integers need
        return lambda size: stream[:size] if size > 100 else further.randbytes(size)

    fast = dg._draw(2000, fixed())
    monkeypatch.setattr(dg, "_MARGIN", 2.0)
    assert np.array_equal(fast, dg._draw(2000, fixed()))


def test_a_word_on_a_bound_is_decided_by_its_next_bits() -> None:
    bound = dg._cumulative()[0]
    word = np.array([bound >> 240], dtype=np.uint16)
    rest = bound & ((1 << 240) - 1)
    assert rest
    for more, expected in ((rest, 1), (rest - 1, 0)):
        assert dg._whole_parts(word, lambda size, more=more: more.to_bytes(size, "little")).tolist() == [expected]


def test_whole_parts_are_those_of_all_bits_together() -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    middle = dg._whole_parts(words, lambda size: (1 << (8 * size - 1)).to_bytes(size, "little"))
    drawn = [(word << 240) | 1 << 239 for word in range(1 << 16)]
    assert middle.tolist() == [sum(bound <= one for bound in dg._cumulative()[:-1]) for one in drawn]


def test_many_values_are_drawn_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dg, "_SHARE", 10_000)
    drawn = dg.discrete_gaussian(105_001).astype(float)
    assert len(drawn) == 105_001
    assert stats.kstest(drawn / dg.SCALE, "norm").pvalue > 1e-4
    assert len(np.unique(drawn)) > 95_000, "each thread has random bits of its own"


def test_none_are_none_and_draws_are_never_the_same() -> None:
    assert dg.discrete_gaussian(0).tolist() == []
    assert not np.array_equal(dg.discrete_gaussian(8), dg.discrete_gaussian(8))


# The attack of Mironov 2012 on noise in floating point, for the Gaussian as in Jin et al. 2022: a value and noise add
# up to some of the floating-point numbers only, and which ones depends on the value.

DEVIATION = 100.0
SIZE, RELEASES = 64, 300
"""0 or 1 in 64 places behind noise of 100: who decides best, without floating point, has an advantage of 0.03."""


def torch_noised(value: float) -> np.ndarray:
    return (torch.full((SIZE,), value) + DEVIATION * torch.randn(SIZE)).numpy()


def ours(value: float) -> np.ndarray:
    noising = Noising(clip_norm=math.sqrt(SIZE), noise_multiplier=DEVIATION / math.sqrt(SIZE))
    (released,) = noised([np.zeros(SIZE, np.float32)], [np.full(SIZE, value, np.float32)], noising)
    return released


def reached_from_zero(released: np.ndarray) -> np.ndarray:
    """Find where ``released`` is DEVIATION times some rounded number, as noise in floating point is."""
    guess = (released / np.float32(DEVIATION)).astype(np.float32)
    around = [guess, np.nextafter(guess, np.float32(-np.inf)), np.nextafter(guess, np.float32(np.inf))]
    return np.any([np.float32(DEVIATION) * each == released for each in around], axis=0)


def advantage(release: Callable[[float], np.ndarray]) -> float:
    """Compute P(says 0 | 0) - P(says 0 | 1) of a distinguisher that says 0 if nothing speaks against it."""
    said = {value: [bool(reached_from_zero(release(value)).all()) for _ in range(RELEASES)] for value in (0.0, 1.0)}
    return float(np.mean(said[0.0]) - np.mean(said[1.0]))


def test_floating_point_noise_gives_away_what_it_hides_and_ours_does_not() -> None:
    torch.manual_seed(0)
    assert advantage(torch_noised) > 0.98
    assert abs(advantage(ours)) < 0.1
    shares = [np.mean([reached_from_zero(ours(value)).mean() for _ in range(RELEASES)]) for value in (0.0, 1.0)]
    assert abs(shares[0] - shares[1]) < 0.015, "nor by how many places speak against it"


def test_what_can_be_released_does_not_depend_on_the_value() -> None:
    """Check that each release is the received value plus a whole number of steps."""
    for value in (0.0, 1.0, 0.1):
        noising = Noising(clip_norm=8.0, noise_multiplier=0.125)
        (released,) = noised([np.zeros(64, np.float64)], [np.full(64, value)], noising)
        assert np.array_equal(released / noising.step, np.round(released / noising.step))
        assert (np.round(released / noising.step) % 2).any()
