"""A long federation with every question asked of every round: seconds, and whether memory stays flat.

    python experiments/all_stages.py --out experiments/rows/all_stages                     # 20 clients, 100 rounds
    python experiments/all_stages.py --rounds 4 --shadows 4 --iterations 20 --victims 4

Updates of all rounds are attacked by Inverting Gradients and asked about membership, source, attribute and property.
Memory is the proportional set size of this process after each round, beside the run in ``memory.jsonl``. The page is
that of the run, whose folder the last line names. A run that has finished is not run again.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from long_federation import memory_mib
from row_file import RowFile, takes_rows

from fl_privacy.federation import Evaluation, RoundReport
from fl_privacy.runs.config import RunSettings, compose_run
from fl_privacy.runs.run import run_experiment
from fl_privacy.runs.run_location import Monitor, plain_loop


class Measuring(Monitor):
    """Keeps the memory and the seconds of each round as it ends."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.latest = time.process_time()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")

    def round_done(self, report: RoundReport, evaluation: Evaluation | None, epsilon: float | None) -> None:
        now = time.process_time()
        row = {"round": report.round, "mib": memory_mib(), "cpu_seconds": now - self.latest}
        self.latest = now
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")


def settings(options: argparse.Namespace) -> RunSettings:
    return compose_run([
        "data=cifar10_animals", "model=lenet", "federation=fedavg", f"federation.clients={options.clients}",
        f"federation.rounds={options.rounds}", "federation.plan.lr=0.02", "federation.plan.batch_size=16",
        "holdout=46000", "intercept.rounds=all", "attack=inverting_gradients",
        f"attack.iterations={options.iterations}", f"victims={options.victims}", "batch_size=1",
        "inference=[membership,source,attribute,property]", f"inference.membership.shadows={options.shadows}",
        f"evaluate_every={max(1, options.rounds // 10)}", f"seed={options.seed}", "device=cpu", f"out={options.runs}",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--victims", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--shadows", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs/all_stages"))
    takes_rows(parser)
    options = parser.parse_args()
    key = {"clients": options.clients, "rounds": options.rounds, "victims": options.victims, "seed": options.seed}
    kept = RowFile(options.out)
    if found := kept.find(key):
        print(f"{found['run']} has finished already")
        return
    torch.set_num_threads(1)
    memory = options.runs / "memory.jsonl"
    run = run_experiment(settings(options), plain_loop, Measuring(memory))
    rounds = [json.loads(line) for line in memory.read_text().splitlines()]
    if len(rounds) != options.rounds:
        raise SystemExit(f"{run} was trained before; remove it, so that its memory is measured")
    mib = [row["mib"] for row in rounds]
    figures = {
        "run": run.name,
        "mib_after_a_tenth": mib[max(0, len(mib) // 10 - 1)],
        "mib_at_the_end": mib[-1],
        "mib_at_most": max(mib),
        "cpu_seconds_a_round": statistics.median(row["cpu_seconds"] for row in rounds),
    }
    kept.add(key, figures)
    print(" ".join(f"{name}={value}" for name, value in figures.items() if name != "run"))
    print(run)


if __name__ == "__main__":
    main()
