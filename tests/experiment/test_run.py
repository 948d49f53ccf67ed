"""One run: what it leaves behind, and what is not done twice."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from fl_privacy.report import write_report
from fl_privacy.runs.folder import read_run
from tests.experiment.runs import TINY, UNATTACKED, Run, run, stamps

LEFT_BEHIND = {
    "config.yaml",
    "environment.json",
    "threat_model.json",
    "defense.json",
    "partition.json",
    "metrics.jsonl",
    "reconstructions",
    "model.safetensors",
    "pictures",
    "report.html",
    "summary.json",
}


def test_a_run_leaves_behind_what_is_promised(undefended: Run) -> None:
    assert undefended.status == 0
    assert undefended.path.is_dir()
    assert {path.name for path in undefended.path.iterdir()} >= LEFT_BEHIND
    assert not list(undefended.path.rglob("*.part"))


def test_what_was_measured_adds_up(undefended: Run) -> None:
    rounds, victims = undefended.records("round"), undefended.records("image")
    summary = undefended.json("summary.json")
    assert [r["round"] for r in rounds] == [1, 2]
    assert [r["accuracy"] is None for r in rounds] == [True, False]
    assert [(v["round"], v["client"]) for v in victims] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert summary["status"] == "finished"
    assert summary["final_accuracy"] == rounds[-1]["accuracy"]
    assert [entry["round"] for entry in summary["attacked"]] == [1, 2], "two images, attacked in two rounds"
    for entry in summary["attacked"]:
        own = [v["psnr"] for v in victims if v["round"] == entry["round"]]
        assert entry["plain"]["images"] == entry["plain"]["metrics"]["psnr"]["n"] == len(own) == 2
        assert entry["plain"]["metrics"]["psnr"]["mean"] == pytest.approx(sum(own) / 2)
    assert summary["metrics"] == summary["attacked"][-1]["plain"]["metrics"]
    for victim in victims:
        assert victim["psnr"] == pytest.approx(-10 * math.log10(victim["mse"]))
    assert sum(map(sum, undefended.json("partition.json")["counts"])) == 4000


def test_the_weights_of_the_run_are_those_it_trained(undefended: Run) -> None:
    values = load_file(undefended.path / "model.safetensors")
    assert values
    assert all(torch.isfinite(value).all() for value in values.values())


def test_the_second_time_nothing_is_computed(undefended: Run) -> None:
    before = stamps(undefended.path.parent)
    again = run("run", *TINY, "intercept.save=true", out=undefended.path.parent)
    assert again.status == 0
    assert again.path == undefended.path
    assert any("Finished already" in line for line in again.printed)
    assert stamps(undefended.path.parent) == before


def test_results_of_other_code_are_called_so(undefended: Run) -> None:
    path = undefended.path / "environment.json"
    written = path.read_text()
    path.write_text(json.dumps(json.loads(written) | {"code": "0" * 64}))
    again = run("run", *TINY, "intercept.save=true", out=undefended.path.parent)
    path.write_text(written)
    assert any("by another version of the code; overwrite=true" in line for line in again.printed)


def test_overwrite_runs_again_and_keeps_the_old(tmp_path) -> None:
    first = run("run", *UNATTACKED, out=tmp_path)
    before = stamps(tmp_path)
    second = run("run", *UNATTACKED, "overwrite=true", out=tmp_path)
    assert second.path == first.path
    kept = [path for path in tmp_path.glob("[!.]*") if path != second.path]
    assert [path.name for path in kept] == [f"{first.path.name}-previous-1"]
    assert (kept[0] / "metrics.jsonl").stat().st_mtime_ns == before[first.path / "metrics.jsonl"]
    assert second.records("round") == [
        {k: v for k, v in r.items() if "seconds" not in k} for r in read_run(kept[0]).of_kind("round")
    ]


def test_a_defended_run_is_compared_with_one_baseline(defended: Run) -> None:
    others = [path for path in defended.path.parent.glob("[!.]*") if path != defended.path]
    assert len(others) == 1
    assert others[0].name.startswith("baseline-")
    baseline = read_run(others[0])
    assert baseline.identity.undefended
    assert not baseline.of_kind("image")
    summary = defended.json("summary.json")
    assert summary["undefended_accuracy"] == baseline.summary.final_accuracy
    assert summary["pmm"] is not None


def test_the_next_defense_takes_the_same_baseline(defended: Run) -> None:
    out = defended.path.parent
    before = stamps(out)
    other = run("run", *UNATTACKED, "defense=dp_noise", out=out)
    assert other.status == 0
    assert other.json("summary.json")["undefended_accuracy"] == defended.json("summary.json")["undefended_accuracy"]
    after = stamps(out)
    assert after.keys() - before.keys() == {other.path / "metrics.jsonl"}
    assert {path: after[path] for path in before} == before


def test_without_baseline_there_is_no_comparison(tmp_path) -> None:
    alone = run("run", *UNATTACKED, "defense=pruning", "baseline=false", out=tmp_path)
    assert [alone.path] == list(tmp_path.glob("[!.]*"))
    assert alone.json("summary.json")["pmm"] is None


def test_another_seed_is_another_run(undefended: Run, tmp_path) -> None:
    other = run("run", *UNATTACKED, "seed=1", out=tmp_path)
    assert other.records("round")[0]["train_loss"] != undefended.records("round")[0]["train_loss"]


def test_the_report_can_be_written_again_elsewhere(undefended: Run, tmp_path) -> None:
    page = write_report([undefended.path], tmp_path / "page.html")
    assert page.read_text().count("<svg") >= 2
