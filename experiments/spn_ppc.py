"""PPC curves of SPN (Fan et al. 2020, Figures 5, 10, 11, 14 and 15) from kept rows, as one page.

    python experiments/spn_ppc.py --out ppc.html

Accuracy of the training, distance of the paper's attack and their product over log10(||B|| / ||E|| + 1), for each
mechanism, data set, attack batch and distance; dashed is the attacker that knows of the private head.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fl_privacy.measure.intervals import PpcPoint
from fl_privacy.report.page import TEMPLATES
from fl_privacy.report.ppc import DISTANCES, ppc_chart

ROWS = Path(__file__).parent / "rows"
STRENGTH = ("defense.alpha2", "defense.scale", "defense.share")


def defended(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["defense"], *(row["settings"].get(name) for name in STRENGTH)


def points(rows: list[dict[str, Any]]) -> Iterator[tuple[tuple[Any, ...], str, PpcPoint]]:
    """Yield (mechanism, batch, distance), the attacker, and the point of each attack on a defended upload."""
    accuracies = {defended(row): row["final_accuracy"] for row in rows if row.get("command") == "run"}
    for row in rows:
        if "distortion" not in row:
            continue
        share, ratio = row["settings"].get("defense.share"), row["distortion"]["signal_to_distortion"]["mean"]
        mechanism = row["defense"] if share is None else f"{row['defense']}-{share:g}"
        distances = row["rmse"]["mean"], 1 - row["label_correct"]["mean"], row["tracing"]["mean"]
        for name, distance in zip(DISTANCES, distances, strict=True):
            point = PpcPoint(accuracy=accuracies[defended(row)], distance=distance, signal_to_distortion=ratio)
            yield (mechanism, row["settings"]["batch_size"], name), row["attacker"], point


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the page")
    out, parts = parser.parse_args().out, [f"<style>{(TEMPLATES / 'style.css').read_text()}</style>"]
    for data in ("mnist", "cifar10"):
        curves: dict[tuple[Any, ...], dict[str, list[PpcPoint]]] = {}
        for key, attacker, point in points([json.loads(r) for r in (ROWS / f"spn_{data}" / "rows.jsonl").open()]):
            curves.setdefault(key, {}).setdefault(attacker, []).append(point)
        for (mechanism, batch, name), of in curves.items():
            title = f"{mechanism}, {data}, attack batch {batch}"
            parts += [
                f"<h2>{title}</h2>",
                ppc_chart(of["plain"], of.get("adaptive", []), distance=DISTANCES[name], alt=title),
            ]
    out.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
