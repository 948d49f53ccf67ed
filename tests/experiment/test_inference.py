"""Inference beside the training: what a run asks, records and says."""

import json

import pytest

from fl_privacy.attacks.inference import ReadRound
from fl_privacy.errors import UserError
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.folder import read_run
from fl_privacy.types import ModelState
from tests.experiment.runs import Run, run

ASKED = (
    "federation=fedavg",
    "federation.clients=3",
    "federation.rounds=2",
    "federation.plan.lr=0.02",
    "federation.plan.batch_size=8",
    "evaluate_every=2",
    "holdout=3850",
    "intercept.rounds=all",
    "inference=membership",
    "inference.membership.members=100",
    "inference.membership.others=120",
)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run("run", *ASKED, "attack=none", out=tmp_path_factory.mktemp("asked"))


def test_every_method_has_a_finding_with_its_baseline(asked: Run) -> None:
    assert asked.status == 0
    found = asked.records("inference")
    of_texts = {"min_k", "final_min_k"}
    asked_for = [name for name in compose_run(ASKED).inference["membership"]["methods"] if name not in of_texts]
    assert [f["method"] for f in found] == asked_for
    for finding in found:
        assert finding["failure"] is None and finding["rounds"] == finding["last_round"] == 2
        assert (finding["positives"], finding["negatives"]) == (100, 120)
        assert {"auc", "balanced_accuracy", "asr", "tpr_at_1_percent"} <= finding["measures"].keys()
        for value, low, high, chance, bound in finding["measures"].values():
            assert low <= value <= high and 0 < chance < 1 and bound is None
        assert finding["measures"]["asr"][3] == pytest.approx(120 / 220)
        assert finding["epsilon"] is None and finding["proven_epsilon"] >= 0
    assert asked.json("summary.json")["inferred"][0]["measures"]["auc"]["chance"] == 0.5
    assert "-membership-" in asked.path.name


@pytest.mark.long
def test_the_final_model_is_asked_with_reference_models(tmp_path) -> None:
    settings = ("inference=final_model", "inference.final_model.members=100", "inference.final_model.others=120")
    found = run("run", *ASKED[:-3], *settings, "attack=none", "baseline=false", out=tmp_path).records("inference")
    assert [f["method"] for f in found] == [
        "final_loss", "final_reference", "final_rmia", "final_lira", "final_stacked",
        "rounds_rmia", "rounds_lira", "rounds_stacked",
    ]  # fmt: skip
    for finding in found:
        assert finding["failure"] is None and (finding["positives"], finding["negatives"]) == (100, 120)
        assert finding["about"] == "membership" and finding["title"].endswith(("final model", "the first", "models"))
        assert not finding["notes"]


@pytest.mark.parametrize(
    "settings", [("federation.server_noise=5",), ("federation.server_noise=5", "intercept.rounds=first")]
)
def test_the_final_model_is_the_one_that_leaves_the_server(settings: tuple[str, ...], tmp_path, monkeypatch) -> None:
    """Not the mean of the uploads, without the server's noise."""
    asked, told = ("inference=membership", "inference.membership.methods=[final_loss]"), list[ModelState]()
    published = ReadRound.published.func  # type: ignore[attr-defined]
    monkeypatch.setattr(ReadRound, "published", property(lambda read: told.append(published(read)) or told[-1]))
    found = run("run", *ASKED, *asked, *settings, "attack=none", "baseline=false", out=tmp_path)
    (finding,), early = found.records("inference"), "intercept.rounds=first" in settings
    deviations = [float(t.std()) for n, t in told[-1].parameters.items() if t.dim() > 1]
    assert min(deviations) > 4 and len(told) == 1
    assert any("after round 1 of 2" in note for note in finding["notes"]) == early


@pytest.mark.parametrize(
    "settings",
    [
        ("federation.server_lr=0.5",),
        pytest.param(("federation.server_optimizer=momentum",), marks=pytest.mark.long),
        ("federation.server_lr=0.5", "intercept.clients=[0,1]"),
    ],
)
def test_captures_have_the_final_model_of_the_training_or_say_that_it_is_assumed(settings, tmp_path) -> None:
    methods = ("inference=membership", "inference.membership.methods=[final_loss]")
    kept = run("run", *ASKED, *methods, *settings, "attack=none", "baseline=false", "intercept.save=true", out=tmp_path)
    asked = (*ASKED, *methods, *settings, "attack=none")
    again = run("attack", f"captured={kept.path}", *asked, out=tmp_path / "again")
    (known,), (found,) = kept.records("inference"), again.records("inference")
    assumed = any("the server's own is not captured" in note for note in found["notes"])
    wrong = found["measures"]["auc"] != known["measures"]["auc"]
    assert assumed == wrong == (settings != ("federation.server_lr=0.5",))


