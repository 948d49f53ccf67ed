"""Every published attack keeps the contract of an attack."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from fl_privacy import attacks
from fl_privacy.attacks import (
    GradientInversion,
    ModelInversion,
    adam_dlg,
    ats_attack,
    dlg,
    ggl,
    gifd,
    grad_inversion,
    idlg,
    inverting_gradients,
    model_inversion,
    refiner_aware,
    refiner_solved,
    sapag,
)
from fl_privacy.attacks.gradient_inversion.settings import STARTS, Given, Space, VictimContext, scaled_to_range
from fl_privacy.attacks.optimizers import LBFGS
from fl_privacy.errors import UserError
from fl_privacy.models import ConvNet, LeNet, ResNet20
from fl_privacy.runs.config import options
from fl_privacy.types import LocalPlan
from tests.attacks.victims import CLASSES, SHAPE, observations, smooth_net
from tests.generator.makers import generator_file


def made_for_victims() -> str:
    """Make a generator of images like those attacked here."""
    return generator_file(channels=2, size=8, classes=CLASSES)


PRESETS: dict[str, Callable[..., GradientInversion | ModelInversion]] = {
    "dlg": dlg,
    "idlg": idlg,
    "lbfgs-wolfe": lambda **options: dlg(line_search="strong_wolfe", **options),
    "adam_dlg": lambda **options: adam_dlg(lr=0.05, **options),
    "inverting_gradients": inverting_gradients,
    "soft-sign": lambda **options: inverting_gradients(sign="soft", per_layer=True, **options),
    "grad_inversion": lambda **options: grad_inversion(warmup=1, noise=1e-3, **options),
    "refiner_aware": refiner_aware,
    "refiner_aware-lbfgs": lambda **options: refiner_aware(base="idlg", **options),
    "refiner_solved": refiner_solved,
    "model_inversion": partial(model_inversion, matching_iterations=3),
    "sapag": sapag,
    "sapag-adamw": lambda **options: sapag(optimizer="adamw", lr=0.05, projection="minmax", **options),
    **{
        f"ats-{optimizer}-{distance}": partial(ats_attack, optimizer=optimizer, distance=distance)
        for optimizer, distance in (
            ("lbfgs", "l2"), ("lbfgs", "cosine"), ("adam", "cosine"), ("adam", "l1"), ("adam", "l2"), ("sgd", "cosine"),
        )
    },
    "ggl": lambda **options: ggl(generator=made_for_victims(), **options),
    "ggl-cma": lambda **options: ggl(generator=made_for_victims(), optimizer="cma", population=6, **options),
    "gifd": lambda **options: gifd(generator=made_for_victims(), **options),
    "network": partial(inverting_gradients, space="network"),
    "ats-lbfgs-cosine-code": partial(ats_attack, variant="code", optimizer="lbfgs"),
    "ats-lbfgs-l2-code": partial(ats_attack, variant="code", optimizer="lbfgs", distance="l2"),
}  # fmt: skip
PRESETS |= {
    name: getattr(attacks, name)
    for name in sorted(set(options("attack")) & set(attacks.__all__) - PRESETS.keys() - {"lamp", "tableak", "tag"})
}
"""Those of texts and rows have tests of their own; a new preset without a row has its defaults."""


VARIED = {"ats-lbfgs-l2", "ats-adam-l2", "ats-sgd-cosine", "ats-lbfgs-cosine-code", "ats-lbfgs-l2-code"}
"""Optimizers and distances of one preset, which ``make fuzz`` tries beside others that are in ``make test``."""


@pytest.mark.parametrize("name", [pytest.param(p, marks=[pytest.mark.fuzz] * (p in VARIED)) for p in PRESETS])
def test_contract(name: str) -> None:
    victims = observations(smooth_net(), 3)
    broken = replace(victims[1], upload=replace(victims[1].upload, tensors={}))
    attack = PRESETS[name](iterations=2 if "lbfgs" in name or name in ("dlg", "idlg", "sapag") else 8, dtype="float64")
    seen = []
    found = attack([victims[0], broken, victims[2]], seed=1, progress=lambda done, total: seen.append(done / total))
    assert [r.id.probe for r in found] == [0, 1, 2]
    assert found[1].failure and found[1].batch is None
    for result in (found[0], found[2]):
        assert result.batch is not None and result.failure is None
        assert result.batch.inputs.shape == (1, *SHAPE) and result.batch.inputs.dtype == victims[0].precision
        assert result.batch.inputs.min() >= 0
        assert result.batch.inputs.max() <= 1
        assert result.batch.labels.shape == (1,) and 0 <= result.batch.labels.item() < CLASSES
        assert result.loss <= result.history[0]
    assert seen[-1] == 1
    again = attack([victims[2]], seed=1)[0]
    assert again.loss == pytest.approx(found[2].loss, rel=1e-6)


@pytest.mark.long
def test_group_consistency_draws_attempts_together() -> None:
    victims = observations(smooth_net(), 2)
    losses = []
    for weight in (0.0, 10.0):
        attack = grad_inversion(iterations=60, warmup=1, restarts=3, consistency=weight, dtype="float64")
        found = attack(victims, seed=0)
        assert [r.loss for r in attack(victims[1:], seed=0)] == pytest.approx([found[1].loss])
        losses.append(found[0].loss)
    assert losses[0] < losses[1]


@pytest.mark.parametrize("name", STARTS)
def test_starts(name: str) -> None:
    victim = observations(smooth_net(), 1)[0].given(public_images=torch.rand(5, *SHAPE), public_labels=torch.arange(5))
    assert idlg(iterations=1, start=name, dtype="float64")([victim], seed=0)[0].batch is not None


def test_an_image_of_the_attackers_own_as_start() -> None:
    victim = observations(smooth_net(), 1)[0]
    image = torch.rand(SHAPE)
    attack = replace(inverting_gradients(iterations=1, lr=1e-9, dtype="float64"), start=Given(images=image))
    found = attack([victim], seed=0)[0]
    assert found.batch is not None
    torch.testing.assert_close(found.batch.inputs[0], image, check_dtype=False)
    with pytest.raises(UserError, match="resize"):
        replace(attack, start=Given(images=image[:, :4]))([victim], seed=0)


def test_the_mean_of_the_class_as_start() -> None:
    victim, public, classes = observations(smooth_net(), 1)[0], torch.rand(4, *SHAPE), torch.tensor([0, 2, 2, 4])
    told = victim.given(public_images=public, public_labels=classes)
    start = STARTS["class_mean"]
    blank = VictimContext(
        observation=told, labels=torch.tensor([2, 4, 3]), shape=(3, *SHAPE), generator=torch.Generator(), space=Space()
    )
    found = start(blank)
    torch.testing.assert_close(found, torch.stack([(public[1] + public[2]) / 2, public[3], public.mean(0)]))
    with pytest.raises(UserError, match="class-mean"):
        start(replace(blank, labels=None))


def test_an_earlier_guess_as_start() -> None:
    victim, previous = observations(smooth_net(), 1)[0], torch.rand(1, *SHAPE)
    attack = inverting_gradients(iterations=1, lr=1e-9, dtype="float64", start="previous")
    found = attack([victim.given(previous=previous)], seed=0)[0]
    assert found.batch is not None
    torch.testing.assert_close(found.batch.inputs, previous, check_dtype=False)
    unknown, normal = attack([victim], seed=0)[0], replace(attack, start=STARTS["normal"])([victim], seed=0)[0]
    assert unknown.loss == normal.loss


def test_wrong_choices_are_refused() -> None:
    with pytest.raises(UserError, match="pattern"):
        idlg(start="noise")
    with pytest.raises(UserError, match="lbfgs"):
        sapag(optimizer="newton")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="newton"):
        ats_attack(optimizer="newton")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="public images"):
        idlg(start="public_mean", iterations=1, dtype="float64")(observations(smooth_net(), 1), seed=0)


NETS = {
    "lenet": lambda: LeNet(in_channels=2, image_size=8, num_classes=CLASSES, init="uniform_0.5"),
    "convnet": lambda: ConvNet(in_channels=2, image_size=9, num_classes=CLASSES, width=4),
    "resnet20-group": lambda: ResNet20(in_channels=2, image_size=8, num_classes=CLASSES, width=4, norm="group"),
    "resnet20-batch": lambda: ResNet20(in_channels=2, image_size=8, num_classes=CLASSES, width=4),
}


ON_EVERY_NET = ("idlg", "inverting_gradients", "soft-sign", "sapag", "ats-adam-l1")
ON_ONE_NET = ("ats-lbfgs-cosine", "ats-adam-l2", "ats-sgd-cosine", "sapag-adamw", "lbfgs-wolfe")


CASES = [
    *product(["lenet"], [*ON_EVERY_NET, *ON_ONE_NET]),
    *product(["convnet"], ON_EVERY_NET[:2]),
    ("resnet20-batch", "inverting_gradients"),
]
REST = [case for case in product([*NETS], ON_EVERY_NET) if case not in CASES]


@pytest.mark.long
@pytest.mark.parametrize(("net", "preset"), [*CASES, *(pytest.param(*case, marks=pytest.mark.fuzz) for case in REST)])
def test_a_victim_in_a_batch_fares_as_alone(net: str, preset: str) -> None:
    torch.manual_seed(0)
    model = NETS[net]().double()
    plan = LocalPlan(batch_norm="eval")
    victims = observations(model, 3, plan=plan, shape=(2, 9, 9) if net == "convnet" else SHAPE)
    attack = PRESETS[preset](iterations=3, dtype="float64")
    if isinstance(attack.optimizer, LBFGS):
        # L-BFGS with full steps amplifies rounding errors on networks with kinks: a few moves only
        attack = replace(attack, iterations=1, restarts=1, optimizer=replace(attack.optimizer, inner=4))
    together = attack(victims, seed=0)
    for victim, expected in zip(victims, together, strict=True):
        alone = attack([victim], seed=0)[0]
        assert alone.loss == pytest.approx(expected.loss, rel=1e-6)
        assert alone.history == pytest.approx(expected.history, rel=1e-6)
        assert alone.batch is not None and expected.batch is not None
        torch.testing.assert_close(alone.batch.inputs, expected.batch.inputs, rtol=0, atol=1e-5)


def test_guesses_as_they_come_are_those_that_are_clamped_else() -> None:
    victims = observations(smooth_net(), 2)
    attack = dlg(iterations=1, dtype="float64")
    for one, other in zip(attack(victims, seed=0), replace(attack, as_they_come=True)(victims, seed=0), strict=True):
        assert one.batch is not None and other.batch is not None
        assert float(other.batch.inputs.min()) < 0
        torch.testing.assert_close(other.batch.inputs.clamp(0, 1), one.batch.inputs)


@pytest.mark.parametrize("preset", [dlg, inverting_gradients])
def test_guesses_are_stretched_to_the_range_as_in_fdl_pp_where_that_is_asked_for(
    preset: Callable[..., GradientInversion],
) -> None:
    victims = observations(smooth_net(), 2)
    attack = preset(iterations=1, dtype="float64", projection="none")
    raw, stretched = (
        replace(attack, **how)(victims, seed=0) for how in ({"as_they_come": True}, {"into_range": "stretch"})
    )
    for one, other in zip(raw, stretched, strict=True):
        assert one.batch is not None and other.batch is not None
        low, high = (f(one.batch.inputs.flatten(1), 1, keepdim=True)[..., None, None] for f in (torch.amin, torch.amax))
        torch.testing.assert_close(other.batch.inputs, (one.batch.inputs - low) / (high - low))


def test_a_guess_of_one_level_has_nothing_to_stretch() -> None:
    images = torch.stack(
        [torch.full((3, 4, 4), 0.4), torch.full((3, 4, 4), 1.7), torch.linspace(0.2, 0.4, 48).view(3, 4, 4)]
    )
    found = scaled_to_range(images, "stretch")
    assert found[0].unique().tolist() == pytest.approx([0.4]) and found[1].unique().tolist() == [1.0]
    assert (found[2].min(), found[2].max()) == (0, 1) and torch.equal(
        scaled_to_range(images, "clamp"), images.clamp(0, 1)
    )
