"""Run folders become rows that hold settings and statistics, and nothing of a single victim."""

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def collect(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    return importlib.import_module("collect_rows")


def written(folder: Path, *, psnr: float = 12.5, status: str = "finished") -> Path:
    """Write a run as the package leaves it, as far as rows are made of it."""
    leakage = {
        "metrics": {
            "psnr": {"mean": psnr, "ci95": [10.0, 15.0], "n": 4, "groups": 4, "median": 12, "min": 9, "max": 16}
        },
        "thresholds": [{"metric": "psnr", "value": 15.0, "recognizable": 1, "n": 4}],
        "failures": 0,
    }
    summary = {
        "status": status,
        "final_accuracy": 0.5,
        "seconds": {"attack": 1.0},
        "attacked": [{"round": 3, "plain": leakage, "adaptive": None}],
        "update_distortion": {"signal_to_distortion": {"mean": 2.0, "ci95": None, "n": 1}},
    }
    config = {
        "command": "attack",
        "choices": {"defense": "refiner", "model": "lenet"},
        "defense": {
            "_target_": "fl_privacy.defenses.refiner",
            "evaluator": "/somewhere/else/e.safetensors",
            "alpha": 0.5,
        },
        "out": "/somewhere/runs",
        "victims": 4,
    }
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "run.json").write_text(json.dumps({"config": config}))
    (folder / "environment.json").write_text(json.dumps({"packages": {"fl-privacy": "0.1.0", "torch": "2.15.0"}}))
    rounds = [{"kind": "round", "round": number, "accuracy": number / 10} for number in (2, 3)]
    lines = [{"kind": "image", "secret": 1}, *rounds, {"kind": "round", "round": 4, "accuracy": None}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def rows_after(collect: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *folders: Path) -> list[dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["collect_rows.py", *map(str, folders), "--out", str(out)])
    collect.main()
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def test_a_run_is_a_row_for_each_attacker(collect: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = written(tmp_path / "runs" / "one")
    written(tmp_path / "runs" / "killed", status="interrupted")
    (row,) = rows_after(collect, monkeypatch, tmp_path / "rows", run.parent)
    assert row["run"] == "one" and row["attacker"] == "plain" and row["round"] == 3 and row["final_accuracy"] == 0.5
    assert row["accuracy"] == 0.3, "that of the attacked round"
    assert row["psnr"] == {"mean": 12.5, "ci95": [10.0, 15.0], "n": 4, "median": 12, "min": 9, "max": 16}
    assert row["settings"] == {"defense.alpha": 0.5, "defense.evaluator": "e.safetensors", "victims": 4}
    assert row["recognizable"] == {"psnr": 1} and row["version"]["torch"] == "2.15.0"
    assert row["distortion"]["signal_to_distortion"]["mean"] == 2.0
    assert "somewhere" not in json.dumps(row) and "secret" not in json.dumps(row)


def test_a_run_replaces_its_own_rows(collect: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, second, out = written(tmp_path / "a" / "one"), written(tmp_path / "b" / "two"), tmp_path / "rows"
    rows_after(collect, monkeypatch, out, first, second)
    again = written(tmp_path / "c" / "one", psnr=20.0)
    found = rows_after(collect, monkeypatch, out, again)
    assert sorted((row["run"], row["psnr"]["mean"]) for row in found) == [("one", 20.0), ("two", 12.5)]


def test_a_trade_off_has_a_row_for_each_cap(
    collect: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cap = {"mechanism": "SPN", "distance": "label", "attack": "batch 1", "attacker": "plain", "cap": 0.25, "points": 4}
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    (sweep / "trade_off_cap.json").write_text(json.dumps([cap]))
    assert rows_after(collect, monkeypatch, tmp_path / "rows", sweep) == [{"run": "sweep, CAP", **cap}]


def test_a_search_has_a_row_for_each_operation_and_each_number_of_policies(
    collect: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "search"
    folder.mkdir(parents=True)
    scores = {"none": 0.5, "0": 0.4, "1": 0.4, "2": 0.3} | {f"0-{n}": 0.1 + n for n in range(500)}
    told = [{"policy": name, "privacy": score, "accuracy": -1.0, "altered": 1.0} for name, score in scores.items()]
    (folder / "scores.jsonl").write_text("".join(json.dumps({"kind": "policy", **one}) + "\n" for one in told))
    (folder / "config.yaml").write_text("policies: 500\nvariant: code\nchoices: {data: digits, model: lenet}\n")
    assert rows_after(collect, monkeypatch, tmp_path / "unfinished", folder) == []
    (folder / "policies.json").write_text("{}")
    rows = {row["policy"]: row for row in rows_after(collect, monkeypatch, tmp_path / "rows", folder)}
    assert set(rows) == {"none", "0", "1", "2", "first 500"}
    assert [rows[name]["rank"] for name in "012"] == [2.5, 2.5, 1.0] and "rank" not in rows["none"]
    assert (rows["first 500"]["least"], rows["first 500"]["most"]) == (0.1, 499.1)
    assert rows["0"]["variant"] == "code" and rows["0"]["model"] == "lenet"


def test_rows_name_no_folder_of_a_machine() -> None:
    places = re.compile(r"/(?:tmp|home|root|work|Users)/[\w.+-]+/")
    assert [
        path.parent.name
        for path in sorted((Path(__file__).parents[2] / "experiments" / "rows").glob("*/rows.jsonl"))
        if places.search(path.read_text())
    ] == []


@pytest.mark.parametrize(("status", "failed"), [(0, False), (3, True)])
def test_an_attack_that_failed_on_all_victims_is_a_row(
    status: int, failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    assert importlib.import_module("row_file").attack_failed(status) is failed


@pytest.mark.long
@pytest.mark.parametrize("status", [1, 2, 130, 137, 143, -9])
def test_a_run_that_was_killed_or_asked_wrongly_is_no_row(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    another_site = importlib.import_module("another_site")
    monkeypatch.setattr(another_site, "run_command_line", lambda words: status)
    for measure in (another_site.attacked, another_site.questioned):
        with pytest.raises(SystemExit, match=f"status {status}"):
            measure("attack")
