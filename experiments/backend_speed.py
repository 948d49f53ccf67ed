"""What Flower's messages and Ray's processes cost beside the plain loop, in CPU seconds a round.

    python experiments/backend_speed.py --clients 10 --model lenet --backends flower ray

CPU time of this process and all that it has started; both sides in turn, the median of the repeats. Ray's first rounds,
in which its processes load PyTorch and the data, are not counted.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from long_federation import descendants
from row_file import RowFile, takes_rows
from unwatched import unwatched_rounds

from fl_privacy.runs.build import clients_of
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.setup import build_setup

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, precisely, and of its descendants, in hundredths."""
    total = time.process_time()
    for pid in descendants(os.getpid()):
        if pid == os.getpid():
            continue
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


def round_seconds(backend: str, overrides: list[str], *, skipped: int) -> tuple[float, float]:
    """Measure CPU and wall-clock seconds of a round, over the rounds after the first ``skipped``."""
    config = compose_run(overrides)
    federation = build_setup(config)
    source: Callable[[], Any] = partial(clients_of, config)
    source()
    marks: list[tuple[float, float]] = [(cpu_seconds(), time.perf_counter())]
    for round in unwatched_rounds(backend, federation, source):
        if round.report.round in (skipped, federation.rounds):
            marks.append((cpu_seconds(), time.perf_counter()))
    (cpu, wall), (cpu_end, wall_end) = marks[-2:]
    counted = federation.rounds - skipped
    return (cpu_end - cpu) / counted, (wall_end - wall) / counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["flower", "ray"], choices=["flower", "ray"])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--overrides", nargs="*", default=["model=lenet", "data=mnist_mini"])
    takes_rows(parser)
    options = parser.parse_args()
    kept = RowFile(options.out)
    overrides = [
        f"federation.clients={options.clients}",
        f"federation.rounds={options.rounds}",
        f"federation.plan.batch_size={options.batch_size}",
        "attack=none",
        "device=cpu",
        *options.overrides,
    ]
    for backend in options.backends:
        skipped = 3 if backend == "ray" else 1
        pairs = []
        for _ in range(options.repeats):
            plain, other = (round_seconds(name, overrides, skipped=skipped) for name in ("loop", backend))
            pairs.append((plain, other))
        ratios = [other[0] / plain[0] for plain, other in pairs]
        loop, mine = (statistics.median(pair[side][0] for pair in pairs) for side in (0, 1))
        wall = statistics.median(other[1] / plain[1] for plain, other in pairs)
        middle = statistics.median(ratios)
        key = {"backend": backend, "clients": options.clients, "overrides": options.overrides}
        figures = {"cpu_seconds": mine, "loop_cpu_seconds": loop, "wall_ratio": wall, "repeats": options.repeats}
        kept.add(key, {"ratio": middle, "least": min(ratios), "most": max(ratios), **figures})
        print(
            f"{backend}: {1e3 * mine:.1f} ms of CPU a round, the plain loop {1e3 * loop:.1f} ms: {middle:.2f}"
            f" ({min(ratios):.2f} to {max(ratios):.2f}); wall clock {wall:.2f}"
        )


if __name__ == "__main__":
    main()
