"""Building and checking of models, and input normalization."""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fl_privacy.errors import UserError, blamed_on, reason_of
from fl_privacy.models import huggingface, layers, text_model
from fl_privacy.types.modality import IMAGES, MODALITIES, ROWS, Modality
from fl_privacy.types.plan import Normalization
from fl_privacy.types.schema import Schema, schema_of


def build_model(
    factory: Callable[..., nn.Module], *, seed: int, in_channels: int, image_size: int, num_classes: int, **options: Any
) -> nn.Module:
    """Build a model for square images; ``factory`` and further arguments are those of :func:`build_fitting`."""
    facts = {"in_channels": in_channels, "image_size": image_size, "num_classes": num_classes}
    return build_fitting(factory, facts, seed=seed, **options)


def build_fitting(
    factory: Callable[..., nn.Module], architecture: Mapping[str, Any], *, seed: int, **options: Any
) -> nn.Module:
    """Build a model with initial values that depend only on ``seed``; global random streams are not affected.

    ``UserError`` if an argument is unknown or missing, the examples do not suit the model, or the result is no module.

    Args:
        factory: class or function that returns a module, or a ``functools.partial`` of one.
        architecture: properties of the examples, such as ``num_classes``; ``factory`` gets those that it accepts.
        options: further arguments of ``factory``. All models also take ``init``, ``mean`` and ``std`` (a number per
            channel); text models take ``lora_rank`` and ``lora_alpha`` for adapters.
    """
    arguments: tuple[Any, ...] = ()
    if isinstance(factory, functools.partial):
        arguments, options = factory.args, {**factory.keywords, **options}
        factory = factory.func
    signature = inspect.signature(factory)
    name = getattr(factory, "__name__", str(factory))
    # refuse a model of other examples than the data have, as far as its arguments show
    takes = next((kind for kind in MODALITIES if kind.facts & set(signature.parameters)), None)
    there = next((kind for kind in MODALITIES if kind.facts & set(architecture)), None)
    if takes is not None and there is not None and takes is not there:
        raise UserError(f"Model {name} is of {takes.models}, but the data are {there.data}; {there.remedy}.")
    options = {fact: value for fact, value in architecture.items() if fact in signature.parameters} | options
    init = None if "init" in signature.parameters else options.pop("init", None)
    rank, alpha = (options.pop(name, None) for name in ("lora_rank", "lora_alpha"))
    put_before = None
    if {"mean", "std"} & options.keys() and not {"mean", "std"} & set(signature.parameters):
        mean, std = options.pop("mean", None), options.pop("std", None)
        put_before = Normalization([0.0] if mean is None else mean, [1.0] if std is None else std)
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        allowed = ", ".join(p for p in signature.parameters if p not in architecture) or "none"
        raise UserError(f"Model {name}: {error}; its options are: {allowed}.") from error
    with torch.random.fork_rng(devices=[]), blamed_on(f"Model {name}"):
        torch.default_generator.manual_seed(seed)
        model = factory(*arguments, **options)
        if init is not None and isinstance(model, nn.Module):
            layers.initialize(model, init)
        if rank is not None and isinstance(model, nn.Module):
            model = huggingface.with_adapters(model, rank=rank, alpha=alpha)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"Model {name} is expected to return a torch.nn.Module, but got {type(model).__name__};"
            " point model._target_ to a module class."
        )
    return model if put_before is None else normalized(model, put_before)


@torch.no_grad()
def check_text_model(model: nn.Module, length: int, num_classes: int) -> None:
    """Raise ``UserError`` unless ``model`` takes texts of ``length`` tokens and returns logits."""
    name = type(model).__name__
    if not isinstance(model, text_model.TextModel):
        raise UserError(
            f"Texts expect a model derived from fl_privacy.models.TextModel, but got {name}; derive it from that."
        )
    tokens = torch.zeros(2, length, dtype=torch.long, device=model.words.weight.device)
    try:
        got = tuple(copy.deepcopy(model).eval()(tokens).shape)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        wanted = f"to take texts of {length} tokens"
        raise UserError(f"Model {name} is expected {wanted}, but: {reason_of(error)}; set data.max_length.") from error
    if got not in ((2, num_classes), (2, num_classes, length)):
        raise UserError(
            f"Model {name} is expected to return logits of {num_classes} classes, but got {got}; change its last layer."
        )


def check_table_model(model: nn.Module, schema: Schema, num_classes: int) -> nn.Module:
    """Check ``model`` like :func:`check_model`, set the model's ``schema`` if it has none, and return the model."""
    check_model(model, (schema.width,), num_classes, ROWS)
    if schema_of(model) is None:
        model.schema = schema  # type: ignore[assignment]
    return model


def check_model(model: nn.Module, input_shape: tuple[int, ...], num_classes: int, modality: Modality = IMAGES) -> None:
    """Raise ``UserError`` unless ``model`` takes ``modality`` inputs of ``input_shape`` and returns logits (B, K)."""
    name, what = type(model).__name__, f"{modality.one}s"
    shape = "x".join(map(str, input_shape))
    with torch.no_grad(), blamed_on(f"Model {name}, shown two {what} of {shape},"):
        trial = copy.deepcopy(model).eval()
        values = next(trial.parameters(), torch.empty(0))
        inputs = torch.zeros(2, *input_shape, device=values.device, dtype=values.dtype)
        try:
            logits = trial(inputs)
        except (RuntimeError, ValueError, TypeError) as error:
            sizes = "set data.image_size and data.channels to what the model takes"
            remedy = sizes if modality.pixels else modality.remedy
            raise UserError(f"Model {name} does not fit {what} of {shape}: {reason_of(error)}; {remedy}.") from error
    got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    if got != (2, num_classes):
        raise UserError(
            f"Model {name} is expected to return logits of shape (2, {num_classes}) for 2 {what} of {shape},"
            f" but got {got}; give its last layer {num_classes} outputs."
        )


@dataclass(frozen=True)
class _Hook:
    normalization: Normalization

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.normalization(inputs[0]), *inputs[1:]


def normalized(model: nn.Module, normalization: Normalization) -> nn.Module:
    """Return a copy of ``model`` that normalizes its input images first; parameters keep their names."""
    wrapped = copy.deepcopy(model)
    wrapped.register_forward_pre_hook(_Hook(normalization))
    return wrapped


def normalization_of(model: nn.Module) -> Normalization | None:
    """Return the normalization that ``normalized`` added to ``model``, or ``None``."""
    return next((h.normalization for h in model._forward_pre_hooks.values() if isinstance(h, _Hook)), None)
