"""A model that was trained on normalized images, in front of images in [0, 1]."""

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn

from fl_privacy.normalization import Normalization


@dataclass(frozen=True)
class _Hook:
    normalization: Normalization

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.normalization(inputs[0]), *inputs[1:]


def normalized(model: nn.Module, normalization: Normalization) -> nn.Module:
    """A copy of ``model`` that takes images in [0, 1] and normalizes them first; no parameter changes its name."""
    wrapped = copy.deepcopy(model)
    wrapped.register_forward_pre_hook(_Hook(normalization))
    return wrapped


def normalization_of(model: nn.Module) -> Normalization | None:
    """What ``normalized`` put in front of ``model``; ``None`` for a model that takes images as they are."""
    hooks = model._forward_pre_hooks.values()
    return next((hook.normalization for hook in hooks if isinstance(hook, _Hook)), None)
