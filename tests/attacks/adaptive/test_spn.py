"""An attacker that knows of SPN's private loss guesses what it sends back."""

from dataclasses import replace

import pytest
import torch

from fl_privacy.attacks import GradientInversion, dlg
from fl_privacy.attacks.adaptive import AttackSetting, countermeasures_against
from fl_privacy.attacks.optimizers import LBFGS
from fl_privacy.defenses import ClientState, compose, pruning, spn
from fl_privacy.defenses._spn import PolarizationHead, polarization_loss
from fl_privacy.effects import PrivateLoss
from fl_privacy.models.gradients import Layered, VictimModel
from fl_privacy.types import LocalPlan, VictimId
from tests.attacks.defended import informed, protected, smooth_images, victims
from tests.attacks.victims import error, observe, smooth_net

BY_VALUE = GradientInversion(optimizer=LBFGS(), iterations=8, dtype="float64", labels="known", compile="off")
LEARNS = "It learns what the private head sends back into the features, jointly with the image."
DROPS = "It matches only the output layer, where the private loss has no part."


def guesses(attack, observations):
    truth = smooth_images(2)
    found = attack(observations, seed=0)[-2:]
    assert all(r.batch is not None for r in found)
    return torch.cat([r.batch.inputs for r in found]), truth, found[0].countermeasures


def error_of(images, truth):
    return error(type(truth)(images.clamp(0, 1), truth.labels), truth)


def mean_error(attack, observations):
    return error_of(*guesses(attack, observations)[:2])


def test_what_a_private_head_does_is_a_vector_of_features_an_example():
    defense = spn(alpha1=0.6, alpha2=0.4, bits=16)
    (seen,) = victims(defense, count=1)
    truth = smooth_images(1)
    state, rng = ClientState(), torch.Generator().manual_seed(1)
    model = defense.model[0](seen.model, state, rng)
    head = next(m for m in model.modules() if isinstance(m, PolarizationHead))
    features = smooth_net()[:5](truth.inputs).detach().requires_grad_()
    code = head.codes[truth.labels]
    gap = 1.0 - torch.nn.functional.linear(features, head.weight, head.bias) * code
    (sent_back,) = torch.autograd.grad(0.4 * gap.relu().sum(), features)
    names = list(seen.upload.tensors)
    plan = LocalPlan(loss_scale=0.6)
    frozen = smooth_net().requires_grad_(False)
    layered = Layered(VictimModel(frozen, names, plan, hidden="5.weight"))
    found = layered(truth.inputs[None], truth.labels[None], sent_back[None] / 0.6)
    for name in names:
        torch.testing.assert_close(found[name][0], seen.upload.tensors[name])


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"alpha2": 0.01}, marks=pytest.mark.fuzz),
        pytest.param({"alpha2": 0.5}, marks=pytest.mark.fuzz),
        {"alpha2": 0.5, "widths": [12, 8], "bound": 0.6},
    ],
    ids=["weak", "strong", "several layers"],
)
def test_learning_it_undoes_the_defense(options):
    defense = spn(bits=16, **options)
    seen = victims(defense)
    images, truth, countermeasures = guesses(BY_VALUE, informed(seen, defense))
    assert error_of(images, truth) < 0.1 * mean_error(BY_VALUE, seen)
    assert countermeasures == (LEARNS,)


@pytest.mark.long
def test_the_factor_of_the_cross_entropy_is_known():
    defense = spn(alpha1=0.25, alpha2=0.1, bits=16)
    seen = victims(defense)
    assert mean_error(BY_VALUE, informed(seen, defense)) < 0.1 * mean_error(BY_VALUE, seen)


@pytest.mark.long
def test_labels_are_optimized_beside_it():
    defense = spn(alpha2=0.3, bits=16)
    seen = victims(defense)
    attack = dlg(iterations=15, dtype="float64", compile="off")
    found = attack(informed(seen, defense), seed=0)
    assert [r.batch.labels.item() for r in found] == smooth_images(2).labels.tolist()
    images = torch.cat([r.batch.inputs for r in found])
    assert error_of(images, smooth_images(2)) < 0.2 * mean_error(attack, seen)


