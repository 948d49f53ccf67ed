"""From a model's class, or any factory of a user's own, to a model that is known to fit the data."""

import copy
import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from fl_privacy.errors import UserError, blamed_on
from fl_privacy.models.initialization import initialize
from fl_privacy.models.wrapping import normalized
from fl_privacy.normalization import Normalization


def build_model(
    factory: Callable[..., nn.Module],
    *,
    seed: int,
    in_channels: int,
    image_size: int,
    num_classes: int,
    **options: Any,
) -> nn.Module:
    """Make a model: the same values for the same ``seed``, whatever was drawn before, and no draw from outside.

    Args:
        factory: a class or function that returns a module, or a ``functools.partial`` of one.
        seed: of the initial values.
        in_channels, image_size, num_classes: passed on where ``factory`` names such an argument and was not
            already given it.
        options: further arguments of ``factory``; unknown ones raise. ``init`` names an initialization (see
            ``initialize``) also of a model that does not know the names; ``mean`` and ``std``, lists of a number for
            each channel, normalize the images also in front of a model that does not know them.

    Raises:
        UserError: an argument is unknown or missing, or the result is not a module.
    """
    arguments: tuple[Any, ...] = ()
    if isinstance(factory, functools.partial):
        arguments, options = factory.args, {**factory.keywords, **options}
        factory = factory.func
    signature = inspect.signature(factory)
    offered = {"in_channels": in_channels, "image_size": image_size, "num_classes": num_classes}
    options = {name: value for name, value in offered.items() if name in signature.parameters} | options
    init = None if "init" in signature.parameters else options.pop("init", None)
    put_before = _normalization(signature.parameters, options)
    name = getattr(factory, "__name__", str(factory))
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        allowed = ", ".join(p for p in signature.parameters if p not in offered) or "none"
        raise UserError(f"Model {name}: {error}; its options are: {allowed}.") from error
    with torch.random.fork_rng(devices=[]), blamed_on(f"Model {name}"):
        torch.default_generator.manual_seed(seed)
        model = factory(*arguments, **options)
        if init is not None and isinstance(model, nn.Module):
            initialize(model, init)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"Model {name} is expected to return a torch.nn.Module, but got {type(model).__name__};"
            " point model._target_ to a module class."
        )
    return model if put_before is None else normalized(model, put_before)


def _normalization(parameters: Collection[str], options: dict[str, Any]) -> Normalization | None:
    """What ``options`` say of ``mean`` and ``std``, taken out of them, where the model does not take these itself."""
    if {"mean", "std"} & set(parameters) or not {"mean", "std"} & options.keys():
        return None
    mean, std = options.pop("mean", None), options.pop("std", None)
    return Normalization([0.0] if mean is None else mean, [1.0] if std is None else std)


def check_model(model: nn.Module, input_shape: tuple[int, ...], num_classes: int) -> None:
    """Run ``model`` once on black images to see that it fits the data; the model is left as it was.

    Args:
        model: on any device.
        input_shape: (C, H, W) of one example.
        num_classes: K.

    Raises:
        UserError: the model can't take such inputs or doesn't return logits (B, K).
    """
    name = type(model).__name__
    shape = "x".join(map(str, input_shape))
    with torch.no_grad(), blamed_on(f"Model {name}, shown two images of {shape},"):
        trial = copy.deepcopy(model).eval()
        values = next(trial.parameters(), torch.empty(0))
        inputs = torch.zeros(2, *input_shape, device=values.device, dtype=values.dtype)
        try:
            logits = trial(inputs)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"Model {name} does not fit images of {shape}: {reason.rstrip('.')};"
                " set data.image_size and data.channels to what the model takes."
            ) from error
    got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    if got != (2, num_classes):
        raise UserError(
            f"Model {name} is expected to return logits of shape (2, {num_classes}) for 2 images of {shape},"
            f" but got {got}; give its last layer {num_classes} outputs."
        )
