"""The rows that ``fdl_pp.py`` left in a folder side by side: a table, and Figures 2 to 5.

    python experiments/fdl_pp_table.py runs/fdl_pp_mnist

Writes ``figure_2.png`` (a reconstruction by each attack behind each method), ``figure_3.png`` (accuracy against BPMSE
and BPKI) and ``figures_4_5.png`` (private layers over the rounds) into the folder.
"""

import argparse
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from row_file import RowFile
from safetensors.torch import load_file
from torch import Tensor

from fl_privacy.measure import aggregate

ORDER = ("DL", "DLDP-A", "DLDP-B", "SplitFed", "FDL-PP", "SecAgg+", "CKKS")
LABELS = {"bpmse": "BPMSE", "bpmse of image or negative": "BPMSE of image or negative", "bpki": "BPKI"}
SAFE = {"bpmse": 0.05, "bpki": 0.3}

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


def cell(row: Row, attack: str, metric: str) -> str:
    found = row["attacks"].get(attack, {})
    if metric not in found:
        return "no guess" if found.get("failures") else ""
    value, spread = found[metric], found[f"{metric}_std"]
    return f"{value:.2f} ± {spread:.2f}" if metric == "bpki" else f"{value:.1e} ± {spread:.0e}"


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
        for metric in LABELS
    }
    return {metric: asdict(statistic) for metric, statistic in measured.items() if statistic}


def table(rows: Mapping[str, Row]) -> str:
    lines = {
        "accuracy": [f"{row['accuracy']:.1%}" if "accuracy" in row else "" for row in rows.values()],
        "epsilon": [f"{row['privacy']['epsilon']:.2g}" if "privacy" in row else "" for row in rows.values()],
    }
    for metric, label in LABELS.items():
        for attack in named(rows.values()):
            lines[f"{label}, {attack}"] = [cell(row, attack, metric) for row in rows.values()]
    lines["CPU seconds a round"] = [f"{row['cpu_seconds']:.2f}" if "bytes" in row else "" for row in rows.values()]
    lines["bytes received a round"] = [f"{row['bytes']:,}" if "bytes" in row else "" for row in rows.values()]
    head = ["", *rows], ["---"] * (len(rows) + 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (*head, *([name, *own] for name, own in lines.items())))


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
            if name != "original" and (label := cell(rows[method], name, "bpmse")):
                axis.set_xlabel(label, fontsize=7)
    figure.savefig(file)


def draw_scatter(rows: Mapping[str, Row], file: Path) -> None:
    """Draw Figure 3: accuracy against BPMSE and BPKI, a column for each attack."""
    names = named(rows.values())
    figure = Figure(figsize=(3 * len(names) + 1.5, 5.5), dpi=150, layout="constrained")
    axes = figure.subplots(2, len(names), squeeze=False, sharex="row", sharey=True)
    for metric, row in zip(("bpmse", "bpki"), axes, strict=True):
        for name, axis in zip(names, row, strict=True):
            for position, (method, own) in enumerate(rows.items()):
                if metric in own["attacks"].get(name, {}):
                    place = own["attacks"][name][metric], own["accuracy"]
                    axis.scatter(*place, label=method, color=f"C{position}", marker="osD^vPX*"[position])
            axis.axvline(SAFE[metric], color="gray", linestyle=":")
            axis.set(xlabel=metric.upper(), title=name if metric == "bpmse" else "")
            if metric == "bpmse":
                axis.set_xscale("log")
        row[0].set_ylabel("accuracy")
    handles = {label: h for axis in figure.axes for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside right center", fontsize=7)
    figure.savefig(file)


def draw_courses(rows: Mapping[str, Row], file: Path) -> None:
    """Draw Figures 4 and 5: private weights over the rounds."""
    figure = Figure(figsize=(10, 3), dpi=150, layout="constrained")
    for axis, what in zip(figure.subplots(1, 3), ("distance", "rank", "norm of gamma"), strict=True):
        _draw_course(axis, rows, what)
    figure.savefig(file)


def _draw_course(axis: Axes, rows: Mapping[str, Row], what: str) -> None:
    for method, row in rows.items():
        names = [name for name in (row["course"] or [{}])[0] if name.startswith(what)]
        for name in names:
            label = method if len(names) == 1 else f"{method}, {name.removeprefix(what)}"
            axis.plot([point[name] for point in row["course"]], label=label)
    axis.set(xlabel="round", title=what)
    if axis.lines:
        axis.legend(fontsize=6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=Path, help="folder in which rows.jsonl keeps the figures")
    options = parser.parse_args()
    folder, kept = options.folder, RowFile(options.rows)
    rows, pictures = loaded(folder)
    print(table(rows))
    for method, row in rows.items():
        kept.add({"method": method}, kept_figures(row))
    attackers = {method: row for method, row in rows.items() if row["attacks"]}
    trained = {method: row for method, row in rows.items() if "accuracy" in row}
    if attackers:
        draw_pictures(attackers, {method: pictures[method] for method in attackers}, folder / "figure_2.png")
    if both := {method: row for method, row in attackers.items() if method in trained}:
        draw_scatter(both, folder / "figure_3.png")
    if trained:
        draw_courses(trained, folder / "figures_4_5.png")


if __name__ == "__main__":
    main()
