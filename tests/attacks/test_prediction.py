"""What is predicted of networks agrees with what attacks reconstruct, and says which layer decides."""

import pytest
import torch
from torch import nn

from fl_privacy.attacks.prediction import PlannedTraining, predict
from fl_privacy.models import MLP, LeNet, ResNet18, ResNet20, build_model

FACTS = {"in_channels": 3, "image_size": 32, "num_classes": 10}


def of(factory: type[nn.Module], training: PlannedTraining, **options: object) -> tuple[str, str]:
    model = build_model(factory, seed=0, **FACTS, **options)
    found = predict(model, (3, 32, 32), training)
    assert found.layer in dict(model.named_modules())
    assert found.reason.endswith(".")
    return found.outcome, found.layer


def test_one_image_in_front_of_a_linear_layer_is_a_quotient() -> None:
    assert of(MLP, PlannedTraining(1))[0] == "reconstructible"
    assert of(MLP, PlannedTraining(16), widths=[256])[0] == "reconstructible"
    assert of(MLP, PlannedTraining(64), widths=[32])[0] == "not by these attacks"
    assert of(MLP, PlannedTraining(20), widths=[64])[0] == "unknown"


def test_a_layer_without_a_bias_is_unknown() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4, bias=False), nn.ReLU(), nn.Linear(4, 2))
    assert predict(model, (3, 2, 2), PlannedTraining(1)).outcome == "unknown"


@pytest.mark.parametrize(
    ("training", "outcome"),
    [
        (PlannedTraining(1), "reconstructible"),
        (PlannedTraining(2), "reconstructible"),
        (PlannedTraining(4), "unknown"),
        (PlannedTraining(32), "not by these attacks"),
        (PlannedTraining(2, steps=5), "unknown"),
    ],
)
def test_a_smooth_network_is_counted(training: PlannedTraining, outcome: str) -> None:
    assert of(LeNet, training)[0] == outcome


def test_batch_norm_in_training_mode_and_batches_decide_behind_deep_networks() -> None:
    assert of(ResNet20, PlannedTraining(1), width=16)[0] == "reconstructible"
    outcome, layer = of(ResNet18, PlannedTraining(1, "train"), width=8)
    assert outcome == "not by these attacks"
    assert isinstance(build_model(ResNet18, seed=0, width=8, **FACTS).get_submodule(layer), nn.BatchNorm2d)
    assert of(ResNet18, PlannedTraining(8), width=8)[0] == "not by these attacks"


def test_counts_are_those_of_a_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(80, 2))
    first, head = predict(model, (3, 8, 8), PlannedTraining(1)).layers
    assert (first.unknowns, first.gradient, first.positive) == (192, 5 * 3 * 9, True)
    assert 0 < first.outputs <= 80
    assert (head.unknowns, head.gradient, head.outputs) == (80, 82, 2)
    assert predict(model, (3, 8, 8), PlannedTraining(3)).layers[0].outputs == 0


def test_the_model_stays_in_its_mode_and_unchanged() -> None:
    model = build_model(ResNet18, seed=0, width=8, **FACTS).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    predict(model, (3, 32, 32), PlannedTraining(1))
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
