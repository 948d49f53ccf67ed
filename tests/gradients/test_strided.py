"""Transposes of strided convolutions beside PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fl_privacy.models.gradients import LayerCall, convolution
from fl_privacy.models.gradients.convolution import better_by_phases, better_by_products, transposed
from fl_privacy.models.gradients.layered import parameter_gradients


@pytest.mark.parametrize(
    ("images", "kernel", "stride", "padding"),
    [
        ((16, 3, 32, 32), (5, 5), 2, (2, 2)),
        ((2, 3, 29, 31), (5, 3), 2, (3, 1)),
        ((1, 2, 9, 8), (1, 1), 2, (0, 0)),
        ((2, 2, 11, 7), (3, 3), 2, (1, 0)),
        ((2, 1, 12, 12), (4, 4), 4, (0, 0)),
        ((2, 2, 10, 10), (5, 5), 3, (1, 2)),
        ((2, 2, 13, 13), (2, 2), 3, (0, 0)),
    ],
)
def test_phases_are_the_transpose(images, kernel, stride, padding):
    torch.manual_seed(0)
    x = torch.randn(images, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, images[1], *kernel, dtype=torch.float64)
    output = F.conv2d(x, weight, stride=stride, padding=padding)
    back = torch.randn_like(output)
    (expected,) = torch.autograd.grad(output, x, back)
    torch.testing.assert_close(transposed(back, weight, images, stride, padding), expected)


@pytest.mark.parametrize("victims", [16, 2])
def test_both_ways_give_the_same_derivatives(monkeypatch, victims):
    layer = nn.Conv2d(3, 12, 5, 2, padding=2).double()
    frozen = convolution.convolution_as(convolution.FrozenConv2d, layer)
    images = torch.randn(victims, 1, 3, 16, 16, dtype=torch.float64)
    assert better_by_phases(layer.weight, 16, (2, 2), (1, 1), 1)
    assert better_by_products(images.flatten(0, 2)[None], (12 * victims, 3, 5, 5), (2, 2), (1, 1))

    def slope() -> torch.Tensor:
        x = images.clone().requires_grad_()
        output = frozen(x.flatten(0, 1))
        (deltas,) = torch.autograd.grad(output.square().sum(), output, create_graph=True)
        call = LayerCall(frozen, {"weight": "w", "bias": "b"}, x, deltas.unsqueeze(1))
        found = parameter_gradients(call, ["weight", "bias"])
        (by_images,) = torch.autograd.grad(sum(g.square().sum() for g in found.values()), x)
        return by_images

    quick = slope()
    monkeypatch.setattr(convolution, "better_by_phases", lambda *told: False)
    monkeypatch.setattr(convolution, "better_by_products", lambda *told: False)
    torch.testing.assert_close(quick, slope())
