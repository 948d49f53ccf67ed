"""Conversion of models for attacks: wrappers are removed, and the output becomes one tensor (B, K)."""

import copy
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from fl_privacy.errors import UserError, reason_of
from fl_privacy.rng import streams_put_back

_WRAPPERS = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
"""Class name of a wrapper -> its attribute with the wrapped model."""

_OUTPUTS = ("logits", "output", "out", "outputs", "prediction", "predictions")
"""Names of logits in structured outputs of models."""

_copies: "WeakKeyDictionary[nn.Module, nn.Module]" = WeakKeyDictionary()
"""Model -> its converted copy, if it needed one."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside ``nn.DataParallel`` or ``torch.compile``; other models are unchanged."""
    while (attribute := _WRAPPERS.get(type(model).__name__)) is not None:
        model = getattr(model, attribute)
    return model


def plain_names(model: nn.Module) -> dict[str, str]:
    """Return a mapping from the names of parameters and buffers to those without the wrappers' prefixes."""
    wrapped = [
        f"{path}." if path else "" for path, module in model.named_modules(remove_duplicate=False) if _wraps(module)
    ]
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    found = {}
    for name, _ in tensors:
        plain = name
        for prefix in sorted(wrapped, key=len, reverse=True):
            if plain.startswith(prefix):
                plain = prefix + re.sub(r"^(module|_orig_mod)\.", "", plain.removeprefix(prefix))
        found[name] = plain
    return found


