"""Images that come out of a generator, trained or not, instead of being optimized pixel by pixel."""

import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fl_privacy.attacks import GradientInversion, ggl, gifd, idlg, inverting_gradients
from fl_privacy.attacks.attack import trained_on
from fl_privacy.attacks.gradient_inversion.evident_defense import undo_evident_defenses
from fl_privacy.attacks.gradient_inversion.generator_prior import Generated, NamedGenerator, Untrained, onto_l1_ball
from fl_privacy.attacks.gradient_inversion.settings import Space, VictimContext
from fl_privacy.effects import Clipped, Sparse
from fl_privacy.errors import UserError
from fl_privacy.models.pretrained.generator import ImageGenerator, load_generator
from fl_privacy.types import Batch, Observation, VictimId
from tests.attacks.victims import CLASSES, error, observe
from tests.generator.makers import generator_file

SHAPE = (3, 8, 8)
NAMED = NamedGenerator(generator_file())


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Sigmoid(), nn.Conv2d(8, 8, 3, 2, padding=1), nn.Sigmoid(), nn.Flatten(),
        nn.Linear(128, CLASSES),
    )  # fmt: skip
    for parameter in made.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return made.double()


def generator() -> ImageGenerator:
    return load_generator(Path(generator_file()), dtype=torch.float64).network


def made(count: int, size: int = 1, seed: int = 3) -> list[Batch]:
    """Batches of images that the generator makes."""
    rng = torch.Generator().manual_seed(seed)
    latents = torch.randn(count, size, 6, generator=rng, dtype=torch.float64)
    labels = torch.randint(CLASSES, (count, size), generator=rng)
    return [Batch(generator()(z, y), y) for z, y in zip(latents, labels, strict=True)]


def victims(batches: list[Batch], model: nn.Module, *, told: bool = False) -> list[Observation]:
    return [observe(model, batch, id=VictimId(0, 0, k), told=told) for k, batch in enumerate(batches)]


def errors(attack: GradientInversion, batches: list[Batch], *, told: bool = False) -> list[float]:
    found = attack(victims(batches, net(), told=told), seed=0)
    return [error(one.batch, batch) for one, batch in zip(found, batches, strict=True)]


@pytest.mark.fuzz
def test_latents_of_images_that_the_generator_makes_are_found() -> None:
    batches = made(6)
    attack = ggl(generator=generator_file(), lr=0.05, weight=0, iterations=250, restarts=3, dtype="float64")
    found = sorted(errors(attack, batches))
    assert found[3] < 1e-3
    unconditional = generator_file(classes=0)
    other = sorted(errors(replace(attack, source=Generated(generator=NamedGenerator(unconditional))), batches))
    assert other[3] > 10 * found[3]


@pytest.mark.fuzz
def test_batches_are_found_with_their_labels() -> None:
    (batch,) = made(1, size=2)
    attack = ggl(generator=generator_file(), lr=0.05, weight=0, iterations=250, restarts=6, dtype="float64")
    assert errors(attack, [batch], told=True)[0] < 1e-3


def test_labels_can_be_optimized_with_the_latents() -> None:
    attack = ggl(generator=generator_file(), lr=0.05, weight=0, iterations=100, labels="optimize", dtype="float64")
    few, many = (replace(attack, iterations=n)(victims(made(3), net()), seed=0) for n in (1, 100))
    assert all(after.loss < before.loss / 2 for before, after in zip(few, many, strict=True))
    assert all(one.label_source == "optimized" for one in many)


@pytest.mark.long
def test_evolution_finds_them_without_gradients() -> None:
    pytest.importorskip("cma", reason="the extra cma is not installed")
    batches = made(3)
    attack = ggl(generator=generator_file(), optimizer="cma", population=24, weight=0, iterations=40, dtype="float64")
    assert attack.iterations == 40 and ggl(generator=generator_file(), optimizer="cma").iterations == 500
    observed = victims(batches, net())
    together = attack(observed, seed=0)
    assert sorted(error(one.batch, batch) for one, batch in zip(together, batches, strict=True))[1] < 1e-3
    torch.manual_seed(1)  # nothing is drawn from a generator that others use
    for victim, expected in zip(observed, together, strict=True):
        alone = attack([victim], seed=0)[0]
        assert alone.loss == pytest.approx(expected.loss, rel=1e-6)
        assert alone.history == pytest.approx(expected.history, rel=1e-6)
        assert list(alone.history) == sorted(alone.history, reverse=True)
    assert attack(observed[:1], seed=1)[0].history != together[0].history


