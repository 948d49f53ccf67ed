"""What docstrings show is what comes out."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "fl_privacy").rglob("*.py")
    if ">>> " in path.read_text()
)


def test_there_are_some() -> None:
    assert len(MODULES) >= 6


@pytest.mark.parametrize("module", MODULES)
def test_examples_are_right(module: str) -> None:
    found = doctest.testmod(import_module(module))
    assert found.attempted > 0
    assert found.failed == 0
