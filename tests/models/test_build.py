"""Building models: determinism, what is passed on, errors that say what to do."""

import functools

import pytest
import torch
from torch import nn

from fl_privacy.errors import UserError
from fl_privacy.models import LeNet, ResNet10, build_model, check_model

CIFAR = {"in_channels": 3, "image_size": 32, "num_classes": 10}


class Own(nn.Module):
    def __init__(self, num_classes: int, hidden: int = 4):
        super().__init__()
        self.head = nn.Linear(3 * 8 * 8, num_classes)
        self.hidden = hidden

    def forward(self, x):
        return self.head(x.flatten(1))


def values(model):
    return torch.cat([p.flatten() for p in model.parameters()])


@pytest.mark.parametrize("init", ["default", "uniform_0.5", "kaiming_uniform"])
def test_seed_alone_decides(init):
    torch.manual_seed(1)
    first = values(build_model(LeNet, seed=7, **CIFAR, init=init))
    torch.manual_seed(2)
    torch.rand(3)
    assert torch.equal(first, values(build_model(LeNet, seed=7, **CIFAR, init=init)))
    assert not torch.equal(first, values(build_model(LeNet, seed=8, **CIFAR, init=init)))


def test_global_stream_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    build_model(ResNet10, seed=0, **CIFAR, width=4)
    assert torch.equal(torch.rand(4), expected)


def test_own_module_gets_what_its_signature_accepts():
    model = build_model(Own, seed=0, in_channels=3, image_size=8, num_classes=5, hidden=9)
    assert model.head.out_features == 5
    assert model.hidden == 9
    assert isinstance(build_model(lambda: nn.Linear(2, 2), seed=0, **CIFAR), nn.Linear)


def test_own_module_starts_from_a_named_initialization():
    own, drawn = (
        build_model(Own, seed=0, in_channels=3, image_size=8, num_classes=5, init=i) for i in ("default", "uniform_0.5")
    )
    assert torch.equal(values(own), values(build_model(Own, seed=0, in_channels=3, image_size=8, num_classes=5)))
    assert 0.4 < values(drawn).abs().max() <= 0.5
    again = build_model(Own, seed=0, in_channels=3, image_size=8, num_classes=5, init="uniform_0.5")
    assert torch.equal(values(drawn), values(again))
    with pytest.raises(UserError, match=r"model\.init.*kaiming_normal_fan_out.*'zeros'"):
        build_model(Own, seed=0, in_channels=3, image_size=8, num_classes=5, init="zeros")


def test_partial_keeps_the_users_own_choice():
    partial = functools.partial(Own, num_classes=7)
    assert build_model(partial, seed=0, **CIFAR).head.out_features == 7


def test_build_on_the_command_lines_partial_names_the_unknown_option():
    with pytest.raises(UserError, match=r"activatoin.*activation, width"):
        build_model(functools.partial(LeNet, activatoin="relu"), seed=0, **CIFAR)
    with pytest.raises(UserError, match=r"torch\.nn\.Module"):
        build_model(lambda: "a string", seed=0, **CIFAR)


def test_check_accepts_what_fits_and_leaves_it_alone():
    model = build_model(ResNet10, seed=0, **CIFAR, width=4)
    before = {name: b.clone() for name, b in model.named_buffers()}
    model.stem.eval()
    check_model(model, (3, 32, 32), 10)
    assert model.training
    assert not model.stem.training
    assert all(torch.equal(before[name], b) for name, b in model.named_buffers())


@pytest.mark.parametrize(
    ("shape", "classes", "words"),
    [
        ((1, 32, 32), 10, "does not fit images of 1x32x32"),
        ((3, 28, 28), 10, "does not fit images of 3x28x28"),
        ((3, 32, 32), 7, r"shape \(2, 7\).*\(2, 10\)"),
    ],
)
def test_check_says_what_does_not_fit(shape, classes, words):
    with pytest.raises(UserError, match=words) as error:
        check_model(build_model(LeNet, seed=0, **CIFAR), shape, classes)
    assert "\n" not in str(error.value)
