"""Tests take the seconds that they have: those that were recorded are held to the budget too."""

import json
from pathlib import Path

import pytest

from tests import timing

MEASURED = 1.25
"""By how much what one core measures is above what a quiet one would."""


def test_recorded_seconds_are_within_the_budget(request: pytest.FixtureRequest) -> None:
    """Of the tests of this session that are not marked as taking their time."""
    bounded = {item.nodeid for item in request.session.items if not any(map(item.get_closest_marker, timing.UNBOUNDED))}
    over = {
        name: seconds
        for name, seconds in timing.recorded()["tests"].items()
        if name in bounded and seconds > MEASURED * timing.budget(name)
    }
    assert over == {}, "make them quicker, mark them long, or record their seconds again"


def test_whole_ways_have_more_seconds_than_units() -> None:
    unit, way = timing.budget("tests/metrics/test_a.py::test_b"), timing.budget("tests/flower/test_a.py::test_b")
    assert (unit, way) == (timing.UNIT, timing.LONGEST) and timing.budget("tests/test_a.py::test_b") == timing.LONGEST


def test_tests_that_a_test_makes_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "RECORD", tmp_path / "seconds.json")
    (tmp_path / "lines").write_text("3.0\ttests/test_x.py::test_y\n9.0\ttest_a.py::test_b\n")
    timing.main(str(tmp_path / "lines"), 2.0)
    assert json.loads((tmp_path / "seconds.json").read_text()) == {
        "files": {"tests/test_x.py": 1.5},
        "tests": {"tests/test_x.py::test_y": 1.5},
    }
