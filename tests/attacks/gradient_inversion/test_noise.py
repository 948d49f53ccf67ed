"""How noisy an update is shows in it, and says how smooth the images behind it are."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_privacy.attacks import AutoAttack, ExactInversion, GradientInversion, inverting_gradients
from fl_privacy.attacks.auto.sub_attacks import entries
from fl_privacy.attacks.gradient_inversion.evident_defense import (
    evident_defense,
    noise_over_gradient,
    undo_evident_defenses,
    usual_of,
)
from fl_privacy.attacks.gradient_inversion.grouping import Group
from fl_privacy.attacks.gradient_inversion.objectives import L2, Cosine
from fl_privacy.attacks.gradient_inversion.preparation import Prepared, prepare
from fl_privacy.data import load_data
from fl_privacy.defenses._pruning import keep_largest
from fl_privacy.effects import (
    Clipped,
    ClippedExamples,
    MutedFeatures,
    Noise,
    Part,
    PrivateLoss,
    Quantized,
    SlicedNoise,
    Sparse,
)
from fl_privacy.models import MLP, LeNet
from fl_privacy.types import Batch, LocalPlan, Observation, VictimId
from tests.attacks.victims import error, observe

NOISE = (Part("noise", effect=Noise(std=None, clip=None)),)


def digit(number: int = 0, count: int = 1) -> Batch:
    return load_data("mnist_mini").train.batch(torch.arange(number, number + count))


def seen(truth: Batch, *, ratio: float = 0.0, model: nn.Module | None = None, **options) -> Observation:
    """Make an update with noise of ``ratio`` times the norm of its gradient."""
    if model is None:
        torch.manual_seed(0)
        side = truth.inputs.shape[-1]
        model = LeNet(in_channels=1, image_size=side, num_classes=10, activation="tanh", mean=[0.5], std=[0.25])
    found = replace(observe(model.eval(), truth, **options), num_classes=10)
    return noisy(found, ratio) if ratio else found


def noisy(clean: Observation, ratio: float, seed: int = 0) -> Observation:
    rng = torch.Generator().manual_seed(seed)
    update = clean.upload.tensors
    length = torch.stack([t.square().sum() for t in update.values()]).sum().sqrt()
    std = ratio * length / math.sqrt(sum(t.numel() for t in update.values()))
    tensors = {name: t + std * torch.randn(t.shape, generator=rng) for name, t in update.items()}
    return replace(clean, upload=replace(clean.upload, tensors=tensors))


def prepared(observations: list[Observation], objective=Cosine()) -> Prepared:  # noqa: B008
    attack = GradientInversion(objective=objective, compile="off")
    return prepare(attack, Group(dict(enumerate(observations))), 0)


def weights(observations: list[Observation], objective=Cosine()) -> torch.Tensor:  # noqa: B008
    ready = prepared([one.given(defense=NOISE) for one in observations], objective)
    return ready.problem(ready.victims, [0] * len(ready.victims)).constraints.smoothness


@pytest.mark.parametrize("ratio", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize("plan", [LocalPlan(), LocalPlan(shares="delta", lr=0.1, weight_decay=1e-2)])
def test_noise_is_told_from_what_the_output_layer_adds_up_to(ratio, count, plan):
    truth = digit(count=count)
    clean, found = seen(truth, plan=plan), noise_over_gradient(seen(truth, ratio=ratio, plan=plan))
    assert found == pytest.approx(ratio, rel=0.2)
    assert noise_over_gradient(clean) < 1e-5 or plan.weight_decay
    assert noise_over_gradient(noisy(clean, 50.0)) == 3.0


def test_where_nothing_tells_the_noise_it_is_not_told():
    convolutional = nn.Sequential(nn.Conv2d(1, 10, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    found = seen(digit(), ratio=0.1, model=convolutional, told=True)
    assert noise_over_gradient(found) is None
    ready = prepared([found.given(defense=NOISE)])
    assert float(ready.problem(ready.victims, [0]).constraints.smoothness) > 0
    assert ready.problem(ready.victims, [0]).constraints.likeliest is None
    assert noise_over_gradient(seen(digit(), plan=LocalPlan(shares="delta", optimizer="adam"))) is None


def test_noise_shows_and_rounding_does_not():
    clean = seen(digit())
    usual = usual_of(clean)
    assert usual.noise < 1e-5
    assert evident_defense(clean, usual) == ()
    assert evident_defense(noisy(clean, 1e-3), usual) == NOISE
    assert evident_defense(noisy(clean, 1e-3), replace(usual, noise=1e-3)) == ()
    (clipped, own) = undo_evident_defenses([noisy(clean, 0.1)], clips=True)[0].knowledge.defense
    assert isinstance(clipped.effect, Clipped) and own == NOISE[0]


def test_smoothness_grows_with_the_noise_and_no_noise_calls_for_none():
    clean = seen(digit())
    found = weights([noisy(clean, ratio) for ratio in (1e-2, 1e-1, 1.0)]).tolist()
    assert found[1] == pytest.approx(100 * found[0], rel=0.3)
    assert 20 * found[1] < found[2] < 90 * found[1]
    assert 0.1 < found[2] < 10.0
    assert float(weights([clean])) < 1e-4 * found[0]


def test_smoothness_is_in_the_unit_of_the_objective():
    """The same noise pulls at a pixel as strongly as its share of the loss is large."""
    found = noisy(seen(digit()), 0.1)
    louder = replace(found, upload=replace(found.upload, tensors={n: 10 * t for n, t in found.upload.tensors.items()}))
    cosine, absolute = weights([found, louder]), weights([found, louder], L2())
    torch.testing.assert_close(cosine[0], cosine[1])
    torch.testing.assert_close(absolute[1], 100 * absolute[0])


def test_a_victim_is_smoothed_by_its_own_noise():
    observations = [noisy(seen(digit(k), id=VictimId(0, 0, k)), 0.1 * (k + 1), seed=k) for k in range(3)]
    model, sent = observations[0].model, observations[0].sent
    observations = [replace(one, model=model, sent=sent) for one in observations]
    together = weights(observations)
    alone = torch.cat([weights([one]) for one in observations])
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize(
    "effect",
    [
        Noise(std=None, clip=None),
        ClippedExamples(norm=1.0, noise_multiplier=1.0),
        Quantized(bits=3),
        SlicedNoise(std=0.1),
    ],
    ids=lambda effect: type(effect).__name__,
)
def test_what_is_like_noise_is_smoothed_away(effect):
    told = noisy(seen(digit()), 0.3).given(defense=(Part("defense", effect=effect),))
    assert {weight for _, _, weight in entries(told, 3, lambda attack: attack)} == {0.0}
    ready = prepared([told])
    assert float(ready.problem(ready.victims, [0]).constraints.likeliest) > 0


def kept(observation: Observation, share: float) -> Observation:
    """Keep the largest elements of each tensor of an update, the others zero."""
    masks = keep_largest({n: t.abs() for n, t in observation.upload.tensors.items()}, drop=1 - share, scope="layer")
    tensors = {name: t * masks[name] for name, t in observation.upload.tensors.items()}
    return replace(observation, upload=replace(observation.upload, tensors=tensors))


FAINT = (Part("noise", effect=Noise(std=1e-9, clip=None)),)


@pytest.mark.parametrize(
    ("effect", "noise", "share"),
    [
        (Sparse(largest=True, scope="layer"), NOISE, 0.1),
        (Sparse(largest=True, scope="layer", dropped=0.9), FAINT, 1.0),
        (Quantized(bits=8), FAINT, 1.0),
        (Quantized(bits=1, rounding="nearest"), NOISE, 1.0),
    ],
)
def test_what_hides_values_in_bounds_is_not_taken_for_noise(effect, noise, share):
    found = kept(noisy(seen(digit()), 0.3), share)
    told = found.given(defense=(Part("defense", effect=effect), *noise))
    assert 0.0 not in {weight for _, _, weight in entries(told, 3, lambda attack: attack)}
    ready = prepared([told])
    assert ready.problem(ready.victims, [0]).constraints.likeliest is None


def test_one_bit_at_random_is_noise_and_not_everything():
    told = noisy(seen(digit()), 0.3).given(defense=(Part("defense", effect=Quantized(bits=1)),))
    assert {weight for _, _, weight in entries(told, 3, lambda attack: attack)} == {0.0}


@pytest.mark.parametrize(
    "effect", [Sparse(largest=True, scope="layer", dropped=0.2), Quantized(bits=8), MutedFeatures(dropped=0.2)]
)
def test_what_hides_less_than_the_noise_changes_nothing(effect):
    parts = (Part("defense", effect=effect), *NOISE)
    for told in (noisy(seen(digit()), 2.0).given(defense=each) for each in (parts, parts[::-1])):
        assert {weight for _, _, weight in entries(told, 3, lambda attack: attack)} == {0.0}
        ready = prepared([told])
        assert float(ready.problem(ready.victims, [0]).constraints.likeliest) > 0


def test_noise_beside_a_private_loss_is_countered_as_before():
    loss = PrivateLoss(alpha1=1.0, alpha2=0.1, bits=8)
    told = noisy(seen(digit()), 0.3).given(defense=(Part("spn", effect=loss), *NOISE))
    (read,) = AutoAttack(evaluations=50)([told], seed=0)
    assert read.failure is None and len(read.countermeasures) == 2


def test_noise_behind_layers_that_are_silent_in_the_rehearsal_fails_no_attack():
    torch.manual_seed(0)
    model = LeNet(in_channels=1, image_size=28, num_classes=10, activation="relu")
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    nn.init.constant_(first.bias, -100.0)
    nn.init.zeros_(first.weight)
    told = noisy(seen(digit(), model=model), 0.3).given(defense=NOISE)
    assert weights([told]).isfinite().all()
    (read,) = AutoAttack(evaluations=50)([told], seed=0)
    assert read.failure is None


def photograph() -> Batch:
    """Smooth areas and an edge, (1, 1, 28, 28)."""
    rough = torch.rand(1, 1, 5, 5, generator=torch.Generator().manual_seed(3))
    smooth = nn.functional.interpolate(rough, size=28, mode="bicubic", align_corners=True)
    smooth[..., 10:20, 12:] += 0.3
    return Batch((smooth / smooth.max()).clamp(0, 1), torch.tensor([2]))


@pytest.mark.long
@pytest.mark.parametrize(
    ("ratio", "share", "iterations"), [(0.6, 0.9, 150), pytest.param(2.0, 0.7, 300, marks=pytest.mark.fuzz)]
)
def test_noisy_updates_are_read_by_whoever_smooths_as_much_as_the_noise_calls_for(ratio, share, iterations):
    truth = photograph()
    found = seen(truth, ratio=ratio)
    (read,) = AutoAttack(evaluations=iterations)([found], seed=0)
    rough, blurred = (
        inverting_gradients(iterations=iterations, total_variation=weight)([found], seed=0)[0]
        for weight in (1e-3, 10.0)
    )
    assert error(read.batch, truth) < share * min(error(rough.batch, truth), error(blurred.batch, truth))
    assert any("noise" in sentence for sentence in read.countermeasures)
    (told,) = inverting_gradients(iterations=iterations)([found.given(defense=NOISE)], seed=0)
    assert error(told.batch, truth) < share * error(rough.batch, truth)


@pytest.mark.long
def test_images_that_equations_gave_are_cleared_of_noise():
    truth = digit()
    torch.manual_seed(0)
    side = truth.inputs.shape[-1]
    model = MLP(in_channels=1, image_size=side, num_classes=10, widths=(256, 64), mean=[0.5], std=[0.25])
    found = seen(truth, ratio=0.3, model=model)
    (solved,) = ExactInversion()([found], seed=0)
    (read,) = AutoAttack(evaluations=300)([found], seed=0)
    assert error(read.batch, truth) < 0.5 * error(solved.batch, truth)
