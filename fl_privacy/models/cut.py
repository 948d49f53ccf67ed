"""A model cut in two at the input of one of its layers."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fl_privacy.errors import UserError


def called_layers(model: nn.Module, image_shape: tuple[int, ...]) -> list[str]:
    """Names of the modules that own parameters, in the order in which an image meets them."""
    found: dict[str, None] = {}

    def noting(name: str) -> Callable[[nn.Module, object], None]:
        return lambda module, given: found.setdefault(name)

    owners = {name: m for name, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None}
    handles = [module.register_forward_pre_hook(noting(name)) for name, module in owners.items()]
    values = next(model.parameters())
    try:
        with torch.no_grad():
            model.eval()(values.new_zeros(1, *image_shape))
    finally:
        for handle in handles:
            handle.remove()
    return list(found)


def cut_layer(model: nn.Module, image_shape: tuple[int, ...], public: Collection[str]) -> str:
    """The first layer with public parameters behind the private ones; where nothing is private, the second layer.

    Args:
        model: architecture.
        image_shape: (C, H, W).
        public: names of the public parameters.

    Raises:
        UserError: there is no such layer.
    """
    layers = called_layers(model, image_shape)
    owned = {
        name: [f"{name}.{own}" for own, _ in model.get_submodule(name).named_parameters(recurse=False)]
        for name in layers
    }
    shared = [name for name in layers if any(own in public for own in owned[name])]
    found = next((name for name in shared if name != layers[0]), None)
    if found is None:
        raise UserError(
            f"A model of several layers is expected, of which the first may be private, but {type(model).__name__}"
            f" has {', '.join(layers)}; choose another model."
        )
    return found


class Front(nn.Module):
    """What ``model`` does up to ``layer``: images (B, C, H, W) -> the input of the layer (B, ...).

    The parameters are called ``model.NAME`` here.
    """

    def __init__(self, model: nn.Module, layer: str) -> None:
        super().__init__()
        if layer not in dict(model.named_modules()):
            raise UserError(f"features_at is expected to name a module of the model, but got {layer!r}.")
        self.model, self.layer = model, layer

    def forward(self, inputs: Tensor) -> Tensor:
        """As above."""
        seen: list[Tensor] = []

        def look(given: Tensor) -> Tensor:
            seen.append(given)
            return given

        with _at_input(self.model.get_submodule(self.layer), look):
            self.model(inputs)
        return seen[0]


class Rest(nn.Module):
    """What ``model`` does from ``layer`` on: the input of the layer (B, ...) -> logits (B, K).

    The parameters are called ``model.NAME`` here. What lies in front of the layer sees black images (C, H, W).
    """

    def __init__(self, model: nn.Module, layer: str, image_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.model, self.layer, self.image_shape = model, layer, image_shape

    def forward(self, features: Tensor) -> Tensor:
        """As above."""
        black = features.new_zeros(len(features), *self.image_shape)
        with _at_input(self.model.get_submodule(self.layer), lambda given: features):
            logits: Tensor = self.model(black)
        return logits


@contextmanager
def _at_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    handle = module.register_forward_pre_hook(lambda _, given: (change(given[0]),))
    try:
        yield
    finally:
        handle.remove()
