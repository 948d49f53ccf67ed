"""Memory and seconds of a long federation round by round, and whether all backends end with the same weights.

    for backend in loop flower ray; do python experiments/long_federation.py $backend --rows rows.jsonl; done
    python experiments/long_federation.py figure --rows rows.jsonl --out memory.png

A backend that has finished with the same settings is not run again. Memory is the proportional set size (PSS) of this
process and all that it has started, so that pages shared between Ray's processes count once.
"""

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
from row_file import RowFile
from unwatched import BACKENDS, unwatched_rounds

from fl_privacy.runs.build import clients_of
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.setup import build_setup

OPTIONS: dict[str, dict[str, Any]] = {"ray": {"actors": 2}}
KIB = 1024


def descendants(pid: int) -> Iterator[int]:
    """List ``pid`` and its descendants, direct or not."""
    parents: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(status.parent.name))
    waiting = [pid]
    while waiting:
        yield (found := waiting.pop())
        waiting += parents.get(found, [])


def memory_mib(pid: int | str = "self") -> float:
    """Measure the PSS of a process and its descendants, in MiB."""
    total = 0
    for found in descendants(int(Path("/proc", str(pid)).resolve().name)):
        try:
            lines = Path(f"/proc/{found}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return total / KIB


def train(backend: str, overrides: list[str], rows: Path, settings: dict[str, Any]) -> None:
    config = compose_run(overrides)
    federation = build_setup(config)
    source = partial(clients_of, config)
    latest = time.perf_counter(), time.process_time()
    for round in unwatched_rounds(backend, federation, source, **OPTIONS.get(backend, {})):
        report = round.report
        now = time.perf_counter(), time.process_time()
        row = {
            "backend": backend,
            **settings,
            "round": report.round,
            "clients_counted": len(report.clients),
            "seconds": now[0] - latest[0],
            "cpu_seconds_of_server": now[1] - latest[1],
            "mib": memory_mib(),
        }
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        latest = time.perf_counter(), time.process_time()
    state = federation.server.state
    tensors = {name: t.contiguous() for name, t in {**state.parameters, **state.buffers}.items()}
    digest = hashlib.sha256(safetensors.torch.save(tensors)).hexdigest()
    with rows.open("a") as file:
        file.write(json.dumps({"backend": backend, **settings, "weights": digest}) + "\n")


def read(rows: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []


def show(rows: list[dict[str, Any]], out: Path, kept: RowFile) -> None:
    """Draw memory over rounds, and print a line for each backend."""
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for backend in BACKENDS:
        mine = {row["round"]: row for row in rows if row["backend"] == backend and "round" in row}
        if not mine:
            continue
        rounds = sorted(mine)
        memory = [mine[r]["mib"] for r in rounds]
        axes.plot(rounds, memory, label=backend)
        tenth, last = memory[min(len(memory) - 1, len(memory) // 10)], memory[-1]
        ends = [row["weights"][:12] for row in rows if row["backend"] == backend and "weights" in row]
        seconds = statistics.median(mine[r]["seconds"] for r in rounds)
        figures = {"mib_after_a_tenth": tenth, "mib_at_the_end": last, "weights": ends[-1] if ends else None}
        kept.add({"backend": backend}, {"rounds": len(rounds), "seconds_a_round": seconds, **figures})
        print(
            f"{backend:7} {len(rounds)} rounds, {seconds:.2f} s a round, {tenth:.0f} MiB after a tenth of them,"
            f" {last:.0f} MiB at the end ({(last / tenth - 1):+.1%}), weights {ends[-1] if ends else 'not there yet'}"
        )
    axes.set(xlabel="round", ylabel="memory of all processes (MiB)", ylim=(0, None))
    axes.legend()
    figure.savefig(out, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=[*BACKENDS, "figure"])
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("memory.png"))
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--kept", type=Path, help="folder in which rows.jsonl keeps what `figure` comes to")
    arguments = parser.parse_args()
    settings = {"clients": arguments.clients, "rounds": arguments.rounds, "model": arguments.model}
    rows = [row for row in read(arguments.rows) if {key: row[key] for key in settings} == settings]
    if arguments.backend == "figure":
        show(rows, arguments.out, RowFile(arguments.kept))
    elif any(row["backend"] == arguments.backend and "weights" in row for row in rows):
        print(f"{arguments.backend} has finished already")
    else:
        overrides = [
            f"federation.clients={arguments.clients}",
            f"federation.rounds={arguments.rounds}",
            f"model={arguments.model}",
            "federation.plan.batch_size=8",
            "attack=none",
            "device=cpu",
        ]
        train(arguments.backend, overrides, arguments.rows, settings)


if __name__ == "__main__":
    main()
