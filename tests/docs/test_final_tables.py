"""Attacks on the finished model side by side, and next to the bound of differential privacy."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def row(method: str, references: int, auc: tuple[float, float, float], **more: Any) -> dict[str, Any]:
    mean, low, high = auc
    figures = {name: {"mean": mean, "ci95": [low, high]} for name in ("auc", "tpr_at_0.1_percent", "tpr_at_1_percent")}
    return {"cell": "mlp", "who": "outsider", "method": method, "references": references, **figures, **more}


def test_an_interval_above_the_bound_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    table = importlib.import_module("final_tables").final_table
    assert table("bounds", tmp_path) == table("methods", tmp_path)
    bounds = {"auc_bound": 0.7, "tpr_bound_at_0.1_percent": 0.9, "tpr_bound_at_1_percent": 0.81}
    private = [row("final_rmia", 2, (0.8, 0.71, 0.9), **bounds), row("final_lira", 2, (0.85, 0.6, 0.9), **bounds)]
    open_ = [
        row("final_lira", 4, (0.9, 0.8, 0.95), auc_control=0.5, cpu_seconds_of_references=90.0),
        row("final_lira", 1, (0.6, 0.5, 0.7)),
        row("final_loss", 0, (0.6, 0.5, 0.7)),
    ]
    for each in open_[:1]:
        del each["tpr_at_1_percent"]  # fewer than 1,000 others
    (tmp_path / "final_model").mkdir()
    lines = "".join(json.dumps(each) + "\n" for each in (*private, *open_))
    (tmp_path / "final_model" / "rows.jsonl").write_text(lines)
    *_, auc, low, high = table("bounds", tmp_path).splitlines()
    assert "| AUC | 0.7 | 0.85 [0.6, 0.9] | LiRA, last model, outsider | 1 of 2 |" in auc
    assert "0 of 2" in low and "0 of 2" in high
    *_, lira, loss = table("methods", tmp_path).splitlines()
    assert "LiRA, last model | 4 | 0.9 [0.8, 0.95] (control 0.5)" in lira
    assert "| - | 1: 0.6, 0.6 | 1.5 |" in lira and loss.endswith("| 0 |")
