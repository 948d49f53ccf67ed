"""One rule says what was read, from the record alone."""

import random
from dataclasses import fields

import pytest

from fl_privacy.measure.outcome import (
    FAR_PSNR,
    FOREIGN,
    LEAD,
    LEAST_CANDIDATES,
    LIKENESS,
    MARGIN_PSNR,
    MARGIN_SSIM,
    MUCH_PSNR,
    READ,
    SAME,
    SURE,
    GuessComparison,
    Outcome,
    outcome_of,
)
from fl_privacy.measure.registry import METRICS, NOT_METRICS

BARE = {"failure": None, "certainty": "approximate", "exact": False, "likeness": 0.9, "candidates": 1000}
NEAREST = {**BARE, "rank": 1, "lead": 2.0}
PSNR = {"aligned_psnr": 20.0, "control_psnr": 20.0 - MARGIN_PSNR, "aligned_ssim": 0.1, "control_ssim": 0.1}


def test_a_lead_of_controls_that_is_not_computed_decides_nothing():
    draw, seen = random.Random(0), set()
    for _ in range(3000):
        figures = {
            "rank": 1,
            "candidates": draw.choice([LEAST_CANDIDATES - 1, LEAST_CANDIDATES]),
            "lead": draw.uniform(-1, 4),
            "likeness": draw.uniform(0.3, 1),
            "foreign": draw.uniform(0, 0.5),
            **{f"{kind}_psnr": draw.uniform(5, 35) for kind in ("aligned", "control")},
            **{f"{kind}_ssim": draw.uniform(0, 1) for kind in ("aligned", "control")},
        }
        record = {**BARE, **figures}
        outcomes = {outcome_of({**record, "control_lead": lead}) for lead in (None, -9.0, 0.5, 9.0)}
        depends = GuessComparison.of_record(record).depends_on_control_lead
        assert depends or len(outcomes) == 1
        seen.add((depends, len(outcomes)))
    assert seen == {(True, 1), (True, 2), (False, 1)}


@pytest.mark.parametrize(
    ("record", "outcome"),
    [
        ({**BARE, "certainty": "proven"}, Outcome.EXACT),
        ({"failure": None, "certainty": "proven"}, Outcome.EXACT),
        ({**BARE, "exact": True}, Outcome.EXACT),
        (NEAREST, Outcome.IDENTIFIED),
        ({**NEAREST, "rank": 2}, Outcome.NOTHING),
        ({**NEAREST, "control_lead": 2.0 - LEAD + 0.01}, Outcome.NOTHING),
        ({**NEAREST, "control_lead": -1.0}, Outcome.IDENTIFIED),
        ({**NEAREST, **PSNR, "control_lead": 2.0 - LEAD + 0.01}, Outcome.NOTHING),
        ({**NEAREST, **PSNR, "control_lead": 2.0, "control_psnr": 20.0 - MUCH_PSNR}, Outcome.IDENTIFIED),
        ({**NEAREST, "foreign": FOREIGN}, Outcome.IDENTIFIED),
        ({**NEAREST, "foreign": FOREIGN + 0.01}, Outcome.NOTHING),
        ({**NEAREST, "foreign": FOREIGN + 0.01, "likeness": SAME}, Outcome.IDENTIFIED),
        ({**NEAREST, "foreign": FOREIGN + 0.01, "lead": SURE}, Outcome.IDENTIFIED),
        ({**NEAREST, "foreign": FOREIGN + 0.01, **PSNR, "control_psnr": 20.0 - FAR_PSNR}, Outcome.IDENTIFIED),
        ({**NEAREST, "likeness": LIKENESS - 0.01, "lead": SURE}, Outcome.IDENTIFIED),
        ({**NEAREST, "lead": LEAD - 0.01}, Outcome.NOTHING),
        ({**NEAREST, "likeness": LIKENESS - 0.01}, Outcome.NOTHING),
        ({**NEAREST, "candidates": LEAST_CANDIDATES - 1}, Outcome.NOTHING),
        ({**BARE, "rank": 1, "lead": 0.1, **PSNR}, Outcome.RECOGNIZABLE),
        ({**BARE, "rank": 1, "lead": 0.1, **PSNR, "foreign": FOREIGN + 0.01}, Outcome.NOTHING),
        ({**BARE, "rank": 1, "lead": 0.1, **PSNR, "likeness": LIKENESS - 0.01}, Outcome.NOTHING),
        ({**BARE, "rank": 2, **PSNR}, Outcome.NOTHING),
        ({**BARE, "candidates": 0, **PSNR}, Outcome.RECOGNIZABLE),
        ({**BARE, "rank": 200, **PSNR}, Outcome.NOTHING),
        ({**BARE, "rank": 1, **PSNR, "control_psnr": 18.0}, Outcome.NOTHING),
        ({**BARE, "rank": 1, **PSNR, "aligned_psnr": 14.0, "control_psnr": 9.0}, Outcome.NOTHING),
        ({**BARE, "rank": 1, "aligned_ssim": 0.7, "control_ssim": 0.7 - MARGIN_SSIM - 0.01}, Outcome.RECOGNIZABLE),
        ({"failure": "The attack made no guess.", "certainty": "approximate"}, Outcome.NOTHING),
        ({"failure": None, "certainty": "approximate", "psnr": 40.0}, None),
        ({"failure": None, "certainty": "approximate", "token_f1": 0.9, "exact_match": 0.0}, None),
        ({"failure": None, "token_f1": 1.0, "exact_match": 1.0}, Outcome.EXACT),
        ({"failure": None, "token_f1": 0.9, "exact_match": 0.0, "control_f1": 0.3}, Outcome.RECOGNIZABLE),
        ({"failure": None, "token_f1": 0.55, "exact_match": 0.0, "control_f1": 0.5}, Outcome.NOTHING),
        ({"failure": None, "token_f1": 0.4, "exact_match": 0.0, "control_f1": 0.0}, Outcome.NOTHING),
    ],
)
def test_outcome_of_a_record(record, outcome):
    assert outcome_of(record) is outcome


def test_no_metric_can_be_called_like_a_figure():
    """A record is written and loaded figure by figure."""
    assert {field.name for field in fields(GuessComparison)} <= NOT_METRICS | set(METRICS)
    full = GuessComparison(**{field.name: True if field.name == "exact" else 0.25 for field in fields(GuessComparison)})
    assert GuessComparison.of_record(full.as_record()) == full and GuessComparison().as_record() == {}


def test_all_but_nothing_is_a_leak():
    assert set(Outcome) - READ == {Outcome.NOTHING}
