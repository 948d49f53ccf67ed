"""The head of a page says what was attacked and what was not."""

import re
from dataclasses import replace

import pytest

from fl_privacy.report import write_report, write_trade_off
from fl_privacy.report.headline import headline_of
from fl_privacy.report.run_page import said_together, uploads_of, what_was_done
from fl_privacy.runs.folder import RunFolder, read_run, verdict_of
from tests.report import kinds
from tests.results.runs import config, defended, record, round_report, score, study_entry

FEDSGD = {"shares": "gradient", "batch_size": 128, "batch_norm": "train"}
FEDAVG = {"shares": "delta", "batch_size": 32, "epochs": 2, "steps": None, "batch_norm": "eval"}


def settings(plan, *, uploads="probe", batch_size=1, **changes):
    federation = {"clients": 2, "rounds": 12, "plan": plan}
    return {"federation": federation, "intercept": {"uploads": uploads}, "batch_size": batch_size} | changes


def trained(out, sizes=(300, 400), **options):
    undefended = options.pop("undefended", True)
    with RunFolder.open_or_create(
        out, label="x", config=config(**settings(**options)), config_text="", undefended=undefended
    ) as folder:
        folder.write_partition([[size] for size in sizes], ["only"])
        folder.add_round(round_report(clients=[0, 1]))
        folder.add_victim(score(1, 0, noise=0.1))
        folder.finish()
    return read_run(folder.path)


@pytest.mark.parametrize(("kind", "title"), [(kinds.attack, "Not trained in this run"), (kinds.texts, "Round 1")])
def test_the_bar_of_an_attack_without_training_names_no_round(tmp_path, kind, title):
    page = write_report([kind(tmp_path)]).read_text()
    found = re.findall(r'<li class="bar">.*?</li>', page, re.DOTALL)
    assert len(found) == 1 and title in found[0]
    assert "Round 0" not in page


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"plan": FEDSGD},
            "The attack targets uploads computed from one image each, the worst case; the training batches of 128 were"
            " not attacked.",
        ),
        (
            {"plan": FEDSGD, "batch_size": 4, "sizes": (50, 400)},
            "The attack targets uploads computed from 4 images each; the training batches of 50 to 128 were not"
            " attacked.",
        ),
        (
            {"plan": FEDAVG},
            "The attack targets uploads computed from one image each, the worst case; the training updates, each of 2"
            " epochs over the 300 to 400 images of a client in batches of 32, were not attacked.",
        ),
        (
            {"plan": FEDSGD, "uploads": "update", "sizes": (400, 400)},
            "The attack targets the training updates themselves, each the gradient of 128 images.",
        ),
        (
            {"plan": FEDAVG | {"steps": 1, "epochs": None}, "uploads": "update"},
            "The attack targets the training updates themselves, each of 1 local step on batches of 32 images.",
        ),
    ],
)
def test_the_decisive_assumption_is_said(tmp_path, options, expected):
    run = trained(tmp_path, **options)
    assert uploads_of(run) == expected
    assert expected in write_report([run.path]).read_text()


def test_frozen_parameters_are_named_since_they_are_not_uploaded(tmp_path):
    frozen = trained(tmp_path / "a", plan=FEDSGD | {"frozen": ["words.weight", "positions.weight"]})
    assert "undefended, with words.weight and positions.weight frozen" in what_was_done(frozen)
    assert "frozen" not in what_was_done(trained(tmp_path / "b", plan=FEDSGD | {"frozen": []}))


def test_pages_of_many_runs_say_it_too(tmp_path):
    single = trained(tmp_path, plan=FEDSGD)
    batch = trained(tmp_path, plan=FEDSGD, batch_size=4)
    said = (
        "he attack targets uploads computed from one image each, the worst case; the training batches of 128 were not"
    )
    assert f"T{said}" in write_report([single.path, trained(tmp_path, plan=FEDSGD, seed=1).path]).read_text()
    text = write_report([single.path, batch.path]).read_text()
    assert f"A: t{said}" in text and "B: the attack targets uploads computed from 4 images each" in text
    outcome = study_entry("Undefended", "", single.path, {"DLG": single.path})
    assert f"T{said}" in write_trade_off([outcome], tmp_path / "trade_off.html").read_text()
    assert said_together([("a", "It is."), ("b", "It is."), ("c", "")]) == "It is."


def test_a_defense_that_met_no_adaptive_attacker_says_so(tmp_path):
    def basis(run):
        return headline_of(verdict_of(replace(run, defenses=("dp_noise",)))).basis

    text = basis(trained(tmp_path, plan=FEDSGD, undefended=False, **defended(scale=0.1)))
    assert "No attacker knew the defense; one that does may reconstruct more (threat_model=adaptive)." in text
    both = record(tmp_path, label="both", changes=settings(FEDSGD), adaptive=0.1)
    assert "No attacker knew" not in basis(read_run(both))


def test_custom_parts_go_by_their_own_names(tmp_path):
    custom = {
        "defense": {"_target_": "our.code.shiver"},
        "model": {"_target_": "our.code.Net"},
        "choices": {"defense": "custom", "model": "custom", "attack": "inverting_gradients"},
    }
    text = write_report([trained(tmp_path, plan=FEDSGD, undefended=False, **custom).path]).read_text()
    assert "Net on cifar10" in text and "defended by shiver" in text
    assert "custom" not in re.search(r'<p class="lede">.*?</p>', text, re.DOTALL)[0]


@pytest.mark.parametrize(
    ("option", "name", "said"),
    [
        ("cifar100", "cifar100_samples", "on cifar100_samples,"),
        ("cifar10_animals", "cifar10", "on cifar10_animals,"),
        ("cifar10", "cifar10", "on cifar10,"),
    ],
)
def test_data_that_replace_the_option_are_named(tmp_path, option, name, said):
    choices = {"data": option, "defense": "none", "attack": "dlg", "backend": "loop"}
    assert said in what_was_done(trained(tmp_path, plan=FEDSGD, data={"name": name}, choices=choices))
