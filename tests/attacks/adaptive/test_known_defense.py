"""Attackers that know the defense do better than those that do not, and nothing else changes."""

import logging
from dataclasses import replace
from functools import cache

import pytest
import torch

from fl_privacy.attacks import GradientInversion
from fl_privacy.attacks.adaptive import AttackSetting, KnownDefense
from fl_privacy.attacks.gradient_inversion.objectives import L1, L2, Cosine, GaussianKernel
from fl_privacy.attacks.gradient_inversion.priors import TotalVariation
from fl_privacy.attacks.optimizers import LBFGS, Adam
from fl_privacy.defenses import (
    Defense,
    ats,
    compose,
    dp_noise,
    dp_sgd,
    none,
    pruning,
    quantization,
    refiner,
    selective_sharing,
    soteria,
    soteria_mixing,
    spn,
)
from fl_privacy.defenses._dp_noise import clip_by_norm
from fl_privacy.effects import Clipped, Gaussian, Part, Quantized, settings_in_words
from fl_privacy.models import LeNet
from fl_privacy.types import Batch, LocalPlan
from tests.attacks.defended import informed, protected, smooth_images, victims
from tests.attacks.victims import CLASSES, error, observe
from tests.selection import few

BY_VALUE = GradientInversion(optimizer=LBFGS(), iterations=4, dtype="float64", labels="known", compile="off")
BY_ANGLE = GradientInversion(
    objective=Cosine(),
    optimizer=Adam(lr=0.1, sign="hard"),
    priors=(TotalVariation(weight=1e-3),),
    projection="clamp",
    iterations=50,
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
    "noise on one layer": dp_noise(scale=1.0, layers=[1]),
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


def error_of(found):
    """Compare the guesses, clamped to [0, 1], with the images."""
    truth = smooth_images(COUNT)
    guesses = torch.cat([r.batch.inputs for r in found]).clamp(0, 1)
    return error(Batch(guesses, truth.labels), truth)


def mean_error(attack, observations):
    """Attack, and compare the guesses at the victims of the last round."""
    return error_of(attack(observations, seed=0)[-COUNT:])


@cache
def plain_errors(by_angle):
    """Errors by defense of the attacker that knows none: it attacks behind all of them in one program."""
    defenses = DEFENSES if not by_angle else {name: DEFENSES[name] for name in (*HIDING, *COMPOSED)}
    seen = [o for defense in defenses.values() for o in victims(defense, count=COUNT)]
    found = (BY_ANGLE if by_angle else BY_VALUE)([replace(o, model=seen[0].model) for o in seen], seed=0)
    return {name: error_of(found[COUNT * k : COUNT * (k + 1)]) for k, name in enumerate(defenses)}


@pytest.mark.parametrize("name", [*few(HIDING, 2, 5), *few(RESIZING, 1, 2), *few(BLURRING, 1, 2)])
def test_knowing_the_defense_helps(name):
    defense = DEFENSES[name]
    adaptive = mean_error(BY_VALUE, informed(victims(defense, count=COUNT), defense))
    assert adaptive < (0.5 if name not in BLURRING else 0.9) * plain_errors(False)[name]


@pytest.mark.parametrize("name", few(HIDING, 1, all_but_fuzz=2))
def test_knowing_the_defense_helps_those_who_match_angles(name):
    adaptive = mean_error(BY_ANGLE, informed(victims(HIDING[name], count=COUNT), HIDING[name]))
    assert adaptive < 0.5 * plain_errors(True)[name]


@pytest.mark.parametrize("objective", [L1(), GaussianKernel()], ids=["L1", "kernel"])
def test_every_objective_looks_at_what_was_shared_only(objective):
    attack, defense = replace(BY_VALUE, objective=objective), pruning(rate=0.8)
    seen = victims(defense, count=COUNT)
    assert mean_error(attack, informed(seen, defense)) < 0.8 * mean_error(attack, seen)


COMPOSED = {
    "pruned, then noised": (compose(pruning(rate=0.8), dp_noise(scale=1e-3)), 0.1),
    "noised, then pruned": (compose(dp_noise(scale=1e-3), pruning(rate=0.8)), 0.1),
    "muted, then noised": (compose(soteria(rate=0.6), dp_noise(scale=1e-3)), 0.1),
    "noised, then a few pruned": (compose(dp_noise(scale=0.1), pruning(rate=0.2)), 0.5),
    "noised, then rounded": (compose(dp_noise(scale=0.1), quantization(bits=8)), 0.5),
    "rounded, then noised": (compose(quantization(bits=8), dp_noise(scale=0.1)), 0.5),
    "coarsely rounded, then noised": (compose(quantization(bits=2, rounding="nearest"), dp_noise(scale=1e-3)), 0.5),
    "pruned, then clipped": (compose(pruning(rate=0.8), dp_noise(scale=1e-5, clip_norm=0.5)), 0.1),
    "clipped, then pruned": (compose(dp_noise(scale=1e-5, clip_norm=0.5), pruning(rate=0.8)), 0.1),
    "clipped twice": (compose(dp_noise(scale=1e-5, clip_norm=0.5), dp_noise(scale=1e-5, clip_norm=0.3)), 1.0),
    "robust data, then pruned": (compose(refiner(privacy="mse", epsilon=1.0), pruning(rate=0.8)), 0.5),
}
"""Defenses and the share of the plain attacker's error that is left to the adaptive one at most."""

DEFENSES = HIDING | RESIZING | BLURRING | {name: defense for name, (defense, _) in COMPOSED.items()}


def fares_better_behind_a_composition(name, *, by_angle):
    defense, share = COMPOSED[name]
    attack = BY_ANGLE if by_angle else BY_VALUE
    return mean_error(attack, informed(victims(defense, count=COUNT), defense)) < share * plain_errors(by_angle)[name]


@pytest.mark.parametrize("name", few(COMPOSED, 1, all_but_fuzz=4))
def test_one_part_of_a_defense_keeps_no_attacker_from_what_it_knows_of_another(name):
    assert fares_better_behind_a_composition(name, by_angle=False)


@pytest.mark.parametrize("name", few(COMPOSED, 1, all_but_fuzz=2))
def test_nor_one_that_matches_angles(name):
    assert fares_better_behind_a_composition(name, by_angle=True)


def test_a_defense_s_plain_error_is_that_of_an_attack_of_its_own():
    name = next(iter(HIDING))
    assert plain_errors(False)[name] == pytest.approx(
        mean_error(BY_VALUE, victims(DEFENSES[name], count=COUNT)), rel=1e-3
    )


@pytest.mark.long
@pytest.mark.parametrize("name, share", [("noise", 0.6), pytest.param("robust data", 0.8, marks=pytest.mark.fuzz)])
def test_noise_averages_out_over_rounds(name, share):
    defense = BLURRING[name]
    seen = victims(defense, count=COUNT, rounds=4)
    alone, together = informed(seen[-COUNT:], defense), informed(seen, defense, rounds_known=True)
    assert mean_error(BY_VALUE, together) < share * mean_error(BY_VALUE, alone)


WEAK = {"rounding": quantization(bits=14), "noise": dp_noise(scale=1e-9), "pruning": pruning(rate=0.01)}


@pytest.mark.fuzz
def test_knowing_a_weak_defense_does_not_hurt_where_gradients_hardly_depend_on_the_image():
    """A LeNet with sigmoids and PyTorch's initial values, whose gradient is nearly the same of a gray image."""
    picture = smooth_images(1)
    torch.manual_seed(0)
    model = LeNet(in_channels=2, image_size=8, num_classes=CLASSES, activation="sigmoid").double().eval()
    attack = replace(BY_VALUE, objective=L2(layers={"*": 1e6, "classifier*": 1e4}), labels="auto", iterations=20)
    seen = [protected(observe(model, picture), picture, defense) for defense in WEAK.values()]
    for one, plain, name in zip(seen, attack(seen, seed=0), WEAK, strict=True):
        (adaptive,) = attack(informed([one], WEAK[name]), seed=0)
        assert error(adaptive.batch, picture) < max(2e-3, 1.2 * error(plain.batch, picture)), name


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
    named = [o.given(same_data=o.id.source) for o in seen]
    attack = replace(BY_VALUE, iterations=2)
    for one, other in zip(attack(seen, seed=0), attack(named, seed=0), strict=True):
        assert torch.equal(one.batch.inputs, other.batch.inputs) and not other.countermeasures


def measures_against(defense):
    (seen,) = victims(none(), count=1)
    (knowing,) = informed([seen], defense)
    circumstances = AttackSetting(
        head="5.weight",
        batch_size=1,
        plan=seen.plan,
        unrolls=False,
        matched_per_uploaded=1.0,
        scales=True,
        complete=True,
        smooths=False,
        pixels=True,
        learnable=["5.weight", "3.weight"],
    )
    return KnownDefense.of(knowing, circumstances), seen


def test_the_guess_is_clipped_by_every_part_that_clips_in_order():
    found, seen = measures_against(compose(dp_sgd(clip_norm=2.0), dp_noise(clip_norm=0.5, clip_scope="layer")))
    clip = found.update_constraints([seen], lambda o: o.upload.tensors).clip
    gradients = {name: 10 + t[None].double() for name, t in seen.upload.tensors.items()}
    expected = {name: t[0] for name, t in gradients.items()}
    for norm, scope in ((2.0, "global"), (0.5, "layer")):
        expected = clip_by_norm(expected, norm, scope=scope)
    for name, tensor in clip.map(torch.Tensor.double)(gradients).items():
        torch.testing.assert_close(tensor[0], expected[name])


def test_two_defenses_of_a_name_are_told_apart():
    defense = compose(dp_noise(clip_norm=2.0), compose(pruning(rate=0.5), dp_noise(clip_norm=0.1)), dp_noise(scale=0.3))
    assert [part.name for part in defense.parts] == ["dp_noise", "pruning", "dp_noise", "dp_noise"]
    clips = [part.effect.clip for part in defense.parts if isinstance(part.effect, Gaussian)]
    assert clips == [Clipped(norm=2.0), Clipped(norm=0.1), None]
    assert "dp_noise#2.clip_norm=0.1" in settings_in_words(defense.parts)


def test_every_sequence_of_transformations_is_tried_or_it_says_which_are_not():
    one, other = ats(policies=["3-1-7", "43-18-18"]), ats(policies=["21-13-3"])
    alone = [len(measures_against(defense)[0].transforms) for defense in (one, other)]
    both, _ = measures_against(compose(one, other))
    assert len(both.transforms) == alone[0] * alone[1]
    images = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    first, second = (measures_against(defense)[0].transforms[0] for defense in (one, other))
    assert torch.equal(both.transforms[0](images), second(first(images)))
    many = ats(policies=[f"{a}-{b}-7" for a in range(20) for b in (3, 4)])
    found, _ = measures_against(compose(many, many))
    assert len(found.transforms) == len(measures_against(many)[0].transforms)
    assert any("leaves out that several defenses change the image" in sentence for sentence in found.sentences)


def test_the_strongest_private_head_is_guessed_and_others_are_named():
    found, _ = measures_against(compose(spn(alpha2=0.1), spn(alpha2=0.4)))
    assert found.hidden.strength == pytest.approx(0.4 * 8)
    assert not any("leaves out" in sentence for sentence in found.sentences)
    found, _ = measures_against(compose(spn(alpha2=0.1, layer="3"), spn(alpha2=0.4)))
    assert found.hidden.weight == "5.weight"
    assert any("leaves out what private heads send back elsewhere, before 3.weight" in s for s in found.sentences)


def test_where_no_defense_is_known_nothing_changes(caplog):
    attack = replace(BY_VALUE, iterations=2)
    seen = victims(Defense(), count=COUNT)
    (plain, _), (told, _) = attack(seen, seed=0), attack(informed(seen, Defense()), seed=0)
    assert torch.equal(plain.batch.inputs, told.batch.inputs) and not told.countermeasures
    with caplog.at_level(logging.INFO):
        unknown = attack([o.given(defense=(Part("mine", {"strength": 3}),)) for o in seen], seed=0)
    assert [record.message for record in caplog.records] == [
        "No countermeasure is known against mine, which is attacked as if unknown."
    ]
    assert torch.equal(unknown[0].batch.inputs, plain.batch.inputs) and not unknown[0].countermeasures


@pytest.mark.long
def test_an_attacker_that_is_told_only_the_name_estimates_the_rest():
    defense = dp_noise(scale=1e-5, clip_norm=0.5)
    seen = victims(defense, count=COUNT)
    vague = [o.given(defense=(Part("dp_noise", effect=Gaussian(std=None, clip=Clipped(norm=None))),)) for o in seen]
    assert mean_error(BY_VALUE, vague) < 0.5 * mean_error(BY_VALUE, seen)
    rounded = victims(quantization(bits=3, rounding="nearest"), count=COUNT)
    vague = [o.given(defense=(Part("quantization", effect=Quantized(bits=None, rounding="nearest")),)) for o in rounded]
    exact = informed(rounded, quantization(bits=3, rounding="nearest"))
    assert mean_error(BY_VALUE, vague) == pytest.approx(mean_error(BY_VALUE, exact), rel=0.1)


@pytest.mark.long
def test_deltas_and_weights_are_countered_like_gradients():
    plans = [LocalPlan(), LocalPlan(shares="delta", lr=0.5), LocalPlan(shares="weights", lr=0.5)]
    defense = pruning(rate=0.8)
    errors = []
    for plan in plans:
        seen = informed(victims(defense, count=COUNT, plan=plan), defense)
        errors.append(mean_error(BY_VALUE, seen))
    assert errors == pytest.approx([errors[0]] * 3, rel=0.5)
