"""What is predicted of networks agrees with what attacks reconstruct, and says which layer decides."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.attacks import prediction
from fl_privacy.attacks.prediction import PlannedTraining, predict
from fl_privacy.models import MLP, LeNet, ResNet18, ResNet20, TableMLP, build_fitting, build_model
from fl_privacy.types.schema import Column, Schema
from tests.attacks.exact.test_residual import blocks

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
    assert of(MLP, PlannedTraining(64), widths=[32])[0] == "unknown"
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
    for size in (1, 4):
        assert of(ResNet18, PlannedTraining(size, "train"), width=8)[0] == "unknown", (
            "running statistics may be uploaded"
        )
    outcome, layer = of(ResNet18, PlannedTraining(5, "train"), width=8)
    assert outcome == "not by these attacks"
    assert isinstance(build_model(ResNet18, seed=0, width=8, **FACTS).get_submodule(layer), nn.BatchNorm2d)
    assert of(ResNet18, PlannedTraining(8), width=8)[0] == "not by these attacks"


@pytest.mark.parametrize("solved", [False, True])
def test_one_image_behind_a_residual_network_is_rehearsed(solved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "_is_solved", lambda model, shape: solved)
    outcome, _ = of(ResNet20, PlannedTraining(1), width=16)
    assert outcome == ("reconstructible" if solved else "unknown")


@pytest.mark.fuzz
def test_the_rehearsal_solves_what_the_exact_attack_solves() -> None:
    """CIFAR-10's first three test images behind that ResNet-20 are reconstructed at 28, 45 and 40 dB."""
    assert predict(blocks(), (3, 16, 16), PlannedTraining(1)).outcome == "reconstructible"
    assert of(ResNet20, PlannedTraining(1), width=16)[0] == "reconstructible"


@pytest.mark.parametrize(
    ("activation", "batch_size", "outcome"),
    [(nn.Tanh, 2, "unknown"), (nn.GELU, 1, "unknown"), (nn.ReLU, 2, "unknown"), (nn.ReLU, 8, "not by these attacks")],
)
def test_what_descents_reconstruct_behind_ten_layers_is_not_called_private(
    activation: type[nn.Module], batch_size: int, outcome: str
) -> None:
    """MNIST at 14x14 behind nine convolutions of 12 channels: 84 dB of two, 63 dB of one, and 25 dB of two by auto."""
    blocks = [layer for k in range(9) for layer in (nn.Conv2d(12 if k else 1, 12, 3, padding=1), activation())]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(12 * 14 * 14, 10))
    assert predict(model, (1, 14, 14), PlannedTraining(batch_size)).outcome == outcome


def test_counts_are_those_of_a_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(80, 2))
    first, head = predict(model, (3, 8, 8), PlannedTraining(1)).layers
    assert (first.unknowns, first.gradient) == (192, 5 * 3 * 9)
    assert 0 < first.outputs <= 80
    assert (head.unknowns, head.gradient, head.outputs) == (80, 82, 2)
    assert predict(model, (3, 8, 8), PlannedTraining(3)).layers[0].outputs == 0


