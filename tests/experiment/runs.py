"""Small runs through the command line, and how to look at them."""

import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fl_privacy.cli.main import run_command_line

TINY = ("federation.clients=2", "federation.rounds=2", "evaluate_every=2", "victims=2", "attack.iterations=3")
UNATTACKED = (*TINY[:3], "attack=none")
FEW_CANDIDATES = "candidates=40"
"""Beside which guesses are judged: the usual number takes a fifth of the time of tests that look at something else."""
NO_RESULT = ("seconds", "defense_seconds", "total")
"""Fields that differ when the same thing is done again."""


@dataclass(frozen=True)
class Run:
    """What a command left behind.

    Attributes:
        status: its exit status.
        printed: lines on standard output.
        path: what the last one names; of a single run the folder that its page is in.
    """

    status: int
    printed: tuple[str, ...]

    @property
    def path(self) -> Path:
        named = Path(self.printed[-1])
        return named.parent if (named.parent / "metrics.jsonl").exists() else named

    def json(self, name: str) -> Any:
        return json.loads((self.path / name).read_text())

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Of ``metrics.jsonl``, without what a clock decides."""
        lines = (json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines())
        return [{k: v for k, v in line.items() if k not in NO_RESULT} for line in lines if line["kind"] == kind]

    def scores(self) -> list[tuple[str, int, float]]:
        """(victim, image, PSNR) of every victim."""
        return sorted((v["id"], v["image"], v["psnr"]) for v in self.records("image"))


def run(*arguments: str, out: Path, drawn: bool = False) -> Run:
    """``fl-privacy ARGUMENTS out=OUT`` in this process; where they choose no attack, a cheap one, and few candidates.

    Pictures are empty unless they are to be ``drawn``, which takes half of such a run's time.
    """
    command, *settings = arguments
    if command in ("run", "attack") and not any(s.startswith(("attack=", "experiment=")) for s in settings):
        settings = ["attack=inverting_gradients", *settings]
    if command in ("run", "attack") and not any(s.startswith("candidates=") for s in settings):
        settings = [FEW_CANDIDATES, *settings]
    printed = io.StringIO()
    with redirect_stdout(printed), nullcontext() if drawn else undrawn():
        status = run_command_line([command, *settings, f"out={out}"])
    return Run(status, tuple(line for line in printed.getvalue().splitlines() if line.strip()))


@contextmanager
def undrawn() -> Iterator[None]:
    """Within it charts are made, but what is written of them is an empty picture."""

    def save(figure: object, file: Any, *, format: str = "png", **settings: Any) -> None:
        if format == "svg":
            file.write("<svg></svg>")
        else:
            Image.new("L", (1, 1)).save(file, format=format)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", save)
        yield


def stamps(out: Path) -> dict[Path, int]:
    """When the measurements of each run in ``out`` were last written to."""
    return {path: path.stat().st_mtime_ns for path in out.glob("*/metrics.jsonl")}


def wait_until(condition: Any, *, seconds: float) -> None:
    """Return as soon as ``condition()`` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
