"""Tests take the seconds that they have: those that were recorded are held to the budget too."""

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
