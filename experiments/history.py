"""How long ten commands take, version by version: CPU seconds, seconds by the clock, largest memory of a process.

    python experiments/history.py --commits v0.2.0 HEAD --out experiments/rows/history

Each command is run by the code of each commit in one Python environment; rows that are there already are kept. Wants a
machine on which nothing else runs: rows of one machine are comparable, those of two are not.
"""

import argparse
import statistics
import subprocess
import tempfile
from pathlib import Path

from row_file import Row, RowFile, takes_rows
from versions import COMMANDS as COMPARED, measured

COMMANDS: dict[str, tuple[str, ...]] = {
    **COMPARED,
    "names": ("list", "attack"),
    "an image behind ResNet-20": (
        "attack",
        "model=resnet20",
        "victims=1",
        "attack=inverting_gradients",
        "attack.iterations=50",
    ),
    "rows": ("attack", "data=breast_cancer", "model=table_mlp", "victims=8"),
    "a demo": ("run", "experiment=demo"),
    "a defense and who knows it": (
        "attack",
        "defense=dp_noise",
        "threat_model=adaptive",
        "victims=4",
        "attack=inverting_gradients",
        "attack.iterations=100",
    ),
    "an audited app": ("audit", "examples/flower_quickstart", "--seconds", "30"),
}


def at(code: Path, name: str, repeats: int) -> Row:
    """Measure a command of the package at ``code``; the first run warms up and is left out."""
    words = [str(code / word) if word.startswith("examples/") else word for word in COMMANDS[name]]
    runs = [measured(code, words) for _ in range(repeats + 1)][1:]
    cpu, clock, memory = (statistics.median(figures) for figures in zip(*runs, strict=True))
    return {
        "repeats": repeats,
        "cpu_seconds": round(cpu, 2),
        "seconds": round(clock, 2),
        "peak_mebibytes": round(memory, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", nargs="+", default=["HEAD"])
    parser.add_argument("--only", nargs="+", default=list(COMMANDS), choices=list(COMMANDS))
    parser.add_argument("--repeats", type=int, default=3)
    takes_rows(parser)
    options = parser.parse_args()
    git = ["git", "-C", str(Path(__file__).resolve().parents[1])]
    rows = RowFile(options.out)
    for commit in options.commits:
        asked = [*git, "show", "--no-patch", "--format=%h %cs", commit]
        short, day = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()
        with tempfile.TemporaryDirectory() as folder:
            code = Path(folder) / "code"
            subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(code), commit], check=True)
            try:
                for name in options.only:
                    key = {"commit": short, "day": day, "command": name}
                    print(rows.find(key) or rows.add(key, at(code, name, options.repeats)), flush=True)
            finally:
                subprocess.run([*git, "worktree", "remove", "--force", str(code)], check=True)


if __name__ == "__main__":
    main()
