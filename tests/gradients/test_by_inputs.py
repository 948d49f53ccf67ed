"""The gradient of a batch and its derivative by the inputs, against differentiating the loss twice."""

import pytest
import torch
from torch import nn

from fl_privacy.models import LeNet, ResNet20
from fl_privacy.models.gradients import choose_method as by_inputs, gradient_by_inputs, loss_gradients
from fl_privacy.types import Batch, LocalPlan, ModelState

SHAPE = {"in_channels": 3, "image_size": 8, "num_classes": 5}


class Mixed(nn.Module):
    """A weight that is used outside of its layer's own forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(192, 6), nn.Linear(6, 5)

    def forward(self, images):
        hidden = torch.tanh(self.first(images.flatten(1)))
        return self.last(hidden + hidden @ self.last.weight.T @ self.last.weight)


MODELS = {
    "lenet": (lambda: LeNet(**SHAPE), "eval", "folded"),
    "resnet": (lambda: ResNet20(**SHAPE, width=2), "eval", "folded"),
    "batch statistics": (lambda: ResNet20(**SHAPE, width=2), "train", "folded"),
    "weights used elsewhere": (Mixed, "eval", "plain"),
    "dropout": (lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, 5)), "eval", "untried"),
}


def slope_of(gradients, inputs):
    return torch.autograd.grad(sum((g**3).sum() for g in gradients.values()), inputs)[0]


@pytest.mark.parametrize("name", MODELS)
def test_gradient_and_slope_are_those_of_the_loss(name):
    make, batch_norm, way = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    plan, labels = LocalPlan(batch_norm=batch_norm, loss_scale=1.7), torch.arange(4) % 5
    images = [torch.rand(4, 3, 8, 8, dtype=torch.float64) for _ in range(2)]
    names = [n for n, _ in model.named_parameters()][1:]
    for _ in range(2):
        gradient = gradient_by_inputs(model, ModelState.of(model), Batch(images[0], labels), names, plan=plan)
        with torch.no_grad():
            model.get_parameter(names[0]).mul_(1.5)
    with torch.no_grad():
        model.get_parameter(names[0]).div_(1.5)
    inputs = images[1].requires_grad_()
    torch.manual_seed(7)
    found = gradient(inputs)
    torch.manual_seed(7)
    expected = loss_gradients(
        model, ModelState.of(model), Batch(inputs, labels), batch_norm=batch_norm, loss_scale=1.7, create_graph=True
    ).gradients
    assert list(found) == names
    for n in names:
        torch.testing.assert_close(found[n], expected[n], rtol=1e-9, atol=1e-12)
    expected_slope = slope_of({n: expected[n] for n in names}, inputs)
    torch.testing.assert_close(slope_of(found, inputs), expected_slope, rtol=1e-8, atol=1e-12)
    tried = set(by_inputs._tried.get(model, {}).values())
    assert tried == (set() if way == "untried" else {way})


def test_what_was_tried_is_tried_again_with_other_layers():
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
    one = Batch(torch.rand(1, 3, 8, 8), torch.tensor([1]))
    names = [n for n, _ in model.named_parameters()]
    gradient_by_inputs(model, ModelState.of(model), one, names, plan=LocalPlan())
    two = Batch(torch.rand(3, 3, 8, 8), torch.arange(3))
    gradient_by_inputs(model, ModelState.of(model), two, names[:1], plan=LocalPlan())
    assert len(by_inputs._tried[model]) == 2
