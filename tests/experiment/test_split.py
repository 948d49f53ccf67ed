"""Private layers, their attackers and secure aggregation through the command line."""

import pytest
import torch
from safetensors.torch import load_file

from tests.experiment.runs import TINY, UNATTACKED, Run, run

MODEL = ("model=lenet5", "federation=fedavg", "baseline=false")
MODEL += ("federation.plan.batch_size=200", "federation.plan.epochs=null", "federation.plan.steps=2")
INVERSION = ("attack=model_inversion", "attack.matching_iterations=3")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a training that shares everything unencrypted."""
    return run("run", *UNATTACKED, *MODEL, out=tmp_path_factory.mktemp("plain"))


@pytest.mark.long
def test_a_run_with_passports_is_attacked_with_a_colluding_client_s_layers(tmp_path) -> None:
    settings = (
        *TINY,
        *MODEL,
        *INVERSION,
        "victims=1",
        "threat_model=insider",
        "threat_model.knows_defense=false",
        "threat_model.features_at=features.2",
    )

    found = run(
        "run", *settings, "defense=fdl_pp", "threat_model.knows_defense=true", "intercept.save=true", out=tmp_path
    )

    assert found.status == 0
    victims = found.records("image")
    assert {v["client"] for v in victims} == {0}
    assert {v["attacker"] for v in victims} == {"plain", "adaptive"}
    assert all(v["failure"] is None and v["bpki"] >= 0 for v in victims)
    assert found.records("round")[-1]["accuracy"] is not None
    threats = " ".join(found.json("threat_model.json"))
    assert "Client 1 colludes" in threats
    assert "sees what enters features.2" in threats
    page = (found.path / "report.html").read_text()
    assert "jointly with the image" in page

    again = run("attack", f"captured={found.path}", "attack=dlg", "attack.iterations=2", out=tmp_path)

    assert again.status == 0
    assert all(v["failure"] is None for v in again.records("image"))


@pytest.mark.long
def test_features_are_shown_behind_the_activation_of_the_private_layers(tmp_path) -> None:
    settings = (*TINY, *MODEL, *INVERSION, "threat_model=insider", "defense=split_fed", "attack.iterations=2")

    found = run("run", *settings, "threat_model.features_at=activation", out=tmp_path)

    assert found.status == 0
    assert all(v["failure"] is None for v in found.records("image"))


@pytest.mark.long
def test_the_accuracy_of_private_layers_is_that_of_the_clients(plain, tmp_path) -> None:
    shared = run("run", *UNATTACKED, *MODEL, "defense=split_fed", "defense.private=[]", out=tmp_path)
    split = run("run", *UNATTACKED, *MODEL, "defense=split_fed", out=tmp_path)

    accuracy = [r.records("round")[-1]["accuracy"] for r in (shared, plain, split)]
    assert accuracy[0] == accuracy[1] != accuracy[2]


@pytest.mark.long
def test_victims_are_attacked_without_training_too(tmp_path) -> None:
    settings = ("victims=1", "model=lenet5", "defense=split_fed", *INVERSION, "attack.iterations=2")

    assert run("attack", *settings, "threat_model.colluder=1", out=tmp_path).records("image")[0]["failure"] is None
    alone = run("attack", *settings, out=tmp_path)
    assert "values of its own draw" in " ".join(alone.json("threat_model.json"))
    assert run("attack", *settings, "threat_model.colluder=0", out=tmp_path).status == 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["secagg", "ckks"])
def test_secure_aggregation_trains_like_the_plain_mean(plain, tmp_path, name) -> None:
    if name == "ckks":
        pytest.importorskip("tenseal", reason="the extra crypto is not installed")
    secure = run("run", *UNATTACKED, *MODEL, f"secure_aggregation={name}", out=tmp_path)

    assert secure.path.name != plain.path.name
    rounds = [r.records("round")[-1] for r in (plain, secure)]
    assert rounds[1]["accuracy"] == pytest.approx(rounds[0]["accuracy"], abs=0.01)
    expected, found = (load_file(r.path / "model.safetensors") for r in (plain, secure))
    for parameter, value in expected.items():
        torch.testing.assert_close(found[parameter], value, rtol=0, atol=1e-4)
    assert rounds[1]["upload_bytes"] > rounds[0]["upload_bytes"]
    refused = run("run", *TINY, f"secure_aggregation={name}", out=tmp_path)
    assert refused.status == 2


def test_the_sum_of_single_examples_is_attacked_as_the_batch_that_it_is(tmp_path) -> None:
    settings = ["victims=1", "batch_size=4", "data=mnist_mini", "model=mlp", "attack=exact", "seed=3"]
    summed, batch = (
        run("attack", *settings, f"secure_aggregation={name}", out=tmp_path) for name in ("secagg", "none")
    )
    psnr = [[image["psnr"] for image in one.records("image")] for one in (summed, batch)]
    assert len(psnr[0]) == 4 and "the sum of the updates" in " ".join(summed.json("threat_model.json"))
    assert psnr[0] != psnr[1]  # whole numbers of the protocol
    assert sum(value > 30 for value in psnr[0]) >= sum(value > 30 for value in psnr[1]) - 1


def test_secure_aggregation_is_refused_where_updates_are_read(tmp_path, capsys) -> None:
    attack = run("attack", "victims=1", *MODEL[:1], "secure_aggregation=ckks", out=tmp_path)

    assert attack.status == 2
    assert "The command attack needs every update" in capsys.readouterr().err
    alone = run("attack", "victims=1", *MODEL[:1], "secure_aggregation=secagg", out=tmp_path)
    assert alone.status == 2 and "at least 2, but got 1" in capsys.readouterr().err
    assert run("run", *UNATTACKED, "secure_aggregation.name=secag", out=tmp_path).status == 2
    assert "secure_aggregation.name is expected" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_is_behind_the_activation_is_shown_by_that_name(tmp_path) -> None:
    shown = ("threat_model.colluder=1", "threat_model.knows_features=true", "threat_model.features_at=activation")
    for defense in ("split_fed", "none"):
        settings = ("victims=1", "model=lenet5", f"defense={defense}", *INVERSION, "attack.iterations=2")
        assert run("attack", *settings, *shown, out=tmp_path).records("image")[0]["failure"] is None
