"""Tables of docs/inference.md on the finished model, from experiments/rows/final_model."""

from collections.abc import Sequence
from pathlib import Path

from kept_rows import NOT_RUN, ROWS, Row, markdown, read_rows

METHODS = {
    "loss": "loss",
    "fedmia_loss": "FedMIA",
    "rmia": "RMIA, other clients as references",
    "final_loss": "loss, last model",
    "final_rmia": "RMIA, last model",
    "final_lira": "LiRA, last model",
    "final_stacked": "stacked signals, last model",
    "rounds_rmia": "RMIA, all rounds",
    "rounds_lira": "LiRA, all rounds",
    "rounds_stacked": "stacked signals, all rounds",
}
SAID = {"auc": "AUC", "tpr_at_0.1_percent": "TPR at 0.1 % FPR", "tpr_at_1_percent": "TPR at 1 % FPR"}
FIGURES = tuple(SAID)


def final_table(name: str, folder: Path = ROWS) -> str:
    """Render ``methods`` side by side, or the ``bounds`` by epsilon; "Not run." without rows."""
    rows = read_rows("final_model", folder)
    kept = [row for row in rows if ("auc_bound" in row) == (name == "bounds")]
    return (_bounds(kept) if name == "bounds" else _methods(kept)) if kept else NOT_RUN


def _methods(rows: Sequence[Row]) -> str:
    """Render one line for an attack with the most references, and what remains of AUC and TPR with fewer."""
    heads = [
        "training",
        "who",
        "attack",
        "references",
        *SAID.values(),
        "fewer references: AUC, TPR at 1 %",
        "CPU min of references",
    ]
    lines = list[list[str]]()
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["cell"], row["who"], METHODS[row["method"]]), []).append(row)
    for named, (most, *fewer) in groups.items():
        less = [f"{row['references']}: {_mean(row, 'auc')}, {_mean(row, FIGURES[-1])}" for row in fewer]
        seconds = most.get("cpu_seconds_of_references") if most["references"] else 0.0
        spent = "-" if seconds is None else f"{seconds / 60:.2g}"
        figures = [_figure(most, name) for name in FIGURES]
        lines.append([*named, str(most["references"]), *figures, "; ".join(less), spent])
    return markdown(heads, lines)


def _bounds(rows: Sequence[Row]) -> str:
    """Compare all attacks behind DP-SGD with the bound of (epsilon, delta)."""
    heads = ["training", "", "bound", "largest measured", "by", "intervals above the bound"]
    lines = list[list[str]]()
    for cell in dict.fromkeys(row["cell"] for row in rows):
        own = [row for row in rows if row["cell"] == cell]
        for name, said in SAID.items():
            best = max(own, key=lambda row: row[name]["mean"])
            by = f"{METHODS[best['method']]}, {best['who']}"
            bound = own[0][name.replace("tpr", "tpr_bound") if name != "auc" else "auc_bound"]
            above = sum(row[name]["ci95"][0] > bound for row in own)
            lines.append([cell, said, f"{bound:.3g}", _figure(best, name), by, f"{above} of {len(own)}"])
    return markdown(heads, lines)


def _mean(row: Row, name: str) -> str:
    return f"{row[name]['mean']:.3g}" if name in row else "-"


def _figure(row: Row, name: str) -> str:
    """Return a figure with its interval, and the control's; "-" for too few others."""
    if name not in row:
        return "-"
    low, high = row[name]["ci95"]
    control = row.get(f"{name}_control")
    said = f"{row[name]['mean']:.3g} [{low:.3g}, {high:.3g}]"
    return said if control is None else f"{said} (control {control:.3g})"
