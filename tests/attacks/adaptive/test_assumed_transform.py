"""An attacker that knows the transformation policies looks for the original through them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fl_privacy.attacks import GradientInversion
from fl_privacy.attacks.adaptive.constraints import AssumedTransform, choose_transforms, outcomes
from fl_privacy.attacks.gradient_inversion.grouping import group_victims, victims_of
from fl_privacy.attacks.gradient_inversion.preparation import prepare
from fl_privacy.attacks.gradient_inversion.priors import GroupConsistency
from fl_privacy.attacks.optimizers import LBFGS
from fl_privacy.data.transformations import Policy, apply_policy
from fl_privacy.defenses import ClientState, ats, compose, dp_noise
from fl_privacy.effects import Part, Transformed
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, VictimId
from tests.attacks.victims import observe

ATTACK = GradientInversion(optimizer=LBFGS(), iterations=6, dtype="float64", labels="known", compile="off")


def network():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.Sigmoid(), nn.Conv2d(12, 12, 3, 2, padding=1), nn.Sigmoid(), nn.Flatten(),
        nn.Linear(192, 5),
    )  # fmt: skip
    for parameter in net.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return net.double()


def originals(count):
    coarse = torch.rand((count, 3, 3, 3), generator=derive_generator(0, "images"))
    images = 0.1 + 0.5 * F.interpolate(coarse, size=8, mode="bilinear", align_corners=True)
    return (images * 255).round().double() / 255


def victims(defense, count=2):
    truth, net, seen = originals(count), network(), []
    (hook,) = defense.data
    for k in range(count):
        batch = hook(Batch(truth[k : k + 1], torch.tensor([k])), ClientState(), derive_generator(k))
        seen.append(observe(net, batch, id=VictimId(0, 0, k), told=True))
    return truth, seen


def mean_error(found, truth):
    return float((torch.cat([r.batch.inputs for r in found]).double() - truth).square().mean())


@pytest.mark.long
@pytest.mark.parametrize("policies", [["0"], ["6-0"], ["7-47", "0"]], ids=str)
def test_the_original_is_found_where_transformations_can_be_undone(policies):
    defense = ats(policies=policies)
    truth, seen = victims(defense)
    plain = ATTACK(seen, seed=0)
    adaptive = ATTACK([o.given(defense=defense.parts) for o in seen], seed=0)
    assert mean_error(adaptive, truth) < 0.02 * mean_error(plain, truth)
    number = len(outcomes(policies))
    assert f"each of the {number} transformations" in " ".join(adaptive[0].countermeasures)
    assert not plain[0].countermeasures


def test_it_works_beside_other_defenses():
    defense = compose(ats(policies="0"), dp_noise(scale=0.0))
    truth, seen = victims(defense)
    adaptive = ATTACK([o.given(defense=defense.parts) for o in seen], seed=0)
    assert mean_error(adaptive, truth) < 0.02


def test_every_outcome_once():
    assert len(outcomes(["3-43-15"])) == 8
    assert len(outcomes(["9", "0-9", "9"])) == 2
    assert len(outcomes(["3-9"], by_probability=True)) == 1 + 2 + 1 + 2


def test_outcomes_are_what_a_client_draws():
    images, policies = originals(6).float(), ["3-15", "43"]
    possible = torch.stack([change(images) for change in outcomes(policies)])
    (hook,) = ats(policies=policies).data
    drawn = hook(Batch(images, torch.zeros(6)), ClientState(), derive_generator(5)).inputs
    distance = (possible - drawn).abs().amax((2, 3, 4)).amin(0)
    assert distance.max() < 1.5 / 255


def test_each_image_goes_through_its_own_change_and_keeps_its_slope():
    transforms = outcomes(["0", "13"])
    images = originals(6).reshape(2, 3, 3, 8, 8).requires_grad_()
    transform = AssumedTransform(transforms, torch.tensor([[0, 2, 1], [2, 0, 2]]))
    found = transform(images)
    for v in range(2):
        for b in range(3):
            expected = transforms[int(transform.chosen[v, b])](images[v, b][None])[0]
            assert torch.equal(found[v, b], expected)
    (slope,) = torch.autograd.grad(found[0, 0].sum(), images)
    assert torch.equal(slope[0, 0], -torch.ones(3, 8, 8).double())
    assert slope[1].abs().sum() == 0
    assert torch.equal(transform.map(lambda rows: rows[1:])(images[1:]), found[1:])


def test_attempts_at_one_image_try_all_and_those_at_a_batch_draw():
    tried = [int(choose_transforms(5, restart, 1, derive_generator(restart))) for restart in range(10)]
    assert tried == [*range(5), *range(5)]
    drawn = choose_transforms(5, 0, 200, derive_generator(0))
    assert set(drawn.tolist()) == set(range(5))


def test_no_policy_known_is_no_measure():
    _, seen = victims(ats(policies="0"), count=1)
    (found,) = replace(ATTACK, iterations=2)(
        [seen[0].given(defense=(Part("ats", effect=Transformed(policies=None)),))], seed=0
    )
    assert not found.countermeasures


def test_a_change_is_the_policy_itself():
    images = originals(2)
    policy = Policy.parse("3-13")
    found = {tuple(change(images).flatten().tolist()) for change in outcomes(["3-13"])}
    for signs in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
        assert tuple(apply_policy(images, policy, signs).flatten().tolist()) in found


def prepared(attack, observations):
    (group,) = group_victims(victims_of(list(enumerate(observations))))
    return prepare(attack, group, 0)


def test_attempts_through_transformations_are_bounded_and_each_gets_one():
    _, seen = victims(ats(policies="3-43-15"), count=1)
    told = [seen[0].given(defense=(Part("ats", effect=Transformed(policies=("3-43-15",))),))]  # eight outcomes
    many = (Part("ats", effect=Transformed(policies=tuple(f"{a}-43-15" for a in range(50)))),)

    assert prepared(replace(ATTACK, restarts=4), told).restarts == 32
    capped = prepared(replace(ATTACK, restarts=100), told)
    assert capped.restarts == 128
    assert "Each transformation gets 16 of the 100 attempts asked for." in capped.countermeasures
    number = len(outcomes(many[0].effect.policies))
    assert prepared(replace(ATTACK, restarts=100), [seen[0].given(defense=many)]).restarts == number > 128


def test_attempts_that_look_at_each_other_go_through_the_same_transformation():
    _, seen = victims(ats(policies="3"), count=1)
    found = prepared(
        replace(ATTACK, restarts=3, priors=(GroupConsistency(),)),
        [
            seen[0].given(
                defense=(
                    Part(
                        "ats",
                        effect=Transformed(
                            policies=(
                                "3",
                                "0",
                            )
                        ),
                    ),
                )
            )
        ],
    )
    assert (found.restarts, found.attempts_together) == (9, 3)
    problem = found.problem(found.victims * 9, range(9), found.attempts_together)
    assert problem.constraints.transform.chosen.flatten().tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_it_says_that_it_can_not_be_compiled():
    _, seen = victims(ats(policies="0"), count=1)
    told = seen[0].given(defense=(Part("ats", effect=Transformed(policies=("0",))),))
    with pytest.warns(UserWarning, match="goes on without being compiled: its guesses go through transformations"):
        replace(ATTACK, compile="on", iterations=2)([told], seed=0)


def test_priors_look_at_the_original_and_batch_statistics_at_what_the_model_sees():
    guesses = []

    def watching(guess):
        guesses.append((guess.images, guess.batch_statistics()))
        return guess.images.new_zeros(len(guess.images))

    _, seen = victims(ats(policies="0"), count=1)
    net = nn.Sequential(nn.BatchNorm2d(3), seen[0].model.float()).eval().double()
    batch = Batch(originals(1), torch.tensor([0]))
    (told,) = [observe(net, batch, told=True).given(defense=(Part("ats", effect=Transformed(policies=("0",))),))]
    replace(ATTACK, iterations=1, priors=(watching,))([told], seed=0)
    for images, (statistics,) in guesses:
        assert torch.allclose(statistics.mean, 1 - images.mean((1, 3, 4)))