@pytest.mark.long
def test_each_round_has_its_own():
    defense = spn(alpha2=0.3, bits=16)
    seen = informed(victims(defense, rounds=2), defense, rounds_known=True)
    found = BY_VALUE(seen, seed=0)
    assert torch.equal(found[0].batch.inputs, found[2].batch.inputs) and LEARNS in found[0].countermeasures
    assert error_of(torch.cat([r.batch.inputs for r in found[-2:]]), smooth_images(2)) < 1e-3


def test_several_local_steps_leave_the_output_layer_alone():
    plan = LocalPlan(shares="delta", lr=0.1, steps=2)
    defense = spn(alpha2=0.3, bits=16)
    seen = informed(victims(defense, plan=plan), defense)
    attack = replace(BY_VALUE, iterations=2)
    assert guesses(attack, seen)[2][0] == DROPS


@pytest.mark.fuzz
def test_it_goes_together_with_other_measures():
    defense = compose(spn(alpha2=0.3, bits=16), pruning(rate=0.3))
    seen = victims(defense)
    adaptive = informed(seen, defense)
    assert LEARNS in guesses(replace(BY_VALUE, iterations=2), adaptive)[2]
    assert mean_error(BY_VALUE, adaptive) < 0.5 * mean_error(BY_VALUE, seen)


def test_without_a_private_loss_nothing_is_guessed():
    defense = spn(alpha2=0)
    seen = victims(defense)
    attack = replace(BY_VALUE, iterations=2)
    (plain, _, _), (adaptive, _, countermeasures) = guesses(attack, seen), guesses(attack, informed(seen, defense))
    assert torch.equal(plain, adaptive) and countermeasures == ()


@pytest.mark.long
def test_the_factor_of_the_cross_entropy_is_known_without_a_private_loss_too():
    defense = spn(alpha1=0.25, alpha2=0)
    seen = victims(defense)
    images, truth, countermeasures = guesses(BY_VALUE, informed(seen, defense))
    assert countermeasures == ("It weights the cross entropy as the clients do.",)
    assert error_of(images, truth) < 0.1 * mean_error(BY_VALUE, seen)


def circumstances(**changes):
    settings = {
        "head": "5.weight", "batch_size": 1, "plan": LocalPlan(), "unrolls": False,
        "matched_per_uploaded": 1.0, "scales": True, "complete": True,
        "smooths": False, "pixels": True, "learnable": ["5.weight"],
    }  # fmt: skip
    return AttackSetting(**settings | changes)


def test_the_unit_of_what_is_sent_back_is_relative_to_the_cross_entropy():
    plain, scaled = (
        countermeasures_against(PrivateLoss(alpha1=alpha1, alpha2=0.2 * alpha1, bits=16), circumstances())[0]
        for alpha1 in (1.0, 0.25)
    )
    assert plain.hidden.strength == pytest.approx(scaled.hidden.strength) == pytest.approx(0.2 * 4)


def test_the_unit_of_several_private_layers_is_the_size_of_what_they_send_back():
    rng = torch.Generator().manual_seed(3)
    head = PolarizationHead(features=200, bits=64, classes=10, bound=0.3, rng=rng, widths=(100, 80))
    features = torch.rand(8, 200, generator=rng).requires_grad_()
    labels = torch.randint(10, (8,), generator=rng)
    loss = 0.1 * polarization_loss(head(features), head.codes, labels, 1.0) * 8
    (sent_back,) = torch.autograd.grad(loss, features)
    effect = PrivateLoss(alpha1=1.0, alpha2=0.1, bits=64, bound=0.3, widths=(100, 80))
    (measure,) = countermeasures_against(effect, circumstances())
    unit = measure.hidden.unknowns(torch.empty(10, 200)).unit
    assert 0.4 < float(sent_back.square().mean().sqrt()) / unit < 1.5


def test_labels_are_inferred_under_the_factor_that_is_known():
    """Where the loss is a quarter, gradients of a batch hold a quarter of each example's share."""
    defense = spn(alpha1=0.25, alpha2=0)
    truth = smooth_images(6, seed=3)
    seen = protected(observe(smooth_net(), truth, id=VictimId(0, 0, 0)), truth, defense)
    attack = replace(BY_VALUE, labels="infer", iterations=1)
    (found,) = attack(informed([seen], defense), seed=0)
    assert sorted(found.batch.labels.tolist()) == sorted(truth.labels.tolist())
