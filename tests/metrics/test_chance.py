"""Chance by draws through the whole rule: valid for guesses that know nothing, and small for those that know."""

import numpy as np
import pytest
from scipy import stats

from fl_privacy.measure.intervals import (
    Coincidences,
    _strata,
    _with_overlap,
    binomial_tail,
    chance_of_upload,
    chance_of_words,
    combined,
    either,
    poisson_tail,
)


@pytest.mark.parametrize("size", [1, 4, 24])
@pytest.mark.parametrize("kind", ["like the examples", "their mean"])
def test_guesses_that_know_nothing_seldom_have_a_small_chance(size: int, kind: str) -> None:
    rng, pages = np.random.default_rng(size), 120
    found = []
    for seed in range(pages):
        examples = rng.normal(size=(size + 60, 3))
        guesses = rng.normal(size=(size, 3)) * (kind != "their mean")
        values = -np.linalg.norm(guesses[:, None] - examples, axis=-1)
        found.append(chance_of_upload(values, size, seed=seed))
    assert np.mean(np.array(found) <= 0.05) < 0.12
    assert stats.binomtest(sum(p <= 0.01 for p in found), pages, 0.01, alternative="greater").pvalue > 0.01


def test_what_was_read_has_a_small_chance_and_nothing_without_others() -> None:
    examples = np.random.default_rng(0).normal(size=(68, 3))
    values = -np.linalg.norm(examples[:8, None] - examples, axis=-1)
    assert chance_of_upload(values[::-1], 8) < 1e-6, "no draws limit it"
    assert chance_of_upload(values[:1, :60], 1) == pytest.approx(1 / 60)
    assert chance_of_upload(values[:, :8], 8) == 1.0
    assert chance_of_upload(np.full((2, 30), np.nan), 2) == 1.0


@pytest.mark.parametrize("classes", [False, True])
def test_so_many_own_among_the_best_are_as_seldom_as_said(classes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties, as of texts of the same words or rows that are all equal, count for nothing."""
    monkeypatch.setattr("fl_privacy.measure.intervals.OVERLAP", 0.5)
    rng, pages, found = np.random.default_rng(1), 1500, []
    for _ in range(pages):
        values = rng.integers(0, 3, (4, 34)).astype(float)
        kinds = np.r_[0, 0, 1, 1, np.arange(30) % 2]
        strata = _strata(kinds, 4) if classes else [(4, np.arange(34))]
        best = 33 - (values >= values.max(1, keepdims=True))[:, ::-1].argmax(1)
        found.append(_with_overlap(1.0, best, strata))
    for level in (0.4, 0.05, 0.01):
        few = sum(chance / 2 <= level for chance in found)
        assert stats.binomtest(few, pages, level, alternative="greater").pvalue > 0.001
    assert chance_of_upload(np.zeros((4, 34)), 4) == 1.0
    every = _with_overlap(1.0, np.arange(20), [(20, np.arange(1020))])
    assert every < 1e-30, "a perfect batch of 20"
    texts = [set(rng.integers(0, 900, 9).tolist()) for _ in range(220)]
    assert chance_of_words(set().union(*texts[:20]), texts[:20], texts[20:]) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize(("seeds", "most"), [(8, 2), pytest.param(40, 6, marks=pytest.mark.fuzz)])
def test_what_is_typical_of_a_class_is_no_evidence(seeds: int, most: int) -> None:
    rng, few = np.random.default_rng(0), 0
    for size in (1, 8):
        for seed in range(seeds):
            classes = np.r_[np.ones(size, dtype=int), rng.integers(0, 4, 200)]
            examples = rng.normal(size=(size + 200, 3)) + 3 * classes[:, None]
            values = -np.linalg.norm(np.full((size, 1, 3), 3.0) - examples, axis=-1)
            few += chance_of_upload(values, size, classes=classes.tolist(), seed=seed) <= 0.02
            assert chance_of_upload(values, size, seed=seed) < 0.5
    assert few <= most
    rare = np.r_[[7], np.zeros(200, dtype=int)].tolist()
    assert chance_of_upload(values[:1, :201], 1, classes=rare) == chance_of_upload(values[:1, :201], 1)


def test_words_that_all_texts_have_are_no_evidence_and_own_words_are() -> None:
    rng = np.random.default_rng(0)
    texts = [{0, 1, 2, *rng.integers(10, 400, 9).tolist()} for _ in range(200)]
    assert chance_of_words({0, 1, 2}, texts[:4], texts[4:]) > 0.3
    assert chance_of_words(set().union(*texts[:4]), texts[:4], texts[4:]) < 0.001
    assert chance_of_words(texts[0], texts[:1], texts[1:]) == pytest.approx(0.005)
    few = set(sorted(set().union(*texts[:4]) - {0, 1, 2})[:6])
    assert chance_of_words(few, texts[:4], texts[4:], few=True) < 0.01, "few words, but all of them there"
    assert chance_of_words(texts[0], texts[:1], []) == 1.0 and chance_of_words(set(), texts[:1], texts[1:]) == 1.0


def test_equal_examples_are_as_frequent_as_they_are_by_chance() -> None:
    rng, rows = np.random.default_rng(0), np.random.default_rng(1).integers(0, 3, (400, 3))
    equal = (rows[:, None] == rows).all(-1).sum(1) - 1
    few = Coincidences.counted(equal)
    right = sum((rows[rng.integers(400)] == rows[rng.integers(400)]).all() for _ in range(4000)) / 4000
    assert few.of_two == pytest.approx(right, rel=0.3)
    assert few.chance(1, 1) >= equal.max() / 399 * 0.9, "whoever guesses the most frequent row"
    assert few.chance(20, 64) > 0.5 and few.chance(64, 64) > 0.5
    many = Coincidences.counted(np.zeros(400))
    assert many.chance(1, 1) < 1e-4 < many.chance(1, 64) < 0.06 and many.chance(3, 64) < 1e-4
    assert Coincidences.counted(np.zeros(1)).chance(1, 1) > 0.6, "nobody knows"


@pytest.mark.parametrize("number", [1, 2, 6, 64])
def test_chances_of_uploads_are_combined_without_promising_more(number: int) -> None:
    rng, draws = np.random.default_rng(number), 1500
    found = np.array([combined(rng.random(number).tolist()) for _ in range(draws)])
    for level in (0.05, 0.01):
        assert stats.binomtest(int((found <= level).sum()), draws, level, alternative="greater").pvalue > 0.01
    assert combined([1.0] * number) == 1.0 and combined([0.001] * number) <= 0.001
    assert combined([]) == 1.0 and either(0.2, 0.1) == 0.2 and either() == 1.0


def test_tails_do_not_cancel() -> None:
    for count, n, share in ((6, 6, 0.001), (3, 1000, 1e-7), (8, 8, 0.0056), (40, 60, 0.01), (1, 60, 1 / 1001)):
        assert binomial_tail(count, n, share) == pytest.approx(stats.binom.sf(count - 1, n, share), rel=1e-9)
    assert binomial_tail(0, 5, 0.1) == 1.0 and binomial_tail(6, 5, 0.1) == 0.0
    assert binomial_tail(1, 5, 0.0) == 0.0 and binomial_tail(5, 5, 1.0) == 1.0
    assert poisson_tail(3, 0.2) == pytest.approx(stats.poisson.sf(2, 0.2)) and poisson_tail(0, 0.2) == 1.0