def plain_model(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Return ``model`` without wrappers such as ``torch.compile``, and with a tensor (B, K) as its output.

    Changes are made to a copy. ``shape``: (C, H, W) of an input. ``UserError`` if the input or the output does not fit.
    """
    model = unwrapped(model)
    if model in _copies:
        return _copies[model]
    found = model
    if any(_wraps(module) for module in model.modules()):
        found = detached_copy(model)
        for module in list(found.modules()):
            for name, child in module._modules.items():
                if child is not None and _wraps(child):
                    module._modules[name] = unwrapped(child)
    if not all(isinstance(made, Tensor) and made.dim() == 2 for made in _made(found, shape)):
        found = detached_copy(found) if found is model else found
        found.register_forward_hook(lambda module, given, output: outputs_of(output))
        for made in _made(found, shape):
            if not (isinstance(made, Tensor) and made.dim() == 2 and len(made) == 2):
                got = f"a tensor {tuple(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
                raise UserError(
                    f"The model is expected to return outputs (B, K), but returns {got} for two images; wrap it in a"
                    " module that returns the tensor that the loss is of."
                )
    if found is not model:
        _copies[model] = found
    return found


def detached_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy of ``model``, after detaching weights that weight norm has computed in ``model`` itself."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            name = getattr(hook, "name", None)
            value = getattr(module, name, None) if isinstance(name, str) else None
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.grad_fn is not None:
                setattr(module, name, value.detach())  # type: ignore[arg-type]
    return copy.deepcopy(model)


def outputs_of(given: object) -> object:
    """Return the output tensor in a model's result ``given``, with (B,) reshaped to (B, 1).

    The result may be a mapping, a sequence or an object; if it holds no tensor, it is returned unchanged.
    """
    if isinstance(given, Mapping):
        given = next((given[name] for name in _OUTPUTS if name in given), given)
    elif not isinstance(given, Tensor):
        found = (getattr(given, name, None) for name in _OUTPUTS)
        given = next((value for value in found if isinstance(value, Tensor)), given)
    if isinstance(given, tuple | list) and given and isinstance(given[0], Tensor):
        given = given[0]
    return given.unsqueeze(1) if isinstance(given, Tensor) and given.dim() == 1 else given


def _wraps(module: nn.Module) -> bool:
    return type(module).__name__ in _WRAPPERS


def _made(model: nn.Module, shape: tuple[int, ...]) -> Iterator[object]:
    for trial in (detached_copy(model).eval(), *((detached_copy(model),) if model.training else ())):
        like = next(trial.parameters())
        try:
            with torch.no_grad(), torch.random.fork_rng():
                yield trial(torch.zeros(2, *shape, dtype=like.dtype, device=like.device))
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            reason = reason_of(error)
            words = next((name for name, module in trial.named_modules() if isinstance(module, nn.Embedding)), None)
            if words is not None and re.search(r"indices|embedding|input_ids|Long", reason):
                raise UserError(
                    f"A model of images or rows is expected, but this one takes numbers of words (embedding: {words});"
                    " for texts make an encoder or decoder a fl_privacy.models.TextModel, or run"
                    " `fl-privacy attack data=sst2 model=hf`. This protects nobody: the rows of"
                    f" {words}.weight's gradient that are not zero are the words that the client used."
                ) from error
            wrap = "; wrap a model of several inputs in one of images alone" if "argument" in reason else ""
            raise UserError(
                f"The model is expected to take images of shape {shape}, but does not ({reason}); give"
                f" input_shape (--shape){wrap}."
            ) from error


def all_parameter_names(model: nn.Module) -> frozenset[str]:
    """Return all names of parameters in ``model.state_dict()``, including second names of tied weights."""
    return frozenset(first_names(model))


def first_names(model: nn.Module) -> dict[str, str]:
    """Map each parameter name, including second names of tied weights, to the name in ``model.named_parameters()``."""
    first: dict[int, str] = {}
    pairs = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in pairs}


def once_each(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``values`` with each tied weight once, under its first name."""
    first = first_names(model)
    found = {name: value for name, value in values.items() if first.get(name, name) == name}
    for name, value in values.items():
        found.setdefault(first.get(name, name), value)
    return found


_GENERATOR = "_checkpoint_without_reentrant_generator"
_NAMES = ("CheckpointFunction", _GENERATOR, f"{_GENERATOR}_impl")
"""Functions that ``torch.utils.checkpoint.checkpoint`` calls, by version of PyTorch."""

_lock, _uses, _own = threading.Lock(), list[None](), dict[str, Any]()


_CALLED = SimpleNamespace(apply=lambda function, preserve, *args: function(*args))


def _nothing(*args: Any, **options: Any) -> Iterator[None]:
    yield


@contextmanager
def without_checkpointing() -> Iterator[None]:
    """Disable activation checkpointing within the context or decorated function."""
    with _lock:
        for name in (each for each in _NAMES if not _uses and hasattr(checkpoint, each)):
            _own[name] = getattr(checkpoint, name)
            setattr(checkpoint, name, _CALLED if name == _NAMES[0] else _nothing)
        _uses.append(None)
    try:
        yield
    finally:
        with _lock:
            _uses.pop()
            if not _uses:
                for name, value in _own.items():
                    setattr(checkpoint, name, value)


def dequantize(network: nn.Module) -> None:
    """Replace bitsandbytes' 4-bit layers in ``network`` by linear layers in single precision."""
    library = sys.modules.get("bitsandbytes.functional")
    for path, module in list(network.named_modules()):
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if library is None or state is None:
            continue
        values = library.dequantize_4bit(module.weight.data, state).float()
        plain = nn.Linear(values.shape[1], values.shape[0], bias=module.bias is not None)
        plain.weight = nn.Parameter(values, requires_grad=False)
        if module.bias is not None:
            plain.bias = nn.Parameter(module.bias.detach().float(), requires_grad=False)
        parent, _, child = path.rpartition(".")
        setattr(network.get_submodule(parent), child, plain)


def made_of(model: object, options: Mapping[str, object] | None = None) -> nn.Module:
    """Return ``model``, or what this class or function makes with ``options``; ``UserError`` if that is no model."""
    if isinstance(model, nn.Module):
        return model
    name = getattr(model, "__name__", type(model).__name__)
    if not callable(model):
        got = type(model).__name__
        raise UserError(f"model is expected to be a torch.nn.Module or its class, but got {got}; give model=Net.")
    try:
        with streams_put_back():
            made = model(**(options or {}))
    except TypeError as error:
        raise UserError(
            f"model={name} is expected to be made without arguments, but: {error}; give an instance, model={name}(...)."
        ) from error
    if not isinstance(made, nn.Module):
        got = type(made).__name__
        raise UserError(f"model={name} is expected to make a torch.nn.Module, but makes {got}; let it return one.")
    return made
