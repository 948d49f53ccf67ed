"""Attackers who know Refiner."""

import pickle
from pathlib import Path

import pytest
import torch

from fl_privacy.attacks import refiner_aware
from fl_privacy.attacks._refiner_aware import NoiseRatio, Sphere
from fl_privacy.attacks.gradient_inversion.layer_statistics import Explicit, Target
from fl_privacy.attacks.gradient_inversion.objectives import L2, Cosine
from fl_privacy.attacks.gradient_inversion.priors import Guess
from fl_privacy.errors import UserError
from fl_privacy.files import networks as network_files
from fl_privacy.models.pretrained.evaluator import EvaluationNetwork, uniform_noise
from fl_privacy.models.pretrained.evaluator_files import find_evaluator, save_evaluator
from tests.attacks.victims import SHAPE, observations, smooth_net


def statistics(guess: torch.Tensor, target: torch.Tensor) -> dict[str, Explicit]:
    return {"weight": Explicit(guess, Target.of(target))}


@pytest.mark.parametrize("objective", [L2(), Cosine()], ids=["l2", "cosine"])
def test_the_loss_vanishes_on_the_sphere_alone(objective: L2 | Cosine) -> None:
    target = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    tangent = torch.tensor([[4.0, -3.0]], dtype=torch.float64) / 5
    # The point where a line through the origin touches the circle of radius 3 around the target.
    touching = target * (1 - 9 / 25) + tangent * 3 * (1 - 9 / 25) ** 0.5
    assert float((touching - target).norm()) == pytest.approx(3)
    sphere = Sphere(objective, radius=3.0)
    assert float(sphere(statistics(touching, target))) == pytest.approx(0, abs=1e-12)
    assert float(sphere(statistics(target, target))) > 0.1


def test_the_center_is_matched_without_a_radius() -> None:
    assert isinstance(refiner_aware(radius=None).objective, Cosine)


def test_noise_costs_more_than_a_digit() -> None:
    digit = torch.zeros(1, 1, 1, 28, 28)
    digit[..., 4:24, 13:15] = 1
    noise = uniform_noise(digit[0], torch.Generator().manual_seed(0)).unsqueeze(0)
    prior = NoiseRatio(weight=2.0)
    low, high = (float(prior(Guess(images, 1, list))) for images in (digit, noise))
    assert low < 0.5
    assert high > 1.5
    assert high == pytest.approx(2 * float(find_evaluator(None, (1, 28, 28))(noise[0])))


def test_guesses_are_pushed_away_from_noise(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network, file = EvaluationNetwork(input_shape=SHAPE, widths=(4, 4, 4)), tmp_path / "evaluator.safetensors"
    save_evaluator(network, file, {})
    victims = observations(smooth_net(), 1)

    def noise_ratio(weight: float) -> float:
        attack = refiner_aware(radius=None, iterations=20, away_from_noise=weight, evaluator=str(file))
        batch = attack(victims, seed=0)[0].batch
        assert batch is not None
        return float(network(batch.inputs.float()).detach())

    assert noise_ratio(100.0) < noise_ratio(0.0)


def test_the_evaluator_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, opened = tmp_path / "evaluator.safetensors", []
    save_evaluator(EvaluationNetwork(input_shape=SHAPE, widths=(2, 2, 2)), file, {})
    attack = refiner_aware(radius=None, iterations=5, away_from_noise=1.0, evaluator=str(file))
    really_open = network_files.safe_open

    def counted(path: Path, framework: str) -> object:
        opened.append(path)
        return really_open(path, framework=framework)

    monkeypatch.setattr(network_files, "safe_open", counted)
    before = attack(observations(smooth_net(), 2), seed=0)
    assert opened == [file]
    # An attack that has begun goes on with the network it began with, whatever becomes of the file.
    file.unlink()
    for one, other in zip(before, attack(observations(smooth_net(), 2), seed=0), strict=True):
        assert one.batch is not None and other.batch is not None
        assert torch.equal(one.batch.inputs, other.batch.inputs)
    assert opened == [file]
    # Another process opens the file for itself.
    sent = pickle.loads(pickle.dumps(attack.priors[-1]))  # noqa: S301
    with pytest.raises(UserError, match="train-evaluator"):
        sent(Guess(torch.rand(1, 1, *SHAPE), 1, list))


def test_a_missing_evaluator_is_said_before_the_attack(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read"):
        refiner_aware(away_from_noise=1.0, evaluator=str(tmp_path / "missing"))


def test_wrong_settings_are_one_line() -> None:
    with pytest.raises(UserError, match=r"^attack.base is expected to be one of inverting_gradients, idlg, but got"):
        refiner_aware(base="x")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^attack.radius is expected to be at least 0, but got -1; try 1\.$"):
        refiner_aware(radius=-1)
