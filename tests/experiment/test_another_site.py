"""Another site in place of the server: in runs, attacks, on pages and in questions."""

import html
import json
from dataclasses import replace
from pathlib import Path

import pytest

from fl_privacy.report.headline import headline_of
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.config.parse import LATER
from fl_privacy.runs.folder import read_run, verdict_of
from fl_privacy.runs.setup import build_untrained
from fl_privacy.runs.threat_model import describe_threats
from tests.experiment.runs import TINY, run

SITE = ("threat_model=another_site",)
UPDATES = (*TINY, "intercept.uploads=update", "federation.plan.batch_size=2", "intercept.rounds=last")


def test_of_two_sites_one_has_what_the_server_has_of_the_other(tmp_path: Path) -> None:
    settings = (*UPDATES, "intercept.clients=[0]")
    server, site = (run("run", *settings, *threats, out=tmp_path) for threats in ((), SITE))
    assert server.status == site.status == 0
    assert server.path != site.path
    assert [s[:2] for s in site.scores()] == [s[:2] for s in server.scores()]
    assert [s[2] for s in site.scores()] == pytest.approx([s[2] for s in server.scores()], abs=0.5)
    assert "subtract its own update from the change of the model." in site.json("threat_model.json")[0]


def test_a_sum_is_of_the_examples_of_all_other_sites(tmp_path: Path) -> None:
    made = run("run", *UPDATES, *SITE, "federation.clients=4", "threat_model.colluding_sites=2", out=tmp_path)
    assert made.status == 0
    assert [record["image"] for record in made.records("image")] == [0, 1, 2, 3]
    page = html.unescape((made.path / "report.html").read_text())
    assert "2 colluding sites" in page and "reconstruction from the client's upload" not in page
    assert "reconstruction from the others' mean update, which the attacker computed" in page
    assert (
        "from means of the training updates of 2 other sites, of 4 images in all"
        in headline_of(verdict_of(read_run(made.path))).text
    )


@pytest.mark.parametrize("masked", [(), ("secure_aggregation=secagg",)])
def test_an_attack_is_on_the_sum_of_the_others_masked_or_not(masked: tuple[str, ...], tmp_path: Path) -> None:
    settings = ("victims=1", "batch_size=2", "federation.clients=3", "attack.iterations=2")
    made = run("attack", *SITE, *settings, *masked, out=tmp_path)
    assert made.status == 0
    assert len(made.records("image")) == 4
    assert "the mean of the updates of 2 sites" in " ".join(made.json("threat_model.json"))
    assert "means over 2 other sites, of uploads computed" in (made.path / "report.html").read_text()


@pytest.mark.long
def test_rounds_of_different_participants_give_single_sites_updates(tmp_path: Path) -> None:
    rounds = ("federation.clients=3", "federation.fraction=.6", "federation.rounds=8", "evaluate_every=8")
    settings = (*UPDATES, *SITE, *rounds, "intercept.rounds=last", "threat_model.differences=true")
    made = run("run", *settings, "federation=fedsgd", out=tmp_path)
    assert made.status == 0
    assert {record["client"] for record in made.records("image")} == {0, 1}
    assert "single sites" in " ".join(made.json("threat_model.json"))


def test_a_mean_of_the_sites_that_take_part_is_no_single_update(tmp_path: Path) -> None:
    rounds = ("federation.clients=3", "federation.fraction=.6", "federation=fedsgd", "attack.iterations=1")
    made = run("run", *UPDATES, *SITE, *rounds, out=tmp_path)
    assert made.status == 0
    words = headline_of(verdict_of(read_run(made.path))).text
    assert "from means of the training updates of the other sites of a round, of " in words


def test_a_site_may_not_know_the_numbers_of_examples(tmp_path: Path) -> None:
    settings = (*UPDATES, *SITE, "federation.clients=3", "federation=fedsgd", "threat_model.knows_numbers=false")
    made = run("run", *settings, out=tmp_path)
    assert made.status == 0
    assert "Its share of the mean is estimated" in " ".join(made.json("threat_model.json"))
    assert "all numbers of examples" not in made.json("threat_model.json")[0]


def test_captures_of_a_site_give_the_scores_of_the_run(tmp_path: Path) -> None:
    made = run("run", *UPDATES, *SITE, "federation.clients=3", "intercept.save=true", out=tmp_path)
    later = run("attack", f"captured={made.path}", "attack.iterations=3", out=tmp_path)
    assert made.status == later.status == 0
    assert [s[2] for s in later.scores()] == pytest.approx([s[2] for s in made.scores()], abs=1e-3)


