"""Who is given no more time ends; who was never told of any does not look at the clock."""

import math
import time

import pytest

from fl_privacy.attacks.attack import even_share, seconds_left, timely, within


def test_without_an_end_there_is_all_the_time():
    assert seconds_left() == math.inf
    assert list(timely(range(3))) == [0, 1, 2]
    with within(math.inf):
        assert seconds_left() == math.inf
    with even_share(5):
        assert seconds_left() == math.inf


def test_the_first_step_is_taken_in_any_case():
    with within(0.0):
        assert seconds_left() == 0
        assert list(timely(range(3))) == [0]
        assert list(timely([])) == []


def test_steps_end_with_the_time():
    with within(0.05):
        taken = [time.sleep(0.02) for _ in timely(range(100))]
    assert 1 <= len(taken) <= 3


def test_what_the_clock_ended_is_known_to_all_around_it():
    with within(10.0) as outer, within(5.0) as other:
        list(timely(range(2)))
    with within(10.0) as around:
        with within(0.0) as inner:
            list(timely(range(2)))
        with within(0.0) as whole:
            list(timely(range(1)))
    assert (outer.cut, other.cut) == (False, False)
    assert (around.cut, inner.cut, whole.cut) == (True, True, False)


def test_who_works_for_others_has_no_longer_than_they_have():
    with within(10.0):
        with within(20.0):
            assert seconds_left() <= 10
        with within(1.0):
            assert seconds_left() <= 1
        assert 9 < seconds_left() <= 10


def test_time_that_is_left_is_shared_evenly():
    with within(9.0):
        with even_share(3):
            assert seconds_left() <= 3
        with even_share(2):
            assert 4 < seconds_left() <= 4.5
        with even_share(1):
            assert 8 < seconds_left() <= 9


def test_an_end_is_over_with_its_context():
    with pytest.raises(RuntimeError), within(0.0):
        raise RuntimeError
    assert seconds_left() == math.inf
