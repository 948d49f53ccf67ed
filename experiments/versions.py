"""Whether the working tree is as fast, and as small in memory, as an earlier version: whole commands, both in turn.

    python experiments/versions.py --since f7748864 --out experiments/rows/versions

It wants a machine on which nothing else runs. Each command is run by the version of git that ``--since`` names and by
the working tree, one after the other, in one Python environment; a row has medians of CPU seconds, of seconds by the
clock and of the largest memory of a process.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from row_file import Row, RowFile, takes_rows

COMMANDS: dict[str, tuple[str, ...]] = {
    "first attack": ("attack", "model=lenet_dlg", "attack=idlg", "victims=6", "attack.iterations=100"),
    "64 victims": ("attack", "model=lenet", "victims=64", "attack.budget=quick"),
    "100 rounds": (
        *("run", "model=mlp", "attack=none", "federation.clients=20", "federation.rounds=100"),
        *("evaluate_every=100", "baseline=false"),
    ),
    "a large round on Flower": (
        *("run", "model=mlp", "model.widths=[4000,1000]", "attack=none", "backend=flower", "federation.clients=40"),
        *("federation.rounds=2", "federation.plan.batch_size=8", "baseline=false", "evaluate_every=2"),
    ),
}
MEBIBYTE = 1024.0
"""In the kibibytes that the kernel counts memory in."""


def measured(code: Path, words: Sequence[str]) -> tuple[float, float, float]:
    """Run a command of the package at ``code``; return CPU seconds, seconds and mebibytes."""
    with tempfile.TemporaryDirectory() as folder:
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "fl_privacy", *words, *([f"out={folder}"] if words[0] in {"run", "attack"} else [])],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode} in {code}.")
    spent = sum(getattr(after, name) - getattr(before, name) for name in ("ru_utime", "ru_stime"))
    return spent, seconds, used.ru_maxrss / MEBIBYTE


def compared(before: Path, after: Path, words: Sequence[str], repeats: int) -> Row:
    """Compare two versions; the first pair warms up and is left out."""
    pairs = [(measured(before, words), measured(after, words)) for _ in range(repeats + 1)][1:]
    found: Row = {"repeats": repeats}
    for number, name in enumerate(("cpu_seconds", "seconds", "peak_mebibytes")):
        found[f"{name}_before"] = round(statistics.median(one[number] for one, _ in pairs), 2)
        found[name] = round(statistics.median(two[number] for _, two in pairs), 2)
        found[f"{name}_ratio"] = round(statistics.median(two[number] / one[number] for one, two in pairs), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", required=True, help="a commit")
    parser.add_argument("--only", nargs="+", default=list(COMMANDS), choices=list(COMMANDS))
    parser.add_argument("--repeats", type=int, default=3)
    takes_rows(parser)
    options = parser.parse_args()
    here, rows = Path(__file__).resolve().parents[1], RowFile(options.out)
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "code"
        git = ["git", "-C", str(here), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(before), options.since], check=True)
        try:
            for name in options.only:
                key = {"command": name, "since": options.since}
                print(
                    rows.find(key) or rows.add(key, compared(before, here, COMMANDS[name], options.repeats)), flush=True
                )
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)


if __name__ == "__main__":
    main()