def test_the_model_stays_in_its_mode_and_unchanged() -> None:
    model = build_model(ResNet18, seed=0, width=8, **FACTS).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    predict(model, (3, 32, 32), PlannedTraining(2))
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Functional(nn.Module):
    """A small network whose activations and pools are functions, as in Flower's quickstart."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation, self.first, self.head = activation, nn.Conv2d(3, 24, 3), nn.Linear(24 * 9, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(F.max_pool2d(getattr(F, self.activation)(self.first(images)), 2).flatten(1))


@pytest.mark.parametrize("name", ["clamp_min", "maximum", "hardsigmoid"])
def test_other_kinks_are_not_smooth(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = {"clamp_min": lambda x: x.clamp(min=0), "maximum": lambda x: torch.maximum(x, torch.zeros(()))}
    monkeypatch.setattr(F, "kinked", written.get(name, F.hardsigmoid), raising=False)
    assert predict(Functional("kinked"), (3, 8, 8), PlannedTraining(2)).outcome == "unknown"


@pytest.mark.parametrize("kind", [nn.ReLU, nn.GELU, nn.Sigmoid])
def test_functions_count_like_modules(kind: type[nn.Module]) -> None:
    modules = nn.Sequential(nn.Conv2d(3, 24, 3), kind(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24 * 9, 10))
    own = Functional(kind.__name__.lower())
    found = [predict(model, (3, 8, 8), PlannedTraining(2)).outcome for model in (modules, own)]
    assert found == ["reconstructible" if kind is nn.Sigmoid else "unknown"] * 2


class Patches(nn.Module):
    """A linear layer, or a convolution, on patches of 4x4 pixels, without position embeddings."""

    def __init__(self, *, linear: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.head = linear, nn.LayerNorm(64), nn.Linear(64, 10)
        self.patches = nn.Linear(48, 64) if linear else nn.Conv2d(3, 64, 4, 4)

    def forward(self, images: Tensor) -> Tensor:
        cut = F.unfold(images, 4, stride=4).mT if self.linear else images
        tokens = self.patches(cut) if self.linear else self.patches(cut).flatten(2).mT
        return self.head(self.norm(tokens).mean(1))


@pytest.mark.parametrize("linear", [False, True])
def test_patches_without_positions_are_not_solved_for(linear: bool) -> None:
    found = predict(Patches(linear=linear), (3, 16, 16), PlannedTraining(1))
    assert "position" not in found.reason and "divided" not in found.reason
    assert not linear or found.outcome == "unknown"


class NormedPatches(Patches):
    """Patches with position embeddings, and batch norm behind a residual block and in front of eight layers."""

    def __init__(self) -> None:
        super().__init__(linear=False)
        self.positions, self.norm = nn.Parameter(0.02 * torch.randn(16, 64)), nn.BatchNorm1d(64)
        self.block = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.rest = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())))

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).mT + self.positions
        tokens = tokens + self.block(tokens)
        return self.head(self.rest(self.norm(tokens.mT).mT).mean(1))


def test_position_embeddings_decide_before_batch_norm_does() -> None:
    """The exact attack reconstructs CIFAR-10's images in 8x8 patches at 51 and 59 dB, with the batch's statistics."""
    training = PlannedTraining(1, "train")
    assert predict(NormedPatches(), (3, 16, 16), training).outcome == "reconstructible"


def test_parameters_without_use_and_doubles_are_no_errors() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    model[0].unused = nn.Linear(3, 3)
    assert isinstance(prediction._is_solved(model, (3, 8, 8)), bool)
    assert predict(model.double(), (3, 8, 8), PlannedTraining(1)).layers


def test_layers_that_are_not_counted_never_make_it_private() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.rest, self.head = nn.Conv2d(3, 1, 1), nn.Conv1d(16, 64, 3), nn.Linear(64 * 14, 10)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.rest(self.stem(images)[:, 0]).flatten(1))

    found = predict(Rows(), (3, 16, 16), PlannedTraining(64))
    assert (found.outcome, found.layer) == ("unknown", "rest") and "Conv1d" in found.reason


def test_parameters_that_are_not_trained_leave_it_unknown() -> None:
    model = build_model(MLP, seed=0, **FACTS)
    model.features[0].weight.requires_grad_(False)
    found = predict(model, (3, 32, 32), PlannedTraining(1))
    assert (found.outcome, found.layer) == ("unknown", "features.0")


def test_several_rows_behind_few_outputs_are_not_called_private() -> None:
    """TabLeak reconstructs most cells of 128 rows behind 100 outputs, with their categories."""
    schema = Schema(columns=tuple(Column(name=name, shift=(0.0,), scale=(1.0,)) for name in "abc"))
    model = build_fitting(TableMLP, {"schema": schema, "num_classes": 2}, seed=0)
    assert predict(model, (3,), PlannedTraining(128)).outcome == "unknown"


@pytest.mark.parametrize(
    ("size", "reason"), [(1, "behind gelu and more than 2 convolutions"), (64, "may not be enough")]
)
def test_a_reason_names_the_activations_of_the_network_if_equations_suffice(size: int, reason: str) -> None:
    layers = [each for inner in (3, 16, 16) for each in (nn.Conv2d(inner, 16, 3, padding=1), nn.GELU())]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 2))
    found = predict(model, (3, 8, 8), PlannedTraining(size))
    assert found.outcome == "unknown" and reason in found.reason and "ReLU" not in found.reason
