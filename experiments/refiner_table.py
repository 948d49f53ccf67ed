"""Refiner beside its competitors, or its settings one by one: attacked on one network, trained on another.

    fl-privacy train-evaluator data=cifar10_exact widths=[32,64,128] epochs=10 lr=1e-3 out=evaluator.safetensors
    python experiments/refiner_table.py experiments/refiner_rows.yaml
    python experiments/refiner_table.py experiments/refiner_rows.yaml --do training \
      --families Refiner --overrides partition=dirichlet partition.alpha=1

The published figures of attacks and of accuracy belong to different networks, which is why this is no trade-off. What
has finished is not done again, so that it goes on where it was stopped, and ``--do nothing`` prints the table.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fl_privacy.cli.jobs import run_job
from fl_privacy.config import compose_run
from fl_privacy.config.grid import UNDEFENDED, load_grid
from fl_privacy.experiment.contracts import Monitor
from fl_privacy.experiment.trade_off import Job, Sweep, plan_sweep
from fl_privacy.metrics import Statistic
from fl_privacy.results import Leakage, Summary, read_summary

METRICS = {"psnr": 1, "ssim": 2, "lpips": 3, "noise_ratio": 2}
"""Name -> decimals."""


@dataclass(frozen=True)
class Entry:
    """A defense, where its training is, and where the attacks on it are, by name."""

    name: str
    training: Job
    attacks: Mapping[str, Job]


def chosen(sweep: Sweep, families: Sequence[str] | None) -> Iterator[Entry]:
    for point, training, attacks in zip(sweep.grid.points, sweep.trainings, sweep.attacks, strict=True):
        if families is None or point.family in (UNDEFENDED, *families):
            yield Entry(f"{point.family}, {point.strength}".removesuffix(", "), training, attacks)


def interval(statistic: Statistic, decimals: int) -> str:
    low, high = statistic.ci95 or (None, None)
    spread = f" [{low:.{decimals}f}, {high:.{decimals}f}]" if low is not None else ""
    return f"{statistic.mean:.{decimals}f}{spread}"


def leakage(summary: Summary | None) -> list[str]:
    """Each metric by the plain attacker, PSNR and the share above 15 dB by the adaptive one, and ||B|| / ||E||."""
    if not summary:
        return [""] * (len(METRICS) + 4)
    adaptive, moved = summary.adaptive, summary.perturbation.get("signal_to_perturbation")
    return [
        *(interval(summary.plain.metrics[name], decimals) for name, decimals in METRICS.items()),
        recognizable(summary.plain),
        interval(adaptive.metrics["psnr"], 1) if adaptive else "",
        recognizable(adaptive) if adaptive else "",
        f"{moved.mean:.2g}" if moved else "",
    ]


def recognizable(part: Leakage) -> str:
    (at,) = (t for t in part.thresholds if t.metric == "psnr")
    return f"{at.recognizable} of {at.n}"


def utility(summary: Summary | None, undefended: Summary | None) -> list[str]:
    """Accuracy at the end of the training, and PMM."""
    if not summary:
        return ["", ""]
    accuracy = summary.final_accuracy or 0.0
    return [f"{accuracy:.1%}", f"{100 * accuracy / (undefended.final_accuracy or 1.0):.1f}" if undefended else ""]


def of_attack(entries: Sequence[Entry], attack: str) -> str:
    head = [attack, "PSNR, dB", "SSIM", "LPIPS", "noise ratio", "above 15 dB", "adaptive, PSNR", "above 15 dB"]
    rows = [[entry.name, *leakage(read_summary(entry.attacks[attack].folder))] for entry in entries]
    return as_table([*head, "norm to change"], rows)


def of_training(entries: Sequence[Entry]) -> str:
    undefended = next((read_summary(entry.training.folder) for entry in entries if entry.name == UNDEFENDED), None)
    return as_table(
        ["", "accuracy", "PMM"],
        [[entry.name, *utility(read_summary(entry.training.folder), undefended)] for entry in entries],
    )


def as_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Of those of ``rows`` in which there is something."""
    there = [row for row in rows if any(row[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *there))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path)
    parser.add_argument("--do", default="attacks", choices=["attacks", "training", "both", "nothing"])
    parser.add_argument("--families", nargs="*", help="of the grid; all by default")
    parser.add_argument("--overrides", nargs="*", default=[], help="of the configuration, put last")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sweep = plan_sweep(load_grid(str(options.grid), options.overrides))
    entries = list(chosen(sweep, options.families))
    for entry in entries:
        attacks = list(entry.attacks.values()) if options.do in ("attacks", "both") else []
        training = [entry.training] if options.do in ("training", "both") else []
        for job in (job for job in (*training, *attacks) if not job.finished):
            print(f"{job.command}: {entry.name}", flush=True)
            run_job(job.command, compose_run(job.overrides), Monitor())
    for attack in sweep.grid.attacks:
        print(of_attack(entries, attack), end="\n\n")
    print(of_training(entries))


if __name__ == "__main__":
    main()
