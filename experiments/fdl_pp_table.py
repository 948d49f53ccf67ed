"""Keep what ``fdl_pp.py`` left in a folder as rows, and draw Figure 2 into it.

    python experiments/fdl_pp_table.py runs/fdl_pp_mnist --rows experiments/rows/fdl_pp

``figure_2.png`` has a reconstruction by each attack behind each method.
"""

import argparse
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from row_file import RowFile
from safetensors.torch import load_file
from torch import Tensor

from fl_privacy.measure import aggregate

ORDER = ("DL", "DLDP-A", "DLDP-B", "SplitFed", "FDL-PP", "SecAgg+", "CKKS")
SCORES = ("bpmse", "bpmse of image or negative", "bpki")

KEPT = ("rounds", "start", "features_of", "examples", "accuracy", "cpu_seconds", "bytes", "privacy")

Row = Mapping[str, Any]


def loaded(folder: Path) -> tuple[dict[str, Row], dict[str, dict[str, Tensor]]]:
    """Load the rows and pictures of the methods that have finished."""
    done = [method for method in ORDER if (folder / f"{method}.json").exists()]
    rows = {method: json.loads((folder / f"{method}.json").read_text()) for method in done}
    return rows, {method: load_file(folder / f"{method}.safetensors") for method in done}


def named(rows: Iterable[Row]) -> list[str]:
    """List the attacks in the order in which they were made."""
    return list(dict.fromkeys(name for row in rows for name in row["attacks"]))


def kept_figures(row: Row) -> dict[str, Any]:
    """Collect accuracy, every attack's scores, and the private weights after the last round."""
    gammas = {"norm": "gamma", "largest": "largest_gamma"}
    last = {gammas.get(what := name.partition(" of ")[0], what): v for name, v in (row["course"] or [{}])[-1].items()}
    plain = {name: row[name] for name in KEPT if name in row}
    figures = {name.replace(", ", "_"): over_runs(found) for name, found in row["attacks"].items()}
    return {**plain, **last, "figures": figures}


def over_runs(found: Mapping[str, Any]) -> dict[str, Any]:
    """Compute statistics over the runs of an attack, which differ in their starts."""
    measured = {
        metric.replace(" ", "_"): aggregate(found.get(f"{metric}_of_runs", ()), within=(0, math.inf))
        for metric in SCORES
    }
    return {metric: asdict(statistic) for metric, statistic in measured.items() if statistic}


def draw_pictures(rows: Mapping[str, Row], pictures: Mapping[str, Mapping[str, Tensor]], file: Path) -> None:
    """Draw Figure 2: a row for each attack, a column for each method."""
    shown = {method: own for method, own in pictures.items() if own}
    names = ["original", *named(rows[method] for method in shown)]
    figure = Figure(figsize=(1.3 * len(shown) + 1, 1.5 * len(names)), dpi=150, layout="constrained")
    axes = figure.subplots(len(names), len(shown), squeeze=False)
    for name, row in zip(names, axes, strict=True):
        row[0].set_ylabel(name)
        for axis, (method, own) in zip(row, shown.items(), strict=True):
            axis.set(xticks=[], yticks=[], title=method if name == names[0] else "")
            axis.title.set_fontsize(8)
            axis.set_box_aspect(1)
            if name in own:
                axis.imshow(own[name].permute(1, 2, 0).clamp(0, 1), cmap="gray", vmin=0, vmax=1)
            else:
                why = "no guess" if name in rows[method]["attacks"] else "n/a"
                axis.text(0.5, 0.5, why, ha="center", va="center", transform=axis.transAxes, color="gray")
            if "bpmse" in (found := rows[method]["attacks"].get(name, {})):
                axis.set_xlabel(f"{found['bpmse']:.1e}", fontsize=7)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=Path, help="folder in which rows.jsonl keeps the figures")
    options = parser.parse_args()
    folder, kept = options.folder, RowFile(options.rows)
    rows, pictures = loaded(folder)
    for method, row in rows.items():
        print(kept.add({"method": method}, kept_figures(row)))
    if attackers := {method: row for method, row in rows.items() if row["attacks"]}:
        draw_pictures(attackers, {method: pictures[method] for method in attackers}, folder / "figure_2.png")


if __name__ == "__main__":
    main()
