"""Attackers that know the defense do better than those that do not, and nothing else changes."""

import logging
from dataclasses import replace

import pytest
import torch

from fl_privacy.attacks import GradientInversion
from fl_privacy.attacks.objectives import L1, Cosine, GaussianKernel
from fl_privacy.attacks.optimizers import LBFGS, Adam
from fl_privacy.attacks.priors import TotalVariation
from fl_privacy.defenses import (
    Defense,
    compose,
    dp_noise,
    dp_sgd,
    pruning,
    quantization,
    refiner,
    selective_sharing,
    soteria,
    soteria_mixing,
)
from fl_privacy.types import Batch, LocalPlan
from tests.attacks.defended import informed, smooth_images, victims
from tests.attacks.victims import error

BY_VALUE = GradientInversion(optimizer=LBFGS(), iterations=10, dtype="float64", labels="known", compile="off")
BY_ANGLE = GradientInversion(
    objective=Cosine(),
    optimizer=Adam(lr=0.1, sign="hard"),
    priors=(TotalVariation(weight=1e-3),),
    projection="clamp",
    iterations=100,
    dtype="float64",
    labels="known",
    compile="off",
)
COUNT = 2
HIDING = {
    "pruning": pruning(rate=0.8),
    "random pruning": pruning(rate=0.5, by="random"),
    "selective sharing": selective_sharing(share=0.2),
    "rounding": quantization(bits=2, rounding="nearest"),
    "signs": quantization(bits=1, rounding="nearest"),
    "stochastic rounding": quantization(bits=2),
    "soteria": soteria(rate=0.6),
    "two defenses": compose(soteria(rate=0.5), pruning(rate=0.5)),
    "clipping by layer": dp_noise(scale=1e-5, clip_norm=0.2, clip_scope="layer"),
}
RESIZING = {
    "clipping": dp_noise(scale=1e-5, clip_norm=0.5),
    "clipping each step": dp_noise(scale=1e-5, clip_norm=0.5, at="gradient"),
    "dp_sgd": dp_sgd(clip_norm=0.5, noise_multiplier=1e-4),
}
BLURRING = {
    "noise": dp_noise(scale=0.1),
    "soteria mixing": soteria_mixing(rate=0.5, noise_scale=0.1),
    "robust data": refiner(privacy="mse", epsilon=1.0),
}


def mean_error(attack, observations):
    """Of the guesses, clamped to [0, 1], at the victims of the last round."""
    found = attack(observations, seed=0)[-COUNT:]
    truth = smooth_images(COUNT)
    guesses = torch.cat([r.batch.inputs for r in found]).clamp(0, 1)
    return error(Batch(guesses, truth.labels), truth)


@pytest.mark.parametrize("name", [*HIDING, *RESIZING, *BLURRING])
def test_knowing_the_defense_helps(name):
    defense = (HIDING | RESIZING | BLURRING)[name]
    seen = victims(defense, count=COUNT)
    plain, adaptive = mean_error(BY_VALUE, seen), mean_error(BY_VALUE, informed(seen, defense))
    assert adaptive < (0.5 if name not in BLURRING else 0.9) * plain


@pytest.mark.parametrize("name", HIDING)
def test_knowing_the_defense_helps_those_who_match_angles(name):
    seen = victims(HIDING[name], count=COUNT)
    plain, adaptive = mean_error(BY_ANGLE, seen), mean_error(BY_ANGLE, informed(seen, HIDING[name]))
    assert adaptive < 0.5 * plain


@pytest.mark.parametrize("objective", [L1(), GaussianKernel()], ids=["L1", "kernel"])
def test_every_objective_looks_at_what_was_shared_only(objective):
    attack, defense = replace(BY_VALUE, objective=objective), pruning(rate=0.8)
    seen = victims(defense, count=COUNT)
    assert mean_error(attack, informed(seen, defense)) < 0.8 * mean_error(attack, seen)


@pytest.mark.parametrize("name, share", [("noise", 0.6), ("robust data", 0.8)])
def test_noise_averages_out_over_rounds(name, share):
    defense = BLURRING[name]
    seen = victims(defense, count=COUNT, rounds=4)
    alone, together = informed(seen[-COUNT:], defense), informed(seen, defense, rounds_known=True)
    assert mean_error(BY_VALUE, together) < share * mean_error(BY_VALUE, alone)


def test_the_updates_of_a_victim_get_one_reconstruction():
    defense = pruning(rate=0.5)
    attack = replace(BY_VALUE, iterations=2)
    seen = informed(victims(defense, count=COUNT, rounds=2), defense, rounds_known=True)
    found = attack(seen, seed=0)
    assert [r.id for r in found] == [o.id for o in seen]
    for k in range(COUNT):
        assert torch.equal(found[k].batch.inputs, found[k + COUNT].batch.inputs)
        assert "It matches the updates of several rounds from the same examples together." in found[k].countermeasures
    alone = attack([seen[1], seen[1 + COUNT]], seed=0)
    assert torch.allclose(alone[1].batch.inputs, found[1 + COUNT].batch.inputs, atol=1e-5)


def test_who_is_not_told_the_defense_does_not_join_rounds():
    seen = victims(pruning(rate=0.5), count=COUNT, rounds=2)
    named = [o.told(same_data=o.id.rpartition("/")[2]) for o in seen]
    attack = replace(BY_VALUE, iterations=2)
    for one, other in zip(attack(seen, seed=0), attack(named, seed=0), strict=True):
        assert torch.equal(one.batch.inputs, other.batch.inputs) and not other.countermeasures


def test_where_no_defense_is_known_nothing_changes(caplog):
    attack = replace(BY_VALUE, iterations=2)
    seen = victims(Defense(), count=COUNT)
    (plain, _), (told, _) = attack(seen, seed=0), attack(informed(seen, Defense()), seed=0)
    assert torch.equal(plain.batch.inputs, told.batch.inputs) and not told.countermeasures
    with caplog.at_level(logging.INFO):
        unknown = attack([o.told(defense={"mine.strength": 3}) for o in seen], seed=0)
    assert [record.message for record in caplog.records] == [
        "No measure is known against mine, which is attacked as if unknown."
    ]
    assert torch.equal(unknown[0].batch.inputs, plain.batch.inputs) and not unknown[0].countermeasures


def test_an_attacker_that_is_told_only_the_name_estimates_the_rest():
    defense = dp_noise(scale=1e-5, clip_norm=0.5)
    seen = victims(defense, count=COUNT)
    vague = [o.told(defense={"dp_noise.noise": "gaussian"}) for o in seen]
    assert mean_error(BY_VALUE, vague) < 0.5 * mean_error(BY_VALUE, seen)
    rounded = victims(quantization(bits=3, rounding="nearest"), count=COUNT)
    vague = [o.told(defense={"quantization.rounding": "nearest"}) for o in rounded]
    exact = informed(rounded, quantization(bits=3, rounding="nearest"))
    assert mean_error(BY_VALUE, vague) == pytest.approx(mean_error(BY_VALUE, exact), rel=0.1)


def test_deltas_and_weights_are_countered_like_gradients():
    plans = [LocalPlan(), LocalPlan(shares="delta", lr=0.5), LocalPlan(shares="weights", lr=0.5)]
    defense = pruning(rate=0.8)
    errors = []
    for plan in plans:
        seen = informed(victims(defense, count=COUNT, plan=plan), defense)
        errors.append(mean_error(BY_VALUE, seen))
    assert errors == pytest.approx([errors[0]] * 3, rel=0.5)
