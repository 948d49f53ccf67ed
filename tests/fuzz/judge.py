"""What every bad input has to come to: one line, soon, and nothing else."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from fl_privacy.errors import UserError
from tests.selection import LEFT_OUT

SECONDS = 10
"""Of CPU in which a bad input is refused."""

SAMPLED = 12
"""Of so many generated cases one belongs to the sample that every test run takes; the marker ``fuzz`` has the rest."""


class Case(NamedTuple):
    """A bad input."""

    name: str
    content: Any


def cases(found: Iterator[tuple[str, Any]], *, sampled: int = SAMPLED) -> list[Any]:
    """Parameters of a test: of ``found`` one in ``sampled``, and the others marked ``fuzz`` where those are to run."""
    return [
        pytest.param(Case(name, content), id=name, marks=() if k % sampled == 0 else pytest.mark.fuzz)
        for k, (name, content) in enumerate(found)
        if k % sampled == 0 or "fuzz" not in LEFT_OUT
    ]


def refused(act: Callable[[], object]) -> str:
    """Return the one line by which ``act`` refuses its input; fail on anything else."""
    started = time.process_time()
    try:
        result = act()
    except UserError as error:
        message = str(error)
    else:
        pytest.fail(f"accepted in silence: {result!r}"[:300])
    assert time.process_time() - started < SECONDS
    assert message.strip() and "\n" not in message.strip()
    return message


def wrong_for(value: object) -> list[object]:
    """Values of other types than ``value``, as a file may hold them."""
    nested: object = {"x": [1]}
    match value:
        case bool():
            return [7, "x", [True], nested]
        case int() | float():
            return ["x", [1], nested, True]
        case str():
            return [7, ["x"], nested, False]
        case list():
            return [7, "x", nested]
        case dict():
            return [7, "x", [1]]
    return [nested]
