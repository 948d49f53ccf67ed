from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import pytest

from fl_privacy.checks import fits, in_words, one_of
from fl_privacy.errors import UserError

Rounds = Literal["first", "last"] | list[int]


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (1, int),
        (1, float),
        (float("inf"), float),
        (None, int | None),
        ("first", Rounds),
        ([1, 2], Rounds),
        ([0.5], Sequence[float]),
        ({"fc*": 0}, Mapping[str, float]),
        ("anything", Callable[[int], int]),
    ],
)
def test_fits(value, annotation):
    assert fits(value, annotation)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (1.5, int),
        (True, int),
        (1, bool),
        ("1", float),
        (float("nan"), float),
        (None, str),
        ("middle", Rounds),
        ([1, "a"], Rounds),
        ("ab", Sequence[str]),
        ({"fc*": "x"}, Mapping[str, float]),
        (True, Literal[1]),
    ],
)
def test_does_not_fit(value, annotation):
    assert not fits(value, annotation)


def test_words():
    assert in_words(int | None) == "a whole number or null"
    assert in_words(Rounds) == "first or last or a list [a whole number, ...]"
    assert in_words(Mapping[str, float]) == "a mapping {name: a number}"


def test_of_many_names_the_nearest_are_named_and_what_was_meant():
    names = [f"attack_{k}_of_a_long_name" for k in range(60)] + ["inverting_gradients"]
    said = r"45 others, but got 'inverting_grad' \(did you mean inverting_gradients\?\)"
    with pytest.raises(UserError, match=said) as raised:
        one_of("attack", "inverting_grad", names)
    assert len(str(raised.value)) < 600
