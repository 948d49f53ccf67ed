"""What the adaptive attacker is told, and what it can't make use of."""

from dataclasses import replace
from pathlib import Path

import pytest

from fl_privacy.defenses import Defense, ats, compose, dp_noise, instahide, pruning
from fl_privacy.effects import Part
from fl_privacy.runs.attacker_knowledge import data_names
from fl_privacy.types import LocalPlan, VictimId
from tests.experiment.runs import TINY, run
from tests.federation import harness

PROBED, TRAINED = VictimId(2, 1, 0), VictimId(2, 1)


def told(defense, observation, plan=harness.FEDSGD):
    return data_names(harness.clients(plan, defense))(observation)


@pytest.mark.parametrize("defense", [pruning(), dp_noise()], ids=["pruning", "noise"])
def test_rounds_of_the_same_examples_are_told(defense):
    assert told(defense, PROBED) == "client-1/victim-0"
    assert told(defense, TRAINED, LocalPlan()) == "client-1"
    assert told(defense, TRAINED, LocalPlan(batch_size=8)) is None


CHANGING = {"ats": ats(), "composed": compose(ats(), dp_noise()), "mixed": compose(instahide(), ats())}


@pytest.mark.parametrize("defense", CHANGING.values(), ids=CHANGING)
def test_rounds_are_not_joined_where_images_change(defense):
    assert defense.changes_images
    assert told(defense, PROBED) is None
    assert told(defense, TRAINED, LocalPlan()) is None


def test_rounds_of_mixtures_with_the_same_image_are_told():
    assert instahide().changes_images
    assert told(instahide(), PROBED) == "client-1/victim-0"
    assert told(instahide(), TRAINED, LocalPlan()) == "client-1"


@pytest.mark.parametrize(("batch_size", "joined"), [(8, True), (7, False)])
def test_what_is_trained_on_counts_not_what_it_was_made_of(batch_size, joined):
    """8 images stand for 12."""
    defense = replace(harness.DATA, data=(), parts=(Part("data", {"images": 8}),))
    plan = LocalPlan(batch_size=batch_size)
    assert (told(defense, TRAINED, plan) is not None) == joined


def undeclared() -> Defense:
    """Signs of the update, and nothing said of it."""
    return Defense(upload=(lambda tensors, state, rng: {name: t.sign() for name, t in tensors.items()},))


@pytest.mark.long
def test_no_adaptive_attacker_without_a_countermeasure_goes_unmentioned(tmp_path: Path) -> None:
    custom = f"defense._target_={__name__}.undeclared"
    attacked = run("attack", "defense=custom", custom, "threat_model=adaptive", *TINY[3:], out=tmp_path)
    told = " ".join(attacked.json("threat_model.json"))
    assert "Not tested: an attacker that makes use of what it knows of undeclared" in told
    pruned = run("attack", "defense=pruning", "threat_model=adaptive", *TINY[3:], out=tmp_path)
    assert "makes use of what it knows" not in " ".join(pruned.json("threat_model.json"))
