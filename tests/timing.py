"""CPU seconds of each test: a plugin that records them and holds every test to its budget.

    FL_PRIVACY_TEST_SECONDS=FILE make test-all    # appends a line a test: seconds, name
    python -m tests.timing FILE [SLOWNESS]        # writes tests/seconds.json, and prints the slowest tests

Of a name that comes again in FILE the last line counts. The core was by SLOWNESS slower than a quiet, fast one.

Seconds are those of the test's own process and of processes that it has waited for, fixtures included.
"""

import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

FILE = "FL_PRIVACY_TEST_SECONDS"
RECORD = Path(__file__).parent / "seconds.json"
"""File of tests -> its seconds; and, of each test above a second, its seconds."""

WHOLE_WAYS = {
    "benchmark",
    "cli",
    "deploy",
    "docs",
    "evaluator",
    "examples",
    "experiment",
    "flower",
    "fuzz",
    "generator",
    "parallel",
    "plugin",
    "regression",
    "report",
}
"""Folders of tests of whole ways, from a command to its page: they have ``LONGEST``, as tests outside of folders."""

LONGEST, UNIT = 10.0, 2.0
"""Seconds that a test of ``make test`` may take on a quiet core; what takes longer is marked ``long``."""

UNKNOWN = 20.0
"""Seconds that a file may take of which none are recorded."""

TOLERANCE = 3.0
"""By how much a test may be over its budget before it fails: cores are shared, and some are slow."""


def budget(name: str) -> float:
    """Seconds that the test ``tests/FOLDER/...::NAME`` may take."""
    _, *folders, _ = ("", *name.partition("::")[0].split("/"))
    return LONGEST if len(folders) < 2 or folders[1] in WHOLE_WAYS else UNIT


def spent() -> float:
    """CPU seconds of this process, and of processes that it has waited for, so far."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@cache
def recorded() -> dict[str, dict[str, float]]:
    """Seconds of files and of tests as last recorded on a quiet machine."""
    return json.loads(RECORD.read_text())


def slowness() -> float:
    """How much slower than a quiet core this one is right now, at least 1."""
    began = spent()
    sum(i * i for i in range(1_000_000))
    return max(1.0, (spent() - began) / 0.06)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    began = spent()
    result = yield
    if place := os.environ.get(FILE):
        with Path(place).open("a") as file:
            file.write(f"{spent() - began:.3f}\t{item.nodeid}\n")
    return result


UNBOUNDED = ("long", "deploy", "cluster", "gpu", "fuzz")
"""Marks of tests that take their time."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    began, clock = spent(), time.monotonic()
    result = yield
    seconds, allowed = spent() - began, TOLERANCE * budget(item.nodeid)
    if not any(map(item.get_closest_marker, UNBOUNDED)) and seconds > allowed and seconds > allowed * slowness():
        pytest.fail(
            f"{seconds:.1f} CPU seconds ({time.monotonic() - clock:.1f} by the clock), where {budget(item.nodeid):.0f}"
            " are expected; make it quicker, or mark it long."
        )
    return result


def main(place: str, slowness: float = 1.0) -> None:
    """Write the record from the lines of a run on a core of this ``slowness``, and print its forty slowest tests."""
    tests: dict[str, float] = {}
    for line in Path(place).read_text().splitlines():
        seconds, _, name = line.partition("\t")
        if name.startswith("tests/"):  # others are those of tests
            tests[name] = float(seconds) / slowness
    files: dict[str, float] = defaultdict(float)
    for name, seconds in tests.items():
        files[name.partition("::")[0]] += seconds
    slowest = Counter(tests).most_common()
    RECORD.write_text(
        json.dumps(
            {
                "files": {name: round(seconds, 1) for name, seconds in sorted(files.items())},
                "tests": {name: round(seconds, 1) for name, seconds in sorted(slowest) if seconds >= 1},
            },
            indent=1,
        )
        + "\n"
    )
    print(f"{len(tests)} tests, {sum(tests.values()):.0f} CPU seconds")
    for name, seconds in slowest[:40]:
        print(f"{seconds:7.1f}  {name}")


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