def test_a_missing_package_is_one_line_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_privacy.checks.packages.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'cma'"):
        ggl(generator=generator_file(), optimizer="cma")


@pytest.mark.long
def test_features_reach_images_that_no_latent_makes() -> None:
    """And each stage is taken only where it fits the update better."""
    rng = torch.Generator().manual_seed(5)
    batches = [
        Batch((b.inputs + 0.1 * torch.rand(b.inputs.shape, generator=rng)).clamp(0, 1), b.labels) for b in made(4)
    ]
    attack = gifd(generator=generator_file(), layers=0, iterations=150, reach=1.0, total_variation=0, dtype="float64")
    deep = gifd(generator=generator_file(), layers=2, iterations=150, reach=1.0, total_variation=0, dtype="float64")
    losses = []
    for one in (attack, deep):
        found = one(victims(batches, net()), seed=0)
        losses.append([result.loss for result in found])
        assert len(found[0].history) >= 100
    assert all(after <= before for before, after in zip(*losses, strict=True))
    assert sum(losses[1]) < 0.7 * sum(losses[0])
    still = replace(deep, source=replace(deep.source, reach=0.0))
    assert [one.loss for one in still(victims(batches, net()), seed=0)] == pytest.approx(losses[0])


def test_features_stay_within_their_ball() -> None:
    network, shape = generator(), (2, *SHAPE)
    source = Generated(generator=NAMED, deeper=5, reach=0.2)
    latents, labels = torch.randn(3, 12, dtype=torch.float64), torch.randint(CLASSES, (3, 2))
    images = source.images(latents, torch.zeros(3, 0), labels, shape)
    stage = source.following(latents, torch.zeros(3, 0), labels, shape)
    stages = 0
    while stage is not None:
        stages += 1
        inner, variables, held = stage
        assert variables.shape == (3, inner.size(shape))
        torch.testing.assert_close(inner.images(variables, held, labels, shape), images)
        moved = inner.confined(torch.randn_like(variables), held, shape)
        sizes, limits = (t.reshape(6, -1).abs().sum(1) for t in (moved, held))
        torch.testing.assert_close(sizes, 0.2 * limits)
        stage = inner.following(variables, held, labels, shape)
    assert stages == network.depth - 1 < 1 + source.deeper


