"""The map of trainings shows what was predicted before an attack next to what the attack identified."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def keep(folder: Path, name: str, *rows: dict[str, Any]) -> None:
    (folder / name).mkdir()
    (folder / name / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_map_shows_cells_with_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    map_picture = importlib.import_module("network_tables").map_picture
    assert map_picture("map", tmp_path) == "Not run."
    cell = {"network": "LeNet", "mode": "eval", "batch": 2, "steps": 1, "trained": False}
    figures = {"of": 4, "control_identified": 1, "psnr": 20.0, "control_psnr": 9.0}
    other = {**cell, "network": "MLP", "predicted": "reconstructible", "identified": 4}
    keep(tmp_path, "map", {**cell, **figures, "identified": 2}, {**other, **figures})
    keep(tmp_path, "predicted_before", {**cell, "predicted": "not by these attacks"})
    drawn = map_picture("map", tmp_path)
    assert "<th>LeNet *</th>" in drawn and "2 of 4, control 1 N<" in drawn and "#e9b44c;color" in drawn
    assert "<th>MLP</th>" in drawn and "4 of 4, control 1 R<" in drawn and "#c44;color" in drawn
    assert "batch 2<br>1 step<br>norm eval<br>untrained" in drawn
    assert "<th>ViT" not in drawn and "ViT, 6 blocks;" in drawn


def test_attacks_in_training_mode_stand_by_their_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    table = importlib.import_module("network_tables").leakpro_table
    assert table("code", tmp_path) == "Not run."
    row = {
        "network": "ResNet",
        "batch": 1,
        "psnr": 9.46,
        "identified": 0,
        "of": 1,
        "mean_color_psnr": 14.77,
        "control_psnr": 8.1,
    }
    dear = {**row, "attack": "GIABase", "budget": "200 iterations", "cpu_seconds": 99.6}
    cheap = {**row, "attack": "auto", "budget": "quick", "cpu_seconds": 30.2}
    keep(tmp_path, "code", dear, cheap, {**cheap, "psnr": 20.0, "identified": 1, "cpu_seconds": 10.0})
    assert table("code", tmp_path).splitlines()[2:] == [
        "| ResNet | 1 | auto, quick | 2 | 14.7 (least 9.5) | 1 of 2 | 8.1 | 14.8 | 20 |",
        "| ResNet | 1 | GIABase, 200 iterations | 1 | 9.5 (least 9.5) | 0 of 1 | 8.1 | 14.8 | 100 |",
    ]
