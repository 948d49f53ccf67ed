"""Draw SPN's PPC curves (Fan et al. 2020, Figures 5, 10, 11, 14 and 15) from kept rows, laid out as there.

    python experiments/spn_ppc.py --out docs/assets/papers

A column for each mechanism, a row for each attack: accuracy of the training (orange, left), distance of the paper's
attack (blue, right) and their product (dash-dotted) over log10(||B|| / ||E|| + 1). Dotted, at batch 1,
is the distance of an attacker that knows the defense, which the paper does not have.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROWS = Path(__file__).parent / "rows"
FIGURES = {5: ("cifar10", 1), 10: ("mnist", 4), 11: ("mnist", 8), 14: ("cifar10", 4), 15: ("cifar10", 8)}
ATTACKS = ("reconstruction", "tracing", "membership")
STRENGTH = ("defense.alpha2", "defense.scale", "defense.share")
NAMES = {"dp_noise": "DP", "spn": "SPN"}

Points = Mapping[tuple[str, str, str], list[tuple[float, float, float]]]
"""Mechanism, attack, attacker -> (log ratio, accuracy, distance) of each strength."""


def defended(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["defense"], *(row["settings"].get(name) for name in STRENGTH)


def points_of(rows: list[dict[str, Any]], batch: int) -> Points:
    """Collect the points of an attack batch; without a defense nothing is disturbed."""
    accuracies = {defended(row): row["final_accuracy"] for row in rows if row.get("command") == "run"}
    found = defaultdict(list)
    for row in rows:
        if "distortion" not in row or row["settings"]["batch_size"] != batch:
            continue
        share = row["settings"].get("defense.share")
        mechanism = NAMES.get(row["defense"], "PPDL" if share is None else f"PPDL-{share:g}")
        ratio = math.log10(row["distortion"]["signal_to_distortion"]["mean"] + 1)
        distances = row["rmse"]["mean"], row["tracing"]["mean"], 1 - row["label_correct"]["mean"]
        for attack, distance in zip(ATTACKS, distances, strict=True):
            found[mechanism, attack, row["attacker"]].append((ratio, accuracies[defended(row)], distance))
    return {key: sorted(points) for key, points in found.items()}


def draw(points: Points, title: str) -> Figure:
    """Draw a figure of the paper: attacks below each other, mechanisms side by side."""
    mechanisms = sorted({mechanism for mechanism, _, _ in points})
    figure = Figure(figsize=(2.6 * len(mechanisms), 5.5), dpi=80, layout="constrained")
    figure.suptitle(title, fontsize=9)
    every = figure.subplots(len(ATTACKS), len(mechanisms), squeeze=False, sharex=True)
    for attack, row in zip(ATTACKS, every, strict=True):
        most = max(distance for (_, of, _), at in points.items() if of == attack for _, _, distance in at)
        for mechanism, axes in zip(mechanisms, row, strict=True):
            ratios, accuracy, distance = zip(*points[mechanism, attack, "plain"], strict=True)
            other = axes.twinx()
            axes.plot(ratios, accuracy, "o-", color="tab:orange", markersize=3)
            other.plot(ratios, distance, "o-", color="tab:blue", markersize=3)
            axes.plot(ratios, [a * d for a, d in zip(accuracy, distance, strict=True)], "-.", color="0.3")
            for at in knowing(points, mechanism, attack):
                other.plot(*at, ":", color="tab:blue")
            axes.set(ylim=(0, max(1.0, most) * 1.05), title=mechanism if attack == ATTACKS[0] else "")
            other.set_ylim(0, max(1.0, most) * 1.05)
            if attack == ATTACKS[-1]:
                axes.set_xlabel("log10(|B| / |E| + 1)", fontsize=8)
        row[0].set_ylabel(attack, fontsize=8)
    return figure


def knowing(points: Points, mechanism: str, attack: str) -> Iterator[tuple[list[float], list[float]]]:
    """Yield the curve of the attacker that knows the defense, if it was run."""
    if at := points.get((mechanism, attack, "adaptive")):
        yield [ratio for ratio, _, _ in at], [distance for _, _, distance in at]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for number, (data, batch) in FIGURES.items():
        rows = [json.loads(row) for row in (ROWS / f"spn_{data}" / "rows.jsonl").open()]
        figure = draw(points_of(rows, batch), f"as Figure {number}: {data}, attack batch {batch}")
        figure.savefig(out / f"spn_figure_{number}.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