def test_nearest_points_of_the_l1_ball() -> None:
    """By the threshold that bisection finds."""
    vectors = torch.randn(5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    radius = torch.tensor([0.0, 0.5, 2.0, 4.0, 100.0], dtype=torch.float64)
    found = onto_l1_ball(vectors, radius)
    for vector, limit, got in zip(vectors, radius.tolist(), found, strict=True):
        low, high = 0.0, float(vector.abs().max())
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if float((vector.abs() - middle).clamp_min(0).sum()) > limit else (low, middle)
        expected = vector if vector.abs().sum() <= limit else vector.sign() * (vector.abs() - high).clamp_min(0)
        torch.testing.assert_close(got, expected)


def test_penalties_on_latents() -> None:
    latents = torch.randn(2, 3, 6, dtype=torch.float64)
    normal = torch.distributions.Normal
    own = normal(latents.mean(2), latents.std(2, correction=0))
    expected = torch.distributions.kl_divergence(own, normal(0.0, 1.0)).mean(1)
    kinds = {"kl": expected, "norm": latents.square().mean((1, 2))}
    for kind, value in kinds.items():
        source = Generated(generator=NAMED, weight=0.5, penalty_kind=kind)  # type: ignore[arg-type]
        torch.testing.assert_close(source.penalty(latents.flatten(1), (3, *SHAPE)), 0.5 * value)


@pytest.mark.long
def test_what_an_update_shows_is_taken_for_the_defense() -> None:
    observed = victims(made(2), net())
    pruned = observed[1]
    tensors = {
        n: torch.where(g.abs() >= g.abs().flatten().quantile(0.7), g, 0) for n, g in pruned.upload.tensors.items()
    }
    pruned = replace(pruned, upload=replace(pruned.upload, tensors=tensors))
    plain, shown = undo_evident_defenses([observed[0], pruned], clips=True)
    assert plain.knowledge.defense is not None and shown.knowledge.defense is not None
    assert plain.knowledge.defense[0].effect == Clipped(norm=None)
    assert isinstance(shown.knowledge.defense[0].effect, Sparse)
    assert undo_evident_defenses(observed)[0].knowledge.defense is None
    attack = ggl(generator=generator_file(), lr=0.05, weight=0, iterations=150, restarts=3, dtype="float64")
    knowing, blind = (replace(attack, evident=evident)([pruned], seed=0)[0] for evident in (True, False))
    assert "not zero" in knowing.countermeasures[0] and not blind.countermeasures
    assert not any("smooth" in said for said in knowing.countermeasures)
    assert error(knowing.batch, made(2)[1]) <= error(blind.batch, made(2)[1])


def test_a_victim_of_another_shape_harms_nobody() -> None:
    sound = victims(made(2), net())
    broken = replace(sound[0], input_shape=(5, 8, 8))
    attack = ggl(generator=generator_file(), iterations=3, dtype="float64")
    found = attack([sound[0], broken, sound[1]], seed=0)
    assert "but the model fails" in str(found[1].failure)
    assert [found[0].loss, found[2].loss] == pytest.approx([one.loss for one in attack(sound, seed=0)])


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 1, 28, 28), (1, 3, 33, 7)])
def test_every_victim_has_an_untrained_network_of_its_own(shape: tuple[int, ...]) -> None:
    source = Untrained(width=4)

    def blank(seed: int) -> VictimContext:
        observed = victims(made(1), net())[0]
        rng = torch.Generator().manual_seed(seed)
        return VictimContext(observation=observed, labels=None, shape=shape, generator=rng, space=Space())

    held = torch.stack([source.held(blank(seed)) for seed in (0, 1)])
    variables = torch.stack([source.start(blank(seed)) for seed in (0, 1)])
    labels = torch.zeros(2, shape[0], dtype=torch.long)
    images = source.images(variables, held, labels, shape)
    assert images.shape == (2, *shape) and images.min() >= 0 and images.max() <= 1
    assert not torch.allclose(images[0], images[1])
    changed = variables.clone()
    changed[1] += 1
    again = source.images(changed, held, labels, shape)
    torch.testing.assert_close(again[0], images[0])
    assert not torch.allclose(again[1], images[1], atol=1e-3)
    for row in (0, 1):
        alone = source.images(variables[row : row + 1], held[row : row + 1], labels[:1], shape)
        torch.testing.assert_close(alone[0], images[row], rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_an_untrained_network_as_the_space_of_any_attack() -> None:
    rng = torch.Generator().manual_seed(0)
    smooth = torch.nn.functional.interpolate(torch.rand(2, 3, 2, 2, generator=rng), size=8, mode="bilinear").double()
    batches = [Batch(image[None], torch.tensor([k])) for k, image in enumerate(smooth)]
    for attack in (
        inverting_gradients(space="network", iterations=80, dtype="float64"),
        idlg(space="network", iterations=8, dtype="float64"),
    ):
        assert isinstance(attack.source, Untrained)
        before, after = errors(replace(attack, iterations=1), batches), errors(attack, batches)
        assert sum(after) < 0.5 * sum(before)
    with pytest.raises(UserError, match=r"attack.start is expected without attack.space=network"):
        inverting_gradients(space="network", start="gray")
    with pytest.raises(UserError, match=r"attack.space is expected to be one of pixels, network"):
        idlg(space="latent")  # type: ignore[typeddict-item]


def test_the_generator_is_opened_once_and_looked_for_again_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "g.safetensors"
    file.write_bytes(Path(generator_file()).read_bytes())
    attack = ggl(generator=str(file), iterations=2)
    assert attack == ggl(generator=str(file), iterations=2) != ggl(generator=generator_file(), iterations=2)
    known = trained_on(attack, SHAPE)
    assert known is not None and known.words() == "noise, split train, 20 images"
    assert trained_on(idlg(), SHAPE) is None
    file.unlink()
    assert trained_on(attack, SHAPE) is known
    with pytest.raises(UserError, match="train-generator"):
        trained_on(pickle.loads(pickle.dumps(attack)), SHAPE)  # noqa: S301
    with pytest.raises(UserError, match="train-generator"):
        ggl(generator=str(file))


def test_a_generator_that_does_not_fit_is_refused() -> None:
    observed = victims(made(1), net())
    with pytest.raises(UserError, match="expected to know the 5 classes of the model, or none, but knows 7"):
        ggl(generator=generator_file(classes=7), iterations=1)(observed, seed=0)
    with pytest.raises(UserError, match="makes 3x12x12"):
        ggl(generator=generator_file(size=12), iterations=1)(observed, seed=0)
    with pytest.raises(UserError, match=r"attack\.generator=FILE"):
        ggl(iterations=1)(observed, seed=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"population": 3},
        {"deviation": 0.0},
        {"weight": -1.0},
        {"penalty": "l1"},
        {"optimizer": "sgd"},
        {"lr": math.nan},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        ggl(**wrong)  # type: ignore[arg-type]
