"""An app of graphs of PyTorch Geometric, audited as it is: nodes that are inferred.

    python experiments/graph_apps.py --packages FOLDER [--out FOLDER]

FOLDER holds torch_geometric (``pip install --target FOLDER torch_geometric``). Molecules are drawn trees of 7 kinds of
atoms. Rows: experiments/rows/graph_apps.
"""

import argparse
from pathlib import Path
from typing import Any

from flower_examples import Setting, audit_of
from row_file import RowFile

HERE, NETWORKS = Path(__file__).resolve().parent, ("gcn", "gin")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="folder with torch_geometric")
    parser.add_argument("--only", nargs="*", choices=NETWORKS)
    parser.add_argument("--out", type=Path, default=Path("graph_apps"), help="folder of pages and logs")
    parser.add_argument("--victims", type=int, default=8)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for an app")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    kept, packages = RowFile(HERE / "rows" / "graph_apps"), str(asked.packages.absolute())
    for name in asked.only or NETWORKS:
        setting = Setting(path=packages, config=f'model="{name}"')
        row = audit_of(name, HERE / "molecules", setting, asked.out.absolute(), asked)
        for answer in (each for each in row["rungs"] if each.get("counts")):
            key = {"app": name, "asked": answer["title"]}
            print(kept.add(key, {**figures_of(answer), "seconds": row["seconds"]}), flush=True)


def figures_of(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the right share of nodes next to the control's."""
    counts, control = answer["counts"], answer["control"]
    shares = {"right": counts["read"] / counts["judged"], "control": control["read"] / control["judged"]}
    return {**shares, "of": counts["judged"] + counts["failures"], "chance": counts["chance"]}


if __name__ == "__main__":
    main()
