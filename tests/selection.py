"""What ``-m`` leaves out: tests that would not run are not even made, since each process of the suite pays for it."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

LEFT_OUT: set[str] = set()
"""Markers whose tests do not run in this process."""

OF_A_FILE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(\w+)", re.MULTILINE)


def left_out(expression: str) -> set[str]:
    """Markers that an expression such as ``not long and not fuzz`` leaves out; of one that says more, none."""
    parts = [part.split() for part in expression.split(" and ")]
    if not all(len(part) == 1 or (len(part) == 2 and part[0] == "not") for part in parts):
        return set()
    return {part[1] for part in parts if len(part) == 2}


def pytest_configure(config: pytest.Config) -> None:
    LEFT_OUT.clear()
    LEFT_OUT.update(left_out(config.option.markexpr))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file that is left out as a whole, unless it is named."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    if any(collection_path == config.invocation_params.dir / name.partition("::")[0] for name in config.args):
        return None
    return True if LEFT_OUT.intersection(OF_A_FILE.findall(collection_path.read_text())) else None


def few(cases: Iterable[Any], keep: int = 3, all_but_fuzz: int | None = None) -> list[Any]:
    """Leave the first ``keep`` cases of a family of tests to ``make test``; the others are long.

    Of these ``make test-all`` runs those before number ``all_but_fuzz`` (``None``: as many again), ``make fuzz`` the
    rest.
    """
    made = list(cases)
    end = 2 * keep if all_but_fuzz is None else all_but_fuzz
    later = [
        pytest.param(
            *(case if isinstance(case, tuple) else [case]), marks=[pytest.mark.long, pytest.mark.fuzz][: 1 + late]
        )
        for late, some in ((False, made[keep:end]), (True, made[end:]))
        for case in some
    ]
    return [*made[:keep], *later]
