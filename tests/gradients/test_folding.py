"""Norms that are folded into convolutions: the same gradients and slopes, and only where nothing else reads them."""

import torch
from torch import nn

from fl_privacy.models import ConvNet, ResNet20
from fl_privacy.models.gradients import Layered, VictimModel, frozen_copy, victim_gradients
from fl_privacy.models.gradients.convolution import FoldedConvolution
from fl_privacy.types import LocalPlan, ModelState

PLAN = LocalPlan(batch_norm="eval")


class Twice(nn.Module):
    """Reads a convolution's outputs before and behind the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.classifier = nn.Linear(4, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.convolution(inputs)
        return self.classifier((found + self.norm(found).tanh()).mean((2, 3)))


def victim_model(model: nn.Module) -> VictimModel:
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for values in (module.weight.data, module.running_mean, module.running_var, module.bias.data):
                values.uniform_(0.5, 1.5)
            module.weight.data[0] = 0  # as residual branches start
    frozen = frozen_copy(model, ModelState.of(model), PLAN, device=torch.device("cpu"), dtype=torch.float64)
    return VictimModel(frozen, [name for name, _ in frozen.named_parameters()], PLAN)


def gradients_and_slope(gradients, inputs, labels):
    leaf = inputs.clone().requires_grad_()
    found = gradients(leaf, labels)
    weights = {name: torch.linspace(-1, 1, value.numel()).reshape(value.shape) for name, value in found.items()}
    (slope,) = torch.autograd.grad(sum((found[name].square() * weights[name]).sum() for name in found), leaf)
    return {**{name: value.detach() for name, value in found.items()}, "slope": slope}


def folded(gradients: Layered) -> int:
    return sum(isinstance(module, FoldedConvolution) for module in gradients._model.modules())


def test_the_same_gradients_and_slopes() -> None:
    images = {"in_channels": 3, "image_size": 16, "num_classes": 10}
    for model in (ConvNet(**images, width=4, activation="tanh"), ResNet20(**images, width=4)):
        wanted = victim_model(model)
        inputs, labels = torch.rand(3, 2, 3, 16, 16, dtype=torch.float64), torch.arange(6).reshape(3, 2)
        plain, quick = Layered(wanted), Layered(wanted).folded(inputs)
        assert folded(quick) >= 3
        expected, found = (gradients_and_slope(one, inputs, labels) for one in (plain, quick))
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)
        again = quick.under(wanted)
        assert folded(again) == folded(quick)


def test_not_where_outputs_are_read_twice() -> None:
    wanted = victim_model(Twice())
    inputs, labels = torch.rand(2, 1, 3, 16, 16, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.long)
    assert folded(Layered(wanted).folded(inputs)) == 1
    chosen = victim_gradients(wanted, inputs, labels)
    assert isinstance(chosen, Layered)
    assert folded(chosen) == 0
