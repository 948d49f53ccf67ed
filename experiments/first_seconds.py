"""Where the seconds go between a command and its page: step by step, by an earlier version and by the working tree.

    python experiments/first_seconds.py --since a4c5fa1e --out experiments/rows/first_seconds

It wants a machine on which nothing else runs. Each command is started anew by the version of git that ``--since`` names
and by the working tree, in turn, in one Python environment; a row has the CPU seconds of a step, each without the steps
within it, medians of the repeats. The last rows are sums: of CPU seconds, and of seconds by the clock.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from row_file import Row, RowFile, takes_rows
from versions import COMMANDS as OF_VERSIONS

COMMANDS = {"first_attack": OF_VERSIONS["first attack"], "demo": ("run", "experiment=demo")}
STOPWATCH = Path(__file__).resolve().parent / "stopwatch.py"
ALL, CLOCK = "all steps", "all steps, by the clock"

Steps = dict[str, tuple[float, float]]


def timed(code: Path, words: Sequence[str]) -> Steps:
    """Run a command of the package at ``code``; return seconds by the clock and of CPU of each step."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "steps.json"
        began = time.monotonic()
        subprocess.run(
            [sys.executable, str(STOPWATCH), str(kept), str(began), *words, f"out={folder}/runs"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return {step: (clock, cpu) for step, (clock, cpu) in json.loads(kept.read_text()).items()}


@contextmanager
def version(commit: str) -> Iterator[Path]:
    """Put the files of ``commit`` into a folder of their own while the context lasts."""
    here = Path(__file__).resolve().parents[1]
    git = ["git", "-C", str(here), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "code"
        subprocess.run([*git, "add", "--quiet", "--detach", str(before), commit], check=True)
        try:
            yield before
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)


def medians(runs: Sequence[Steps]) -> dict[str, float]:
    """Return the median of each step's CPU seconds, and of the sums."""
    found = {step: statistics.median(run.get(step, (0.0, 0.0))[1] for run in runs) for run in runs for step in run}
    found[ALL] = statistics.median(sum(cpu for _, cpu in run.values()) for run in runs)
    found[CLOCK] = statistics.median(sum(clock for clock, _ in run.values()) for run in runs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", required=True, help="a commit")
    parser.add_argument("--repeats", type=int, default=5)
    takes_rows(parser)
    options = parser.parse_args()
    rows, here = RowFile(options.out), Path(__file__).resolve().parents[1]
    found: dict[str, dict[str, float]] = {}
    with version(options.since) as before:
        for name, words in COMMANDS.items():
            pairs = [(timed(before, words), timed(here, words)) for _ in range(options.repeats + 1)][1:]
            for column, side in ((f"{name}_before", 0), (name, 1)):
                found[column] = medians([pair[side] for pair in pairs])
    steps = {step: None for column in found.values() for step in column if step not in (ALL, CLOCK)}
    largest = sorted(steps, key=lambda step: -max(column.get(step, 0.0) for column in found.values()))
    for step in (*largest, ALL, CLOCK):
        figures: Row = {column: round(of.get(step, 0.0), 2) for column, of in found.items()}
        print(rows.add({"step": step}, figures), flush=True)


if __name__ == "__main__":
    main()
