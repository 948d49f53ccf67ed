"""The command that searches policies, and what reads its result."""

import json
import shutil
import sys

import pytest

from fl_privacy.cli.main import run_command_line
from fl_privacy.runs import policy_search as search
from fl_privacy.runs.build import data_and_clients
from fl_privacy.runs.config import compose_file, compose_run
from fl_privacy.runs.config.parse import read_section
from fl_privacy.runs.policy_search import SearchSettings, _folder_of

pytestmark = pytest.mark.usefixtures("undrawn_charts")

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


def test_the_authors_program_compares_policies_by_class_means(tmp_path):
    more = ["variant=code_normalized", "images_per_class=2", "accuracy_share=1", "keep=1", f"out={tmp_path}"]
    assert run_command_line([*TINY, *more]) == 0
    (folder,) = tmp_path.glob("[!.]*")
    records = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    means, variances = ([r[name] for r in records] for name in ("mean", "variance"))
    normalized = [
        0.7 * (mean - min(means)) / (max(means) - min(means))
        + 0.3 * (variance - min(variances)) / (max(variances) - min(variances))
        for mean, variance in zip(means, variances, strict=True)
    ]
    assert [r["privacy"] for r in records] == pytest.approx(
        [0.7 * m + 0.3 * v for m, v in zip(means, variances, strict=True)]
    )
    result = json.loads((folder / "policies.json").read_text())
    assert result["untransformed"]["privacy"] == pytest.approx(normalized[0])
    best = min((n, r["policy"]) for n, r in zip(normalized, records, strict=True) if r["altered"] >= 0.9)
    assert result["policies"] == [best[1]] and result["scores"][0]["privacy"] == pytest.approx(best[0])


def test_a_client_searches_on_its_own_images_alone(found, tmp_path, monkeypatch):
    seen = []

    class Watching(search.PolicyScorer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            seen.append(self._batch.inputs)

    monkeypatch.setattr(search, "PolicyScorer", Watching)
    own = ["partition=even_classes", "clients=40", "accuracy_share=1", "keep=1", f"out={tmp_path}"]
    for client in (3, 7):
        assert run_command_line([*TINY, *own, f"client={client}"]) == 0
    folders = {path.name.rpartition("-")[0]: path for path in tmp_path.glob("[!.]*")}
    assert set(folders) == {f"search-mnist_mini-lenet-client{client}" for client in (3, 7)}
    config = compose_run(["data.image_size=8", "partition=even_classes", "federation.clients=40"])
    _, clients = data_and_clients(config)
    for client, images in zip((3, 7), seen, strict=True):
        held = clients[client].examples.batch(clients[client].indices).inputs
        assert len(images) == 10 and all((image == held).flatten(1).all(1).any() for image in images)
    scores = [(folder / "scores.jsonl").read_text() for folder in folders.values()]
    assert scores[0] != scores[1]
    assert "images of client 3 of 40 alone" in (folders["search-mnist_mini-lenet-client3"] / "search.html").read_text()
    assert "client" not in found.name


def test_the_partition_is_another_search_for_a_client_alone():
    searches = [[], ["clients=4"], ["partition=dirichlet"], ["client=1"], ["client=1", "clients=4"]]
    searches.append(["client=1", "partition=dirichlet"])
    names = [_folder_of(read_section(SearchSettings, compose_file("policy_search", more))).name for more in searches]
    assert names[0] == names[1] == names[2] == "search-mnist_mini-lenet-fab1b361" and len(set(names)) == 4


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
    assert "pip install 'piq'" in capfd.readouterr().err
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
        (["variant=best"], "code_normalized"),
        (["client=10"], "client is expected to be a whole number from 0 to 9, but got 10; raise clients"),
        (["client=-1"], "from 0 to 9"),
        (["clients=0"], "clients"),
        (["client=0", "partition.alpha=1"], "partition.alpha"),
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
