"""The model of an app under audit, checked against its images and arrays."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import nn

from fl_privacy.data.app_data import declared_normalization
from fl_privacy.errors import UserError
from fl_privacy.federation.interception.infer_plan import norm_names
from fl_privacy.models import check_model, normalized
from fl_privacy.models.unwrap_model import made_of, outputs_of, plain_model
from fl_privacy.runs.app_truth import NamedImages, find_images
from fl_privacy.types.plan import Normalization

USUAL = ((1, 28, 28), (1, 32, 32), (3, 28, 28), (3, 32, 32), (3, 64, 64), (3, 96, 96), (3, 128, 128), (3, 224, 224))
"""Shapes of images to try by default."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AuditedModel:
    """An app's model and images, as known before its training."""

    name: str
    path: str
    network: nn.Module  # takes images in [0, 1] and first normalizes them as the clients do
    input_shape: tuple[int, ...]  # (C, H, W)
    num_classes: int
    source: NamedImages
    normalization: Normalization | None
    normalization_given: bool  # ``True`` if the normalization was given, ``False`` if inferred from pixels


def read_model(
    model: nn.Module | Callable[[], nn.Module], data: object, input_shape: Sequence[int] | None, transform: object
) -> AuditedModel:
    """Return the model and images given to ``audit``; ``UserError`` if they do not fit each other."""
    made = copy.deepcopy(made_of(model)).cpu()
    if not any(True for _ in made.parameters()):
        raise UserError(f"Model {type(made).__name__} is expected to have parameters, but has none; give the network.")
    source = find_images(data)
    shape = _shape(made, source.input_shape, input_shape)
    outputs = _outputs(made, shape)
    if outputs is not None and not isinstance(outputs, torch.Tensor):
        made = plain_model(made, shape)
    logits: Any = None if outputs is None else outputs_of(outputs)
    classes = 1 if logits is None else int(logits.shape[1])
    check_model(made, shape, classes)
    if source.num_classes is not None and source.num_classes > classes:
        raise UserError(
            f"Model {type(made).__name__} is expected to have an output for each of the {source.num_classes} classes of"
            f" {source.name}, but has {classes}; give the app's model, or other data."
        )
    given = _normalization(transform)
    normalization = source.normalization if given is None else given
    if source.normalization is not None:
        source = replace(source, normalization=normalization)
    kind: Any = type(made) if isinstance(model, nn.Module) else model
    return AuditedModel(
        name=getattr(kind, "__name__", type(made).__name__),
        path=f"{kind.__module__}.{getattr(kind, '__qualname__', type(made).__qualname__)}",
        network=made if normalization is None else normalized(made, normalization),
        input_shape=shape,
        num_classes=classes,
        source=source,
        normalization=normalization,
        normalization_given=given is not None,
    )


def expect_arrays_of(model: AuditedModel, arrays: ArrayRecord) -> None:
    """Raise ``UserError`` unless the arrays have the model's names and shapes."""
    own = {name: tuple(t.shape) for name, t in model.network.state_dict().items()}
    got = {name: tuple(array.shape) for name, array in arrays.items()}
    if list(got) == [str(i) for i in range(len(own))]:
        got = dict(zip(own, got.values(), strict=True))
    parameters = {name for name, _ in model.network.named_parameters()} - norm_names(model.network)
    missing, strange = [n for n in parameters if n not in got], [n for n in got if n not in own]
    wrong = next((n for n in own if n in got and got[n] != own[n]), None)
    if missing and not strange and not wrong and got:
        sent = f"{len(parameters) - len(missing)} of {len(parameters)}"
        raise UserError(
            f"All parameters of model={model.name} are expected in the initial arrays, but {sorted(missing)[0]} and"
            f" {len(missing) - 1} more are not: the app exchanges {sent}, such as adapters or a head. Leakage of a"
            " part is not audited; audit an app that exchanges its model whole."
        )
    if wrong:
        what = f"{wrong} has the shape {got[wrong]}, not {own[wrong]}"
    elif strange or missing:
        what = f"{sorted(strange)[0]} is not in it" if strange else f"{sorted(missing)[0]} is missing"
    else:
        return  # buffers and batch norm may stay on the clients
    raise UserError(
        f"The initial arrays are expected to be those of model={model.name}, but {what}; give the model that the app"
        " trains."
    )


def _shape(model: nn.Module, of_data: tuple[int, ...] | None, given: Sequence[int] | None) -> tuple[int, ...]:
    if given is not None:
        shape = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()
        if len(shape) != 3 or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in shape):
            raise UserError(
                f"input_shape is expected to be (channels, height, width), but got {given!r}; try (3, 32, 32)."
            )
        if of_data is not None and of_data != shape:
            raise UserError(f"input_shape is expected to be that of data, {of_data}, but got {shape}; leave it out.")
        return shape
    if of_data is not None:
        return of_data
    fitting = fitting_shapes(model)
    if len(fitting) == 1:
        return fitting[0]
    shapes = " and ".join("x".join(map(str, shape)) for shape in fitting)
    which = f"images of {shapes}" if fitting else "none of the usual ones"
    raise UserError(
        f"The shape of images is expected, but neither data nor input_shape is given, and {type(model).__name__} takes"
        f" {which}; give input_shape=(channels, height, width)."
    )


def fitting_shapes(model: nn.Module) -> list[tuple[int, ...]]:
    """Return the usual image shapes (C, H, W) that ``model`` accepts."""
    return [shape for shape in USUAL if _outputs(model, shape) is not None]


@torch.no_grad()
def _outputs(model: nn.Module, shape: tuple[int, ...]) -> Any:
    try:
        made = copy.deepcopy(model).eval()(torch.zeros(2, *shape))
        logits = outputs_of(made)
    except (RuntimeError, ValueError, TypeError):
        return None
    return made if isinstance(logits, torch.Tensor) and logits.dim() == 2 and len(logits) == 2 else None


def _normalization(transform: object) -> Normalization | None:
    if transform is None or isinstance(transform, Normalization):
        return transform
    if isinstance(transform, tuple | list) and len(transform) == 2:
        mean, std = ([v] if isinstance(v, int | float) else v for v in transform)
        return Normalization(mean, std)
    found = declared_normalization(transform)
    if found is None:
        raise UserError(
            "transform is expected to hold a torchvision Normalize, or to be (mean, std), but got"
            f" {type(transform).__name__}; for images in [0, 1] leave it out."
        )
    return found