def test_the_page_shows_them(asked: Run) -> None:
    page = (asked.path / "report.html").read_text()
    assert "Who took part" in page and "ROC curves on logarithmic axes" in page and "FedMIA" in page
    assert "Inference attacks use the training updates" in page and "0 extra batches" not in page


@pytest.mark.long
def test_training_is_the_same_and_so_is_the_backend(asked: Run, tmp_path) -> None:
    flower = run("run", *ASKED, "attack=none", "backend=flower", out=tmp_path)
    assert flower.records("inference") == asked.records("inference")
    plain = run("run", *ASKED[:-3], "attack=none", "inference=none", out=tmp_path)
    assert [r["train_loss"] for r in plain.records("round")] == [r["train_loss"] for r in asked.records("round")]


@pytest.mark.long
def test_beside_an_attack_and_with_a_budget(tmp_path) -> None:
    """Both read the same run; with differential privacy the bound stands beside every figure."""
    both = run(
        "run", *ASKED, "victims=1", "intercept.rounds=first", "attack=inverting_gradients", "attack.iterations=2",
        "defense=dp_sgd", "privacy.epsilon=1", "baseline=false", out=tmp_path,
    )  # fmt: skip
    assert both.status == 0
    assert len(both.records("image")) == 1
    for finding in both.records("inference"):
        assert finding["rounds"] == 1 and 0 < finding["epsilon"] < 1
        for name in ("auc", "tpr_at_1_percent", "balanced_accuracy"):
            _, low, _, chance, bound = finding["measures"][name]
            assert chance < bound < 1 and low <= bound
        assert finding["proven_epsilon"] <= finding["epsilon"]
    summary = read_run(both.path).summary
    assert summary.inferred[0].measures["auc"].bound is not None


@pytest.mark.long
@pytest.mark.parametrize("threat_model", ["honest_but_curious", "adaptive"])
def test_who_knows_the_defense_asks_for_attributes_as_well(threat_model: str, tmp_path) -> None:
    """It tries the defense on public examples, as a client of its own."""
    found = run(
        "run", "data=mnist_parity", "data.name=mnist_mini", "federation.clients=3", "federation.rounds=1", "victims=4",
        "attack=none", "intercept.rounds=first", "inference=attribute", "inference.attribute.public=40",
        "defense=pruning", "defense.rate=0.9", f"threat_model={threat_model}", "baseline=false", out=tmp_path,
    )  # fmt: skip
    assert found.status == 0
    findings = {finding["method"]: finding for finding in found.records("inference")}
    knows = threat_model == "adaptive"
    assert list(findings) == ["linear", "mlp", *(["linear_adaptive", "mlp_adaptive"] if knows else [])]
    assert all(f["failure"] is None and f["positives"] == 4 for f in findings.values())
    assert not knows or findings["mlp_adaptive"]["title"].endswith("knows the defense")
    settings = read_run(found.path).identity.config["inference"]["attribute"]
    assert settings.keys() == {"_target_", "methods", "public"}, "who knows what is a matter of threat_model alone"


@pytest.mark.parametrize(
    "settings, told",
    [
        (["inference=membrship"], "did you mean membership"),
        (["inference=[membership,sorce]"], "no option 'sorce'"),
        (["inference=membership", "inference.membership.member=3"], "did you mean members"),
        (["inference=membership", "inference.membership.members=x"], "whole number"),
        (["inference=membership", "inference.membership.methods=[lose]"], "methods is expected to be one of"),
        (["inference=membership", "inference.membership.members=4001"], "inference.membership.members is"),
        (["inference=source", "inference.source.members=4001"], "inference.source.members is"),
        (["inference=membership", "inference.membership.others=500", "holdout=100"], "raise holdout"),
        (["holdout=4000"], "below 4000"),
    ],
)  # fmt: skip
def test_wrong_settings_are_one_line(settings: list[str], told: str, tmp_path, capsys) -> None:
    failed = run("run", "attack=none", *settings, out=tmp_path)
    error = capsys.readouterr().err
    assert failed.status == 2 and told in " ".join(error.split()) and "Traceback" not in error


def test_several_are_chosen_at_once_and_their_settings_complete() -> None:
    config = compose_run(["inference=[none,membership]", "inference.membership.members=7"])
    assert config.choices["inference"] == "membership"
    assert config.inference["membership"]["members"] == 7 and config.inference["membership"]["others"] == 1000
    with pytest.raises(UserError, match="others"):
        compose_run(["inference=membership", "inference.membership.others=many"])


def test_the_record_is_read_back(asked: Run) -> None:
    found = read_run(asked.path).summary
    assert json.loads(json.dumps(found.as_json()["inferred"]))[0]["title"] == found.inferred[0].title
