"""The initializations by their distributions."""

import math

import pytest
import torch
import torchvision
from torch import nn

from fl_privacy.models import INITIALIZERS, LeNet, ResNet10, ResNet18, initialize


def layers(model):
    return [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]


@pytest.fixture
def model():
    return LeNet(in_channels=3, image_size=32, num_classes=10, width=32)


@pytest.mark.parametrize(("name", "bound"), [("uniform_0.5", 0.5), ("uniform_0.3", 0.3)])
def test_uniform_covers_every_parameter(model, name, bound):
    initialize(model, name, generator=torch.Generator().manual_seed(0))
    for parameter in model.parameters():
        assert parameter.abs().max() <= bound
        assert parameter.abs().max() > 0.5 * bound
    values = torch.cat([p.flatten() for p in model.parameters()])
    assert abs(values.mean()) < 0.01
    assert abs(values.std() - bound / math.sqrt(3)) < 0.01 * bound


def test_xavier_normal(model):
    initialize(model, "xavier_normal", generator=torch.Generator().manual_seed(0))
    for layer in layers(model):
        receptive = layer.weight[0, 0].numel() if isinstance(layer, nn.Conv2d) else 1
        fan_in, fan_out = layer.weight.shape[1] * receptive, layer.weight.shape[0] * receptive
        assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / (fan_in + fan_out)), rel=0.05)
        assert torch.count_nonzero(layer.bias) == 0


def test_kaiming_uniform(model):
    initialize(model, "kaiming_uniform", generator=torch.Generator().manual_seed(0))
    for layer in layers(model):
        fan_in = layer.weight[0].numel()
        assert layer.weight.abs().max().item() == pytest.approx(math.sqrt(6 / fan_in), rel=0.01)
        assert torch.count_nonzero(layer.bias) == 0


def test_kaiming_normal_fan_out_is_that_of_torchvisions_residual_networks():
    model = ResNet18(in_channels=3, image_size=32, num_classes=10, width=32)
    linear = model.classifier.weight.clone(), model.classifier.bias.clone()
    initialize(model, "kaiming_normal_fan_out", generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    reference = torchvision.models.resnet18(num_classes=10)
    shapes = {layer.weight.shape: layer.weight.std() for layer in layers(reference) if isinstance(layer, nn.Conv2d)}
    compared = 0
    for layer in layers(model)[:-1]:
        fan_out = layer.weight.shape[0] * layer.weight[0, 0].numel()
        assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.05)
        if layer.weight.shape in shapes:
            assert layer.weight.std().item() == pytest.approx(shapes[layer.weight.shape].item(), rel=0.05)
            compared += 1
    assert compared >= 5
    assert torch.equal(model.classifier.weight, linear[0]) and torch.equal(model.classifier.bias, linear[1])


@pytest.mark.parametrize("name", [name for name in INITIALIZERS if name != "default"])
def test_generator_decides(name):
    def weights(seed):
        model = ResNet10(in_channels=1, image_size=8, num_classes=2, width=4)
        initialize(model, name, generator=torch.Generator().manual_seed(seed))
        return model.stem[0].weight

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
