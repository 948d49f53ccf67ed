"""What a trade-off sweep has measured so far as a table, also where parts of it have not run.

    fl-privacy trade-off experiments/refiner_rows.yaml
    python experiments/grid_table.py experiments/refiner_rows.yaml --metrics psnr noise_ratio

A row for each defense at each strength: its accuracy, if it was trained, and the mean of each metric with its 95 %
interval by each attack and attacker. Reads run folders alone; overrides behind the grid are those of the sweep.
"""

import argparse
from collections.abc import Sequence

from fl_privacy.runs.config.study import load_grid
from fl_privacy.runs.folder import Attacker
from fl_privacy.runs.folder.study import StudyRow, Versus, read_study
from fl_privacy.runs.study import plan_study


def cell(row: StudyRow, versus: Versus, metric: str) -> str:
    """Format mean and interval of a metric; empty where it was not measured."""
    found = row.statistic(versus, metric)
    if found is None:
        return ""
    digits = 1 if metric == "psnr" else 2
    interval = f" [{found.ci95[0]:.{digits}f}, {found.ci95[1]:.{digits}f}]" if found.ci95 else ""
    return f"{found.mean:.{digits}f}{interval}"


def table(rows: Sequence[StudyRow], metrics: Sequence[str]) -> str:
    """Render a table in Markdown."""
    versus = [
        Versus(cell.title, attacker)
        for cell in rows[0].entry.attacks
        for attacker in Attacker
        if any(Versus(cell.title, attacker) in row.leakage for row in rows)
    ]
    columns = [(one, metric) for one in versus for metric in metrics]
    columns = [(one, metric) for one, metric in columns if any(row.statistic(one, metric) for row in rows)]
    heads = ["defense", "accuracy", *(f"{one.attack}, {one.attacker}, {metric}" for one, metric in columns)]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        accuracy = "" if row.accuracy is None else f"{row.accuracy:.1%}"
        lines.append([row.name, accuracy, *(cell(row, one, metric) for one, metric in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--metrics", nargs="+", default=["psnr"])
    options = parser.parse_args()
    print(table(read_study(plan_study(load_grid(options.grid, options.overrides)).entries()), options.metrics))


if __name__ == "__main__":
    main()
