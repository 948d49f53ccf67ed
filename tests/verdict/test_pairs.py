"""Guesses of which it is known whether they show the original: what is to be read is, and nothing else.

``experiments/verdict_pairs.py`` has five data sets and 200 originals of each; here are the same kinds, of fewer.
"""

import importlib
import os
from math import ceil
from pathlib import Path

import pytest
import torch

from fl_privacy.measure.distractors import Distractors
from fl_privacy.measure.outcome import READ as LEAKS, outcome_of

ROOT = Path(__file__).resolve().parents[2]

EMBEDDED = "mnist_mini"
ORIGINALS = {EMBEDDED: 4, "cifar10_exact": 2}
"""Of each data set; the last where ``FL_PRIVACY_DATA`` has it."""

LEAST, MOST = 0.95, 0.01
"""Shares called read: of each kind that is to be read, and of all guesses that are not to be."""

PARTS = 6
"""Tests of kinds that are to be read."""

CHANGED = ("sharpened", "first channel", "JPEG 5", "3 gray levels", "vignette")
"""Of the kinds beyond the specification, those that are read of every data set."""

SOMETHING = ("own brightness at 4 x 4", "mean with 7 others")
"""What is not to be read, and holds sixteen numbers of the original, or an eighth of it: now and then it tells."""


@pytest.fixture(scope="module")
def pairs():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "experiments"))
        yield importlib.import_module("verdict_pairs")


@pytest.fixture(scope="module", params=list(ORIGINALS))
def read(request, pairs):
    """``read(kinds, most)``: how many of each kind were called read, and the number of originals."""
    name = request.param
    if name != EMBEDDED and not (Path(os.environ.get("FL_PRIVACY_DATA", "nowhere")) / name).is_dir():
        pytest.skip(f"FL_PRIVACY_DATA has no {name}")
    candidates = Distractors(candidates=pairs.subjects(name, "test", 1)[1])

    def number(kinds, most=ORIGINALS[name]):
        s, _ = pairs.subjects(name, "test", most)
        with torch.random.fork_rng():
            records = {kind: pairs.judged(make(s).float(), s, candidates) for kind, make in kinds.items()}
        return {kind: sum(outcome_of(r) in LEAKS for r in each) for kind, each in records.items()}, most

    return number


def expect_nothing(found, originals):
    """At most one of a kind, by chance, and one in a hundred of all."""
    assert {kind: n for kind, n in found.items() if n > 1} == {}
    assert sum(found.values()) <= max(1, MOST * originals * len(found)), found


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_what_shows_the_original_is_called_read(pairs, read, part):
    found, originals = read(dict(list(pairs.READ.items())[part::PARTS]))
    assert {kind: n for kind, n in found.items() if n < ceil(LEAST * originals)} == {}


@pytest.mark.long
def test_what_shows_nothing_of_it_is_not(pairs, read):
    expect_nothing(*read(pairs.EMPTY))


@pytest.mark.long
def test_nor_is_what_was_made_to_mislead(pairs, read):
    kinds = {**pairs.MORE_EMPTY, **pairs.HELD_EMPTY}
    expect_nothing(*read({kind: make for kind, make in kinds.items() if kind not in SOMETHING}, 5))


def test_what_was_changed_otherwise_is_called_read(pairs, read):
    kinds = {**pairs.MORE_READ, **pairs.HELD_READ}
    found, originals = read({kind: kinds[kind] for kind in CHANGED}, 5)
    assert {kind: n for kind, n in found.items() if n < ceil(LEAST * originals)} == {}


@pytest.mark.long
def test_a_bound_on_psnr_alone_errs_both_ways(pairs):
    s, candidates = pairs.subjects(EMBEDDED, "test", 12)
    others = Distractors(candidates=candidates)
    negative, itself = (pairs.judged(pairs.READ[kind](s).float(), s, others) for kind in ("negative", "itself"))
    assert pairs.figures_of(negative)["old"] == 0 and pairs.figures_of(negative)["read"] == 1
    assert pairs.figures_of(itself) == {"images": 12, "read": 1, "identified": 1, "first": 1, "old": 1}


@pytest.mark.long
def test_a_row_is_extended_by_the_originals_that_it_lacks(pairs):
    one = {"images": 10, "read": 1.0, "identified": 0.8, "first": 1.0, "old": 0.0}
    other = {"images": 30, "read": 0.0, "identified": 0.0, "first": 1.0, "old": 0.4}
    assert pairs.together(one, other) == {"images": 40, "read": 0.25, "identified": 0.2, "first": 1.0, "old": 0.3}
