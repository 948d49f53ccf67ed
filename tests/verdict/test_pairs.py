"""The fixed set of pairs on real data; ``experiments/verdict_pairs.py`` has the whole table."""

import importlib
import os
from pathlib import Path

import pytest
import torch

from fl_privacy.metrics.beyond import Others

ROOT = Path(__file__).resolve().parents[2]
FEW = 3
"""Originals of each data set; the whole table has up to 200."""

QUICK = ("mirror", "negative", "shift by 2", "noise .2")
EMPTY = ("flat gray", "own mean color, noise .1", "class mean")


@pytest.fixture
def pairs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    return importlib.import_module("verdict_pairs")


def shares(pairs, name):
    s, candidates = pairs.subjects(name, "test", FEW)
    others = Others(candidates=candidates)
    kinds = {**pairs.READ, **pairs.EMPTY}
    return {k: pairs.figures_of(pairs.judged(kinds[k](s).float(), s, others)) for k in (*QUICK, *EMPTY)}


def expect_told_apart(found):
    assert {kind: found[kind]["read"] for kind in QUICK} == dict.fromkeys(QUICK, 1.0)
    assert {kind: found[kind]["read"] for kind in EMPTY} == dict.fromkeys(EMPTY, 0.0)


def test_embedded_digits_are_told_apart(pairs):
    found = shares(pairs, "mnist_mini")
    expect_told_apart(found)
    assert found["negative"]["old"] == 0.0


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10_exact"])
def test_real_images_are_told_apart(pairs, name):
    if not (Path(os.environ.get("FL_PRIVACY_DATA", "nowhere")) / name).is_dir():
        pytest.skip(f"FL_PRIVACY_DATA has no {name}")
    with torch.random.fork_rng():
        expect_told_apart(shares(pairs, name))
