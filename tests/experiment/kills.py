"""Commands that are ended at random points, and what they leave behind."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_privacy.cli.main import run_command_line
from tests.benchmark.tracks import TINY
from tests.experiment.runs import FEW_CANDIDATES, NO_RESULT, undrawn

RUN = ("federation.clients=2", "federation.rounds=3", "evaluate_every=3", "victims=2")
RUN += ("attack=inverting_gradients", "attack.iterations=15", FEW_CANDIDATES)
GRID = """
settings: [federation.clients=2, federation.rounds=3]
train: [evaluate_every=3]
attack: [victims=2, threat_model=adaptive]
attacks:
  iDLG: [attack=idlg, attack.iterations=20]
weights: final
defenses:
  Pruning: [defense=pruning, "defense.rate=0.5,0.99"]
"""
SEARCH = ("policies=30", "images_per_class=1", "points=2", "accuracy_draws=2", "accuracy_images=8", "together=2")
SEARCH += ("training.epochs=2", "data.image_size=8", "model.width=2")


@dataclass(frozen=True)
class Subject:
    """A command that can be resumed.

    Attributes:
        arguments: of the command, but for ``out``; a grid is in a file that is named by the folder.
        table: of what it left in a folder, without what a clock decides.
        beside: further arguments where it runs in a process of its own.
    """

    arguments: Callable[[Path], Sequence[str]]
    table: Callable[[Path], Any]
    beside: tuple[str, ...] = ()

    def command(self, out: Path) -> list[str]:
        """Comes to the same whatever was done before."""
        return [sys.executable, "-m", "fl_privacy", *self.arguments(out), f"out={out}", *self.beside]


def sweep(out: Path) -> Sequence[str]:
    return ("run", "-m", "defense=none,dp_noise", "baseline=false", *RUN)


def texts(out: Path) -> Sequence[str]:
    folder, words = out.with_name("texts"), ("a", "fine", "dull", "warm", "film", "plot", "ends")
    folder.mkdir(exist_ok=True)
    for label, shift in (("bad", 0), ("good", 3)):
        lines = [" ".join(words[(shift + k * step) % 7] for k in range(2, 7)) for step in range(1, 16)]
        (folder / f"{label}.txt").write_text("\n".join(lines))
    settings = ("data=text_folder", f"data.root={folder}", "data.vocabulary_size=60", "model=bert_tiny", "attack=tag")
    settings += (*RUN[:4], "attack.iterations=20", FEW_CANDIDATES)
    return ("run", "-m", "defense=none,refiner", "baseline=false", *settings)


def trade_off(out: Path) -> Sequence[str]:
    grid = out.with_name(f"{out.name}.yaml")
    grid.write_text(GRID)
    return ("trade-off", str(grid))


def benchmark(out: Path) -> Sequence[str]:
    track = out.with_name(f"{out.name}-track.yaml")
    track.write_text(TINY)
    return ("benchmark", str(track))


def search(out: Path) -> Sequence[str]:
    return ("search-policies", *SEARCH)


def recorded(out: Path) -> Any:
    """Every line of measurement of every run that finished, and its weights; what was interrupted is moved aside."""

    def lines(run: Path) -> list[Any]:
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in record.items() if key not in NO_RESULT} for record in records]

    runs = sorted(path.parent for path in out.glob("*/metrics.jsonl") if "-interrupted-" not in path.parent.name)
    assert runs
    return {run.name: (sorted(map(str, lines(run))), (run / "model.safetensors").read_bytes()) for run in runs}


def compared(out: Path) -> Any:
    return json.loads((out / "trade_off.json").read_text())


def ranked(out: Path) -> Any:
    found = json.loads((out / "benchmark.json").read_text())
    return {key: value for key, value in found.items() if key not in ("clock", "track")}


def searched(out: Path) -> Any:
    (folder,) = [path.parent for path in out.glob("*/scores.jsonl")]
    scores = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    return sorted(map(str, scores)), json.loads((folder / "policies.json").read_text())


SUBJECTS = {
    "sweep": Subject(sweep, recorded),
    "trade-off": Subject(trade_off, compared, ("--jobs", "2")),
    "benchmark": Subject(benchmark, ranked, ("--jobs", "2")),
    "search": Subject(search, searched),
    "texts": Subject(texts, recorded),
}


def finish(subject: Subject, out: Path) -> float:
    """Let it run to its end in this process; returns the seconds."""
    started = time.monotonic()
    with undrawn():
        assert run_command_line([*subject.arguments(out), f"out={out}"]) == 0
    return time.monotonic() - started


def kill(subject: Subject, out: Path, *, kills: int, within: float, rng: random.Random) -> list[float]:
    """Kill it ``kills`` times, each time up to ``within`` seconds after it began to write; returns when.

    It goes on where it stopped; where it has finished, it starts anew in another folder, ``OUT-1``, ``OUT-2``, ...
    """
    at: list[float] = []
    folder, finished = out, 0
    while len(at) < kills:
        wait, before = rng.uniform(0.0, within), _written(folder)
        process = subprocess.Popen(
            subject.command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            while process.poll() is None and _written(folder) == before:
                time.sleep(0.02)
            _, said = process.communicate(timeout=wait)
            assert process.returncode == 0, said
            finished += 1
            folder = out.with_name(f"{out.name}-{finished}")
        except subprocess.TimeoutExpired:
            at.append(wait)
        finally:
            process.kill()
            process.communicate()
    for left in (out, *(out.with_name(f"{out.name}-{k + 1}") for k in range(finished))):
        finish(subject, left)
    return at


def _written(folder: Path) -> dict[str, int]:
    """Size of each file in ``folder``, which may change meanwhile."""
    sizes = {}
    for at, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                sizes[f"{at}/{name}"] = Path(at, name).stat().st_size
    return sizes
