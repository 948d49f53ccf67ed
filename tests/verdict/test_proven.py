"""A certificate counts where nobody has the original, and not against it."""

import pytest

from fl_privacy.measure.outcome import Outcome, outcome_of


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"certainty": "proven"}, Outcome.EXACT),
        ({"certainty": "proven", "psnr": 96.0, "likeness": 1.0}, Outcome.EXACT),
        ({"certainty": "proven", "psnr": 9.0, "likeness": 0.1, "rank": 700, "candidates": 1000}, Outcome.NOTHING),
        ({"certainty": "proven", "token_f1": 1.0, "exact_match": 1.0, "control_f1": 0.2}, Outcome.EXACT),
        ({"certainty": "proven", "token_f1": 0.1, "exact_match": 0.0, "control_f1": 0.2}, Outcome.NOTHING),
        ({"certainty": "proven", "token_f1": 0.9, "exact_match": 0.0, "control_f1": 0.2}, Outcome.RECOGNIZABLE),
        ({"certainty": "proven", "failure": "no guess"}, Outcome.NOTHING),
    ],
)
def test_what_is_called_proven(record: dict[str, object], expected: Outcome) -> None:
    assert outcome_of(record) is expected
