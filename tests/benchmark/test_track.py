"""A track fixes what is measured, and says in a line what it lacks."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml
from markupsafe import escape

from fl_privacy.cli.jobs import run_job
from fl_privacy.errors import UserError
from fl_privacy.runs.config import compose_run, options, study
from fl_privacy.runs.config.study import UNDEFENDED, load_track, names_in
from fl_privacy.runs.run_location import Monitor
from fl_privacy.runs.study import plan_study
from tests.benchmark.tracks import TINY, write_track

ROOT = Path(__file__).parents[2]
TRACKS, BOARDS = ROOT / "fl_privacy" / "tracks", ROOT / "docs" / "benchmarks"


@cache
def chosen(overrides: tuple[str, ...]) -> str:
    return str(compose_run(overrides).choices["defense"])


@pytest.mark.parametrize("name", names_in(TRACKS))
def test_a_shipped_track_has_every_defense_or_says_why_not(name: str) -> None:
    track = load_track(name)
    used = {chosen(point.overrides) for point in {point.family: point for point in reversed(track.points)}.values()}
    assert used | set(track.left_out) == set(options("defense")) - {"custom"}
    assert not used & set(track.left_out)
    assert track.accuracy_loss == (1, 5, 10)


def test_a_new_defense_is_named_by_shipped_tracks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "defense").mkdir()
    for name in ("none", "custom", "pruning", "brand_new"):
        (tmp_path / "defense" / f"{name}.yaml").write_text("# New.\n")
    new = "not measured in this track"
    written = {each: why for each, why in load_track("smoke").left_out.items() if why != new}
    monkeypatch.setattr(study, "CONFIG_DIR", tmp_path)
    assert load_track("smoke").left_out == written | {"brand_new": new}
    assert "brand_new" not in load_track(write_track(tmp_path)).left_out


@pytest.mark.parametrize("name", names_in(TRACKS))
def test_a_shipped_track_attacks_in_every_way(name: str) -> None:
    track = load_track(name)
    assert {cell.state for cell in track.cells} == {"untrained", "early", "trained"}
    of_images = "data=adult" not in track.settings  # malicious servers refuse tables
    assert any(cell.server for cell in track.cells) == of_images
    assert {kind.training for kind in track.uploads.values()} == set(track.trainings)
    for cell in track.cells[:: max(1, len(track.cells) // 4)]:
        attacked = compose_run(track.attacking(track.points[0], cell))
        assert attacked.choices["attack"] == "auto" and attacked.threat_model.knows_defense
        assert (attacked.choices["server"] == "honest") == (cell.server == "")
        assert attacked.federation.plan["shares"] == ("delta" if "FedAvg" in cell.uploads else "gradient")


@pytest.mark.parametrize("name", [name for name in names_in(TRACKS) if name != "smoke"])
def test_the_jobs_of_a_shipped_track_are_composed(name: str) -> None:
    track = load_track(name)
    of_refiner = [point for point in track.points if "defense=refiner" in point.overrides][:1]
    planned = plan_study(replace(track, points=(*track.points[:1], *of_refiner)))
    jobs = [job for point in planned.points[1:] for job in point.trainings.values()]
    files = {str(job.config.defense["evaluator"]) for job in jobs}
    assert set(map(str, planned.evaluators)) <= files, "Refiner looks with the networks that the track trains"


@pytest.mark.parametrize(
    "name", [n for n in names_in(TRACKS) if "\nevaluators:\n" in (TRACKS / f"{n}.yaml").read_text()]
)
def test_networks_that_a_defense_looks_with_have_not_seen_the_victims(name: str) -> None:
    track = load_track(name)
    for training, recipe in track.evaluators.items():
        made = dict(override.split("=", 1) for override in recipe)
        for cell in (cell for cell in track.cells if track.uploads[cell.uploads].training == training):
            attacked = compose_run(track.attacking(track.points[0], cell))
            assert (attacked.choices["data"], attacked.split) != (made["data"], made.get("split", "train"))


def test_cells_are_uploads_by_states_by_servers(tmp_path: Path) -> None:
    track = load_track(write_track(tmp_path), ["device=cpu", "attack.shards=2"])
    assert [cell.title for cell in track.cells] == [
        "one image, untrained",
        "one image, early",
        "one image, trained, imprint",
    ]
    assert [point.family for point in track.points] == [UNDEFENDED, "Pruning", "Pruning"]
    whole = compose_run(track.training(track.points[1], "FedSGD"))
    assert whole.federation.rounds == 2
    assert whole.device == "cpu" and whole.choices["attack"] == "none"
    assert compose_run(track.attacking(track.points[1], track.cells[0])).attack["shards"] == 2
    assert track.sha256 == load_track(write_track(tmp_path)).sha256
    assert track.sha256 != load_track(write_track(tmp_path, TINY.replace("0.99", "0.9"))).sha256
    other_words = TINY.replace("A tiny one.", "In other words.").replace("for the test", "for another reason")
    assert track.sha256 == load_track(write_track(tmp_path, other_words)).sha256 and other_words != TINY


def test_an_early_state_is_one_that_the_training_reaches(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="early is expected to be a round of each training, but is 3 of 2"):
        plan_study(load_track(write_track(tmp_path, TINY.replace("early: 1", "early: 3")), [f"out={tmp_path}"]))


def test_one_training_is_for_both_states_of_its_model(tmp_path: Path) -> None:
    text = TINY.replace("uploads:", "  FedAvg: [federation=fedavg, federation.rounds=1]\nuploads:")
    plan = plan_study(load_track(write_track(tmp_path, text), [f"out={tmp_path}"]))
    trainings, attacks = plan.stages()
    names = [job.config.choices["federation"] for job in trainings]
    assert names == ["fedsgd"] * 3 + ["fedavg"] * 3, "the trainings of a client's substitute examples are far apart"
    job, early = trainings[0], trainings[0].config.changed({"federation.rounds": 1, "evaluate_every": 1})
    run_job("run", job.config, Monitor(), early=job.early)
    kept = job.folder / "model-1.safetensors"
    assert kept.read_bytes() == (run_job("run", early, Monitor()) / "model.safetensors").read_bytes()
    assert str(kept) in {attack.config.weights for attack in attacks} and job.finished
    kept.unlink()
    again = plan_study(plan.study).points[0].trainings["FedSGD"]
    assert not again.finished and again.config.overwrite, "a run of an earlier version lacks it"


@pytest.mark.parametrize("board", sorted(BOARDS.glob("*.json")), ids=lambda board: board.stem)
def test_a_kept_board_is_of_its_track_as_it_is(board: Path) -> None:
    own = ROOT / "experiments" / board.with_suffix(".yaml").name
    track, kept = load_track(own if own.exists() else board.stem), json.loads(board.read_text())["track"]
    assert kept == {"name": track.name, "version": track.version, "sha256": track.sha256}
    page = board.with_suffix(".html").read_text()
    assert track.sha256 in page and str(escape(track.about)) in page


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TINY + "defences: {}", "did you mean defenses"),
        (TINY.replace("version: 3", "version: x"), "version in the track"),
        (TINY.replace("states: [untrained, early]", "states: [old]"), "untrained, early, trained"),
        (TINY.replace("training: FedSGD", "training: FedSDG"), "did you mean FedSGD"),
        (TINY.replace("server_states: [trained]", ""), "server_states in uploads.one image"),
        (TINY.replace("evaluators: {}", "evaluators: {x: [data=mnist_mini]}"), "evaluators of the track"),
        (TINY.replace("[attack=inverting_gradients,", "[attack=custom, attack._target_=os.system,"), "os.system"),
        (TINY.replace("defense.rate=0.5,0.99", "seed=0,1', 'defense.rate=0.1,0.2").replace('"', "'"), "One key"),
        ("[1, 2]", "list"),
    ],
)
def test_a_wrong_track_is_one_line(tmp_path: Path, text: str, expected: str) -> None:
    assert text != TINY, "nothing was replaced"
    with pytest.raises(UserError, match=expected) as error:
        load_track(write_track(tmp_path, text))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("ranks", "track"), [("first_ranks", "smoke"), ("laptop_first_ranks", "laptop")])
def test_first_ranks_are_measured_again_as_their_track_measures_them_by_more_victims(ranks: str, track: str) -> None:
    file = ROOT / "experiments" / f"{ranks}.yaml"
    again, whole = yaml.safe_load(file.read_text()), yaml.safe_load((TRACKS / f"{track}.yaml").read_text())
    assert all(again[name] == whole[name] for name in ("attack", "early", "accuracy_loss"))
    assert again["settings"] == [setting.replace(f"_{track}", f"_{ranks}") for setting in whole["settings"]]
    assert again["trainings"].items() <= whole["trainings"].items()
    for name, kind in again["uploads"].items():
        first = whole["uploads"][name]
        victims, *rest = kind["attack"]
        assert [victims, *rest] == first["attack"] or (victims, rest) == ("victims=24", first["attack"][1:])
        assert kind["servers"] == first["servers"] and set(kind["states"]) <= set(first["states"])
    board = json.loads((BOARDS / f"{track}.json").read_text())["ranked"]
    leading = [place["overrides"] for place in board if place["overrides"] != ["defense=none"]][:5]
    measured = [point.overrides for point in load_track(file).points if point.family != UNDEFENDED]
    assert {frozenset(map(_as_number, own)) for own in measured} == {frozenset(map(_as_number, own)) for own in leading}


def _as_number(override: str) -> tuple[str, object]:
    key, _, value = override.partition("=")
    return key, yaml.safe_load(value.replace("e-", ".0e-"))


def test_what_a_track_fixes_is_not_changed(tmp_path: Path) -> None:
    path = write_track(tmp_path)
    for override in ("victims=3", "federation.rounds=9", "seed=1", "defense=none", "attack.evaluations=5"):
        with pytest.raises(UserError, match="fixes"):
            load_track(path, [override])
    with pytest.raises(UserError, match="full, laptop, smoke"):
        load_track("smok")
