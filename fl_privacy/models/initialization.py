"""The papers' weight initializations by name."""

from collections.abc import Callable

import torch
from torch import nn

from fl_privacy.checks import one_of

Initializer = Callable[[nn.Module, torch.Generator | None], None]
"""(model, generator or None for torch's global one): sets the values in place."""


def _default(model: nn.Module, generator: torch.Generator | None) -> None:
    """What the layers drew when they were made."""


def _uniform(bound: float) -> Initializer:
    def fill(model: nn.Module, generator: torch.Generator | None) -> None:
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -bound, bound, generator=generator)

    return fill


def _kaiming_uniform(model: nn.Module, generator: torch.Generator | None) -> None:
    for layer in _weighted_layers(model):
        nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu", generator=generator)


def _kaiming_normal_fan_out(model: nn.Module, generator: torch.Generator | None) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu", generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def _xavier_normal(model: nn.Module, generator: torch.Generator | None) -> None:
    for layer in _weighted_layers(model):
        nn.init.xavier_normal_(layer.weight, gain=1.0, generator=generator)


def _weighted_layers(model: nn.Module) -> list[nn.Conv2d | nn.Linear]:
    """The convolutions and linear layers, their biases set to zero."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    for layer in layers:
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return layers


INITIALIZERS: dict[str, Initializer] = {
    "default": _default,
    "uniform_0.5": _uniform(0.5),
    "uniform_0.3": _uniform(0.3),
    "kaiming_uniform": _kaiming_uniform,
    "kaiming_normal_fan_out": _kaiming_normal_fan_out,
    "xavier_normal": _xavier_normal,
}


def initialize(model: nn.Module, name: str, *, generator: torch.Generator | None = None) -> None:
    """Set the parameters of ``model`` in place.

    Args:
        model: any module.
        name: ``default`` keeps PyTorch's; ``uniform_0.5`` draws *every* parameter, biases included, from
            U(-0.5, 0.5) (DLG, Zhu et al. 2019); ``uniform_0.3`` from U(-0.3, 0.3) (SPN, Fan et al. 2020);
            ``kaiming_uniform`` (by the number of inputs) and ``xavier_normal`` (gain 1, SAPAG) set the weights of
            convolutions and linear layers, their biases to zero; ``kaiming_normal_fan_out`` those of convolutions
            alone, normal by the number of outputs (He et al. 2015), as torchvision and the code of "Inverting
            Gradients" start residual networks.
        generator: source of the draws; PyTorch's global one if ``None``.

    Raises:
        UserError: unknown ``name``.
    """
    one_of("model.init", name, INITIALIZERS)
    INITIALIZERS[name](model, generator)
