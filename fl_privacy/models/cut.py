"""A model cut in two at the input of one of its layers."""

from collections.abc import Collection
from itertools import pairwise

import torch
from torch import Tensor, nn

from fl_privacy.errors import UserError
from fl_privacy.models.gradients.hooks import entering, owners, replaced_input

NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)


def called_layers(model: nn.Module, image_shape: tuple[int, ...]) -> list[str]:
    """Return names of the modules that own parameters, in the order of the forward pass."""
    return _order(model, owners(model), image_shape)


def _order(model: nn.Module, modules: dict[str, nn.Module], image_shape: tuple[int, ...]) -> list[str]:
    modes = [(module, module.training) for module in model.modules()]
    with torch.no_grad(), entering(modules) as calls:
        try:
            model.eval()(next(model.parameters()).new_zeros(1, *image_shape))
        finally:
            for module, training in modes:
                module.training = training
    return list(dict.fromkeys(call.name for call in calls))


def cut_layer(model: nn.Module, image_shape: tuple[int, ...], public: Collection[str]) -> str:
    """Return the first layer after the last private one in the forward pass, or the second layer if nothing is private.

    Args:
        image_shape: (C, H, W).
        public: names of the public parameters.

    Raises:
        UserError: there is no such layer.
    """
    layers = called_layers(model, image_shape)
    owned = {name: model.get_submodule(name).named_parameters(recurse=False) for name in layers}
    private = [name for name in layers if not any(f"{name}.{own}" in public for own, _ in owned[name])]
    behind = layers[layers.index(private[-1]) + 1 :] if private else layers[1:]
    if not behind:
        raise UserError(
            f"A model with a public layer behind the private ones is expected, but {type(model).__name__} has"
            f" {', '.join(layers)}, of which {', '.join(private) or 'none'} is private; keep earlier layers private."
        )
    return behind[0]


def behind_activation(model: nn.Module, image_shape: tuple[int, ...], public: Collection[str]) -> str:
    """Return the module after the activation of the last private layer, or of the first layer if nothing is private.

    FDL-PP's private part is a layer with its activation (Gu et al. 2021, Definition 4); pooling after it is public.
    Without a module for the activation, this is ``cut_layer``.
    """
    layers = called_layers(model, image_shape)
    first = cut_layer(model, image_shape, public)
    last = layers[layers.index(first) - 1]
    leaves = {name: m for name, m in model.named_modules() if name and next(m.children(), None) is None}
    order = _order(model, leaves, image_shape)
    behind = order[order.index(last) + 1 :] if last in order else []
    for name, following in pairwise(behind):
        if type(leaves[name]).__module__ == nn.ReLU.__module__:
            return following
        if name in layers and not isinstance(leaves[name], NORMS):
            break
    return first


class Front(nn.Module):
    """Front of ``model`` up to ``layer``: images (B, C, H, W) -> the input of the layer (B, ...).

    Parameters are called ``model.NAME``.
    """

    def __init__(self, model: nn.Module, layer: str) -> None:
        super().__init__()
        if layer not in dict(model.named_modules()):
            raise UserError(
                f"A module to cut the model at is expected, but {type(model).__name__} has no {layer!r};"
                " name one that it has."
            )
        self.model, self.layer = model, layer

    def forward(self, inputs: Tensor) -> Tensor:
        def stop(given: Tensor) -> Tensor:
            raise _ReachedError(given)

        try:
            with replaced_input(self.model.get_submodule(self.layer), stop):
                self.model(inputs)
        except _ReachedError as reached:
            features: Tensor = reached.args[0]
            return features
        raise UserError(
            f"An image is expected to pass {self.layer} of {type(self.model).__name__}, but does not;"
            " cut the model at a module that is called."
        )


class _ReachedError(Exception):
    """Ends the pass at a layer; the argument is its input."""


class Rest(nn.Module):
    """Rest of ``model`` from ``layer`` on: the input of the layer (B, ...) -> logits (B, K).

    Parameters are called ``model.NAME``. The layers before see black images (C, H, W).
    """

    def __init__(self, model: nn.Module, layer: str, image_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.model, self.layer, self.image_shape = model, layer, image_shape

    def forward(self, features: Tensor) -> Tensor:
        black = features.new_zeros(len(features), *self.image_shape)
        with replaced_input(self.model.get_submodule(self.layer), lambda given: features):
            logits: Tensor = self.model(black)
        return logits