@pytest.mark.long
def test_a_client_that_the_server_excludes_is_not_behind_the_mean(tmp_path: Path) -> None:
    settings = ("federation.clients=5", "federation.norm_factor=1.001", "federation=fedsgd", "intercept.save=true")
    made = run("run", *UPDATES, *SITE, *settings, out=tmp_path)
    (record,) = [record for record in made.records("round") if record["round"] == 2]
    counted = [client for client in range(4) if str(client) not in record["excluded"]]
    assert 0 < len(counted) < 4
    assert len(made.records("image")) == 2 * len(counted)
    later = run("attack", f"captured={made.path}", "attack.iterations=3", out=tmp_path)
    assert later.status == 0
    assert [s[2] for s in later.scores()] == pytest.approx([s[2] for s in made.scores()], abs=1e-3)
    folder = run("attack", f"captured={made.path / 'captures'}", *UPDATES, *SITE, *settings, out=tmp_path)
    assert folder.status == 0 and len(folder.records("image")) == len(later.records("image"))


@pytest.mark.long
def test_captures_of_an_older_version_have_no_observer(tmp_path: Path) -> None:
    made = run("run", *UPDATES, "intercept.save=true", out=tmp_path)
    identity = made.json("run.json")
    for section, key in (key.split(".") for key in LATER if key.startswith(("federation.", "threat_model."))):
        del identity["config"][section][key]
    (made.path / "run.json").write_text(json.dumps(identity))
    (made.path / "config.yaml").write_text(json.dumps(identity["config"]))
    later = run("attack", f"captured={made.path}", "attack.iterations=3", out=tmp_path)
    assert later.status == 0
    assert [s[2] for s in later.scores()] == pytest.approx([s[2] for s in made.scores()], abs=1e-3)


@pytest.mark.long
def test_a_site_asks_who_was_at_the_other(tmp_path: Path) -> None:
    settings = (*TINY[:3], "attack=none", "inference=membership", "inference.membership.members=20")
    made = run("run", *settings, *SITE, "inference.membership.others=20", out=tmp_path)
    assert made.status == 0
    found = {record["method"]: record["failure"] for record in made.records("inference")}
    assert found["lira"] is found["gradient_norm"] is None
    assert "too few clients" in found["fedmia"]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (("run", *SITE), "intercept.uploads=update"),
        (("attack", *SITE, "federation.clients=1"), "federation.clients"),
        (("attack", *SITE, "threat_model.colluding_sites=10"), "colluding_sites"),
        (("attack", *SITE, "threat_model.differences=true"), "fl-privacy run"),
        (("attack", "threat_model.differences=true"), "threat_model=another_site"),
        (("attack", "threat_model.knows_numbers=false"), "threat_model=another_site"),
        (("run", *UPDATES, *SITE, "threat_model.differences=true", "federation.plan.shares=weights"), "shares=delta"),
        (("attack", "threat_model.observer=client"), "observer"),
        (("attack", *SITE, "server=inconsistent"), "server=honest"),
        (("run", *SITE, "server=trap_weights", "model=mlp", "intercept.uploads=update"), "server=honest"),
    ],
)
def test_what_a_site_cannot_do_ends_in_a_line(
    settings: tuple[str, ...], what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(*settings, out=tmp_path).status == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert what in error[0]


def test_a_poisoned_update_makes_the_next_model_the_crafted_one(tmp_path: Path) -> None:
    settings = ("data=mnist_mini", "model=mlp", "server=trap_weights", "server.fires=.1", "federation.clients=3")
    setup = build_untrained(compose_run([*SITE, *settings, "victims=1", "batch_size=2"]))
    crafts, masking, sent = setup.server_attack, setup.masking, setup.server.state
    assert crafts is not None and masking is not None
    aim = crafts.craft(setup.model, sent, 0)
    for rule in (masking, replace(masking, server=replace(masking.server, norm_factor=4.0))):
        made = rule.poisoned(setup.first, setup.states[0], sent, aim, round=0, probe=0)
        for name, value in aim.parameters.items():
            assert (
                float((made.parameters[name] - value).norm())
                < 0.1 * float((sent.parameters[name] - value).norm()) + 0.5
            )
    (observation,) = setup.observe(sent)
    assert observation.upload.num_examples == 4
    assert "Another site is active" in describe_threats(setup)[0]
