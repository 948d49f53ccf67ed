"""What is attacked, when, and with what knowledge."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fl_privacy.data import Examples
from fl_privacy.errors import UserError
from fl_privacy.runs.attacker_knowledge import public_examples
from tests.experiment.runs import TINY, Run, run

ATTACK = ("attack.iterations=3",)


def test_training_updates_can_be_the_target(tmp_path) -> None:
    settings = (*TINY, "intercept.uploads=update", "intercept.rounds=last", "federation.plan.batch_size=3")
    attacked = run("run", *settings, "intercept.clients=[1]", out=tmp_path)
    victims = attacked.records("image")
    assert attacked.status == 0
    assert {victim["id"] for victim in victims} == {"round-2/client-1"}
    assert [victim["image"] for victim in victims] == [0, 1, 2]


def test_attacking_during_the_training_gives_the_same_scores(undefended: Run, tmp_path) -> None:
    during = run("run", *TINY, "intercept.when=during", out=tmp_path)
    assert during.records("image") == undefended.records("image")
    assert during.records("round") == undefended.records("round")
    kinds = [line.split('"kind": "')[1].split('"')[0] for line in (during.path / "metrics.jsonl").open()]
    assert kinds.index("attack") < len(kinds) - 1 - kinds[::-1].index("round")


def test_captures_are_for_their_owner_alone(undefended: Run) -> None:
    captures = undefended.path / "captures"
    paths = [captures, *captures.rglob("*")]
    assert sum(path.suffix == ".json" for path in paths) == 4
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_file()} == {0o600}


def test_what_was_captured_gives_the_scores_of_the_run(undefended: Run, tmp_path) -> None:
    later = run("attack", f"captured={undefended.path}", *ATTACK, out=tmp_path)
    assert later.status == 0
    assert_same_scores(later, undefended)


@pytest.mark.long
def test_captures_of_a_defended_run_are_attacked_as_the_run_did(tmp_path) -> None:
    settings = (*TINY, "defense=pruning", "baseline=false", "seed=3", "batch_size=2", "federation=fedavg")
    made = run("run", *settings, "federation.plan.steps=1", "federation.plan.epochs=null", "intercept.save=true",
               out=tmp_path)  # fmt: skip
    later = run("attack", f"captured={made.path}", *ATTACK, out=tmp_path)
    assert made.status == later.status == 0
    assert_same_scores(later, made)


def assert_same_scores(one: Run, other: Run) -> None:
    assert [score[:2] for score in one.scores()] == [score[:2] for score in other.scores()]
    assert [score[2] for score in one.scores()] == pytest.approx([score[2] for score in other.scores()], abs=1e-3)


@pytest.mark.long
def test_a_run_without_captures_says_how_to_get_them(defended: Run, tmp_path, capfd) -> None:
    assert run("attack", f"captured={defended.path}", *ATTACK, out=tmp_path).status == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert "intercept.save=true" in error[0]


def test_the_model_of_a_run_can_be_attacked(undefended: Run, tmp_path) -> None:
    fresh = run("attack", *ATTACK, "victims=2", out=tmp_path)
    trained = run("attack", *ATTACK, "victims=2", f"weights={undefended.path}", out=tmp_path)
    named = run("attack", *ATTACK, "victims=2", f"weights={undefended.path}/model.safetensors", out=tmp_path)
    assert fresh.path != trained.path
    assert fresh.scores() != trained.scores()
    assert named.scores() == trained.scores()
    assert "The model is as trained elsewhere." in trained.json("threat_model.json")


@pytest.mark.long
def test_a_training_goes_on_from_the_model_of_a_run(undefended: Run, tmp_path) -> None:
    settings = (*TINY, "federation.server_lr=1e-12", "intercept.save=true", f"weights={undefended.path}")
    further = run("run", *settings, out=tmp_path)
    expected, found = (load_file(made.path / "model.safetensors") for made in (undefended, further))
    assert all(torch.allclose(found[name], value, atol=1e-9) for name, value in expected.items())
    assert "The training starts at weights trained elsewhere." in further.json("threat_model.json")
    later = run("attack", f"captured={further.path}", *ATTACK, out=tmp_path)
    assert_same_scores(later, further)


@pytest.mark.long
@pytest.mark.parametrize("command", ["run", "attack"])
def test_what_the_attacker_is_told_is_in_the_threat_model(command: str, tmp_path: Path) -> None:
    settings = TINY if command == "run" else (*ATTACK, "victims=1")
    told = run(
        command,
        *settings,
        "defense=pruning",
        "baseline=false",
        "threat_model.knows_labels=true",
        "threat_model.knows_defense=true",
        out=tmp_path,
    )
    model = " ".join(told.json("threat_model.json"))
    assert told.status == 0
    assert "The attacker is given the true labels." in model
    assert "The attacker knows the defense and its settings" in model
    assert "rate=0.9" in model
    assert "nothing beyond" not in model
    assert all(victim["label_correct"] == 1 for victim in told.records("image"))
    assert {victim["label_source"] for victim in told.records("image")} == {"known"}
    assert told.json("summary.json")["label_sources"] == {"known": 1 if command == "attack" else 2}


def test_an_attacker_can_start_from_images_of_its_own(tmp_path: Path) -> None:
    held = run("attack", *ATTACK, "victims=1", "attack.start=public_mean", "threat_model.public_images=5", out=tmp_path)
    assert held.records("image")[0]["failure"] is None
    assert "The attacker holds 5 public images of the same domain, none attacked." in held.json("threat_model.json")
    without = run("attack", *ATTACK, "victims=1", "attack.start=public_mean", out=tmp_path)
    assert "public images" in without.records("image")[0]["failure"]


@pytest.mark.long
def test_an_attacker_can_start_from_what_it_made_of_an_earlier_round(tmp_path: Path) -> None:
    settings = (*TINY, "intercept.rounds=all", "attack.iterations=30", "victims=2")
    fresh = run("run", *settings, out=tmp_path)
    again = run("run", *settings, "attack.start=previous", out=tmp_path)
    assert any("its own guess" in line for line in again.json("threat_model.json"))
    losses = [{v["round"]: v["attack_loss"] for v in of.records("image") if v["client"] == 0} for of in (fresh, again)]
    assert losses[1][1] == losses[0][1]
    assert losses[1][2] < losses[0][2]


@pytest.mark.parametrize("count", [-1, 4])
def test_there_must_be_as_many_public_images(count: int) -> None:
    unattacked = Examples(torch.zeros(3, 1, 4, 4, dtype=torch.uint8), torch.zeros(3).long(), ("a",))
    assert public_examples(2, unattacked).inputs.shape == (2, 1, 4, 4)
    with pytest.raises(UserError, match=r"public_images is expected in 0\.\.3"):
        public_examples(count, unattacked)


def test_an_attacker_who_is_told_nothing_is_said_to_know_nothing(undefended: Run) -> None:
    assert "The attacker has no further knowledge of clients or their data." in undefended.json("threat_model.json")


@pytest.mark.long
@pytest.mark.parametrize("command", ["run", "attack"])
def test_an_attacker_that_knows_the_defense_attacks_beside_one_that_does_not(command: str, tmp_path: Path) -> None:
    settings = (*(TINY if command == "run" else (*ATTACK, "victims=2")), "defense=pruning", "baseline=false")
    plain = run(command, *settings, out=tmp_path / "plain")
    both = run(command, *settings, "threat_model=adaptive", out=tmp_path / "both")
    victims = both.records("image")
    assert [v for v in victims if v["attacker"] == "plain"] == plain.records("image")
    informed = [v for v in victims if v["attacker"] == "adaptive"]
    assert [(v["id"], v["image"]) for v in informed] == [(v["id"], v["image"]) for v in plain.records("image")]
    assert both.json("summary.json")["adaptive"]["metrics"]["psnr"]["n"] == 2
    assert len(informed) == (4 if command == "run" else 2)
    assert plain.json("summary.json")["adaptive"] is None
