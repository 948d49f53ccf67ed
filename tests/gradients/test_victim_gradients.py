import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fl_privacy.models import ConvNet, LeNet, ResNet20
from fl_privacy.models.gradients import Layered, OneByOne, Vectorized, VictimModel, frozen_copy, victim_gradients
from fl_privacy.models.gradients.choose_method import same_gradients, with_slope
from fl_privacy.types import LocalPlan, ModelState
from tests.selection import few

SHAPE = {"in_channels": 3, "image_size": 12, "num_classes": 4}


class Residual(nn.Module):
    """Writes into an activation in place, as torchvision's ResNets do, and calls a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding="same", padding_mode="reflect")
        self.norm = nn.BatchNorm2d(6)
        self.twice = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.act(self.stem(inputs))
        out = self.norm(self.twice(hidden))
        out += hidden
        return self.head(self.act(self.twice(out)).mean((2, 3)))


class Tokens(nn.Module):
    """Layer norm and linear layers over tokens, and a layer that this package does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 8, bias=False)
        self.scale = nn.PReLU(8)
        self.head = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = self.norm(self.embed(inputs).flatten(2).mT)
        return self.head(self.scale(self.mix(tokens).mT).mean(2))


class TwoInputs(nn.Module):
    """A layer that is no function of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = self.embed(inputs).flatten(2).mT
        return self.head(self.attend(tokens, tokens, tokens, need_weights=False)[0].mean(1))


class OwnParameter(nn.Module):
    """A parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.randn(3, 12, 12))
        self.head = nn.Linear(432, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head((inputs * self.offset).flatten(1))


class Encoder(nn.Module):
    """PyTorch's own transformer, which in evaluation asks its norms for their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(inputs).flatten(2).mT).mean(1))


class ByParts(Tokens):
    """Takes from a norm what only the plain one has."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * self.norm.normalized_shape[0]


class Branching(OwnParameter):
    """Decides by the data, which vmap can't follow."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs if inputs.sum() > 0 else -inputs)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet": lambda: LeNet(**SHAPE),
    "convnet": lambda: ConvNet(**SHAPE, width=4),
    "resnet20-group": lambda: ResNet20(**SHAPE, width=8, norm="group"),
    "resnet20-batch": lambda: ResNet20(**SHAPE, width=4),
    "residual": Residual,
    "tokens": Tokens,
}


def _victim_model(model: nn.Module, plan: LocalPlan) -> VictimModel:
    torch.manual_seed(0)
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
        elif name.endswith("running_mean"):
            buffer.normal_()
    frozen = frozen_copy(model, ModelState.of(model), plan, device=torch.device("cpu"), dtype=torch.float64)
    return VictimModel(frozen, [name for name, _ in model.named_parameters()], plan)


def _trial(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand((3, size, 3, 12, 12), generator=generator).double(), torch.tensor(
        [[0, 3, 1]] * size
    ).mT.contiguous()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("mode", few(["train", "eval"], 1))
@pytest.mark.parametrize("name", MODELS)
def test_all_ways_agree(name: str, mode, size: int) -> None:
    torch.manual_seed(1)
    victim_model = _victim_model(MODELS[name](), LocalPlan(batch_norm=mode, loss_scale=0.7))
    inputs, labels = _trial(size)
    expected = OneByOne(victim_model)(inputs, labels)
    for way in (Layered, Vectorized):
        found = way(victim_model)(inputs, labels)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-10)
    assert isinstance(victim_gradients(victim_model, inputs, labels), Layered)


@pytest.mark.parametrize("name", MODELS)
def test_slopes_by_the_inputs_and_soft_labels_agree(name: str) -> None:
    torch.manual_seed(1)
    victim_model = _victim_model(MODELS[name](), LocalPlan())
    inputs, _ = _trial(2)
    logits = torch.randn(3, 2, 4, dtype=torch.float64)
    slopes = []
    for way in (OneByOne, Layered, Vectorized):
        leaves = inputs.clone().requires_grad_(), logits.clone().requires_grad_()
        gradients = way(victim_model)(leaves[0], leaves[1].softmax(-1))
        slopes.append(torch.autograd.grad(sum(g.sin().sum() for g in gradients.values()), leaves))
    for other in slopes[1:]:
        torch.testing.assert_close(other, slopes[0], rtol=1e-7, atol=1e-9)


def test_a_third_derivative_is_refused() -> None:
    """What attacks follow is the second; the derivative of that would leave out how it depends on the inputs."""
    layered, (inputs, labels) = Layered(_victim_model(MODELS["lenet"](), LocalPlan())), _trial(2)
    leaf = inputs.clone().requires_grad_()
    loss = sum(g.square().sum() for g in layered(leaf, labels).values())
    (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.square().sum().backward()


def _near_kinks(image: Tensor) -> nn.Module:
    """Return a network whose ReLUs get ``image``'s activations within rounding errors of 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 12), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)).eval()
    with torch.no_grad():
        model[1].running_mean.copy_(model[0].double()(image.double()).flatten())
        model[1].running_var.uniform_(0.1, 2)
    return model.float()


def test_activations_near_zero_do_not_slow_attacks() -> None:
    """Methods round differently, so that an activation may be above 0 in one alone."""
    image = torch.rand(1, 3, 12, 12)
    model, plan = _near_kinks(image), LocalPlan(batch_norm="eval")
    frozen = frozen_copy(model, ModelState.of(model), plan, device=image.device, dtype=image.dtype)
    victim_model = VictimModel(frozen, [name for name, _ in model.named_parameters()], plan)
    trial = image.expand(2, 1, 3, 12, 12).contiguous(), torch.zeros(2, 1, dtype=torch.long)
    found, expected = (with_slope(way, *trial) for way in (Layered(victim_model), OneByOne(victim_model)))
    assert not same_gradients(found, expected)
    assert isinstance(victim_gradients(victim_model, *trial), Layered)


def test_layers_that_are_no_function_of_one_tensor_need_vmap() -> None:
    assert isinstance(victim_gradients(_victim_model(TwoInputs(), LocalPlan()), *_trial(1)), Vectorized)


def test_a_parameter_of_the_model_itself_does_not() -> None:
    assert isinstance(victim_gradients(_victim_model(OwnParameter(), LocalPlan()), *_trial(1)), Layered)


class Penalized(nn.Module):
    """A network that takes its norm's scale by name, as the penalty of FedProx does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 6, 4, 4), nn.BatchNorm2d(6), nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        penalty = dict(self.named_parameters())["norm.weight"].square().sum()
        return self.head(self.norm(self.stem(inputs)).sigmoid().mean((2, 3))) * penalty


def test_layers_that_are_taken_by_name_stay_whole() -> None:
    victim_model = _victim_model(Penalized(), LocalPlan(batch_norm="train"))
    found, expected = (way(*_trial(2)) for way in (victim_gradients(victim_model, *_trial(2)), OneByOne(victim_model)))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", [Encoder, ByParts])
def test_networks_that_look_into_their_norms_have_the_right_gradients(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    victim_model = _victim_model(kind().eval(), LocalPlan(batch_norm="eval"))
    found, expected = (way(*_trial(2)) for way in (victim_gradients(victim_model, *_trial(2)), OneByOne(victim_model)))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-10)


def test_what_vmap_cannot_follow_is_looped_and_only_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "fl_privacy.models.gradients"), warnings.catch_warnings(action="error"):
        assert isinstance(victim_gradients(_victim_model(Branching(), LocalPlan()), *_trial(1)), OneByOne)
    (record,) = caplog.records
    assert record.levelname == "INFO" and "Branching can't be batched" in record.getMessage()


def test_dropout_is_off_and_the_model_untouched() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.9), nn.Linear(432, 4))
    victim_model = _victim_model(model, LocalPlan())
    inputs, labels = _trial(1)
    torch.testing.assert_close(Layered(victim_model)(inputs, labels), Layered(victim_model)(inputs, labels))
    assert model[1].p == 0.9
    assert all(p.requires_grad for p in model.parameters())


def test_hard_sigmoids_are_differentiated_twice() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Hardsigmoid(inplace=True), nn.Flatten(), nn.Linear(400, 4))
    state, cpu = ModelState.of(model), torch.device("cpu")
    copied = frozen_copy(model, state, LocalPlan(), device=cpu, dtype=torch.float32)
    images = torch.rand(2, 3, 12, 12).requires_grad_()
    outputs = copied(images)
    torch.testing.assert_close(outputs, model(images))
    (slope,) = torch.autograd.grad(outputs.square().sum(), images, create_graph=True)
    assert bool(torch.autograd.grad(slope.square().sum(), images)[0].any())
