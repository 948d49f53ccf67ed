"""Graphs of PyTorch Geometric and Flower's vertical-fl, audited as they are: nodes and labels that are inferred.

    python experiments/graph_apps.py --packages FOLDER --flower CHECKOUT --mirror MIRROR [--out FOLDER]

FOLDER holds torch_geometric (``pip install --target FOLDER torch_geometric``); MIRROR has ``titanic-survival``, as
flower_examples.py makes it. Molecules are drawn trees of 7 kinds of atoms. Rows: experiments/rows/graph_apps.
"""

import argparse
import re
from pathlib import Path
from typing import Any

from flower_examples import SETTINGS, Setting, audit_of
from row_file import RowFile

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="folder with torch_geometric")
    parser.add_argument("--flower", type=Path, required=True, help="a checkout of Flower's repository")
    parser.add_argument("--mirror", type=Path, required=True, help="folder of data sets as on the hub")
    parser.add_argument("--only", nargs="*", choices=("gcn", "gin", "vertical-fl"))
    parser.add_argument("--out", type=Path, default=Path("graph_apps"), help="folder of pages and logs")
    parser.add_argument("--victims", type=int, default=8)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for an app")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    molecules, packages = HERE / "molecules", str(asked.packages.absolute())
    cases = {
        **{name: (molecules, Setting(path=packages, config=f'model="{name}"')) for name in ("gcn", "gin")},
        "vertical-fl": (asked.flower.absolute() / "examples" / "vertical-fl", SETTINGS["vertical-fl"]),
    }
    kept = RowFile(HERE / "rows" / "graph_apps")
    for name in asked.only or cases:
        app, setting = cases[name]
        row = audit_of(name, app, setting, asked.mirror.absolute(), asked)
        for answer in (
            each for key in ("rungs", "survivors") for each in row[key] if each.get("counts") or each.get("found")
        ):
            key = {"app": name, "asked": answer["title"]}
            print(kept.add(key, {**figures_of(answer), "seconds": row["seconds"]}), flush=True)


def figures_of(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the right share of nodes or labels next to the control's."""
    counts, control = answer.get("counts"), answer["control"]
    if counts:
        shares = {"right": counts["read"] / counts["judged"], "control": control["read"] / control["judged"]}
        named = re.findall(r"(\d+) of (\d+) (edges|graphs)[^(]*\(control: (\d+)\)", " ".join(answer["notes"]))
        for right, number, what, others in named:
            shares |= {what: int(right), f"of {what}": int(number), f"control {what}": int(others)}
        return {**shares, "of": counts["judged"] + counts["failures"], "chance": counts["chance"]}
    said = re.search(r"of (\d+) labels", " ".join(answer["notes"]))
    return {"right": answer["found"]["value"], "control": control["value"], "of": int(said[1]) if said else None}


if __name__ == "__main__":
    main()
