"""Checks of a user's gradients or weights, and inference of their names and number of examples."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fl_privacy.checks import whole
from fl_privacy.errors import UserError
from fl_privacy.models.losses import Loss, LossLike, loss_of
from fl_privacy.models.unwrap_model import (
    detached_copy,
    first_names,
    once_each,
    plain_model,
    plain_names,
    unwrapped,
    without_checkpointing,
)
from fl_privacy.types.plan import LocalPlan

_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-6}
"""Singular values below this share of the largest are rounding, by the type of the gradient."""

_APART = 10.0  # least ratio of a singular value to rounding that shows a second example
_GAP = 100.0  # least ratio of the last counted singular value to the first uncounted one
_MOST, _SPARE = 256, 8  # most examples that are counted, and further random combinations of columns for a reliable rank
_LARGE = 1 << 22  # number of elements above which a gradient's rank is computed only if no smaller layer gives one
COUNTED_BY_RANK = "The gradient is taken for that of"  # beginning of the note on an inferred batch size
_LOOKED_AT = 1 << 16  # number of values that are inspected for their floating-point type
_SAME = 1e-4  # largest relative distance at which an output layer's gradient counts as that of one example


@dataclass(frozen=True, eq=False)
class UserUpload:
    """Upload as stated by a user: the model's values before training, and gradients or values after it."""

    model: nn.Module
    parameters: dict[str, Tensor]  # copies of the model's values before training, which the server sent
    buffers: dict[str, Tensor]
    tensors: dict[str, Tensor]  # gradients, or parameters after the local training
    statistics: dict[str, Tensor]
    num_examples: int
    plan: LocalPlan
    num_classes: int
    loss: Loss | None
    notes: tuple[str, ...] = ()  # sentences on a batch size that was inferred or that contradicts the gradient's rank


def read_gradients(
    model: nn.Module,
    gradients: Mapping[str, Tensor] | Sequence[Tensor],
    plan: LocalPlan,
    *,
    shape: tuple[int, ...],
    batch_size: int | None,
    loss: LossLike | None,
) -> UserUpload:
    """Return a user's gradients with the inferred batch size; see :meth:`fl_privacy.types.Observation.of_gradients`."""
    named, plain = named_tensors(model, gradients), plain_model(model, shape)
    inner, names = unwrapped(model), plain_names(unwrapped(model))
    parameters = {names[name]: p.detach().clone() for name, p in inner.named_parameters()}
    buffers = {names[name]: b.detach().clone() for name, b in inner.named_buffers()}
    num_classes, vectors = _watched(plain, shape, parameters)
    evidence = _Evidence(parameters, named, num_classes, vectors)
    found = batch_size if batch_size is None else whole("batch_size", batch_size, at_least=1, example=8)
    notes = tuple[str, ...]()
    if batch_size is None:
        found = evidence.batch_size()
        if found is None:
            raise UserError(
                "batch_size is expected, since it can't be inferred from this gradient, but got None; give batch_size=1"
                " for a single one."
            )
        if found > 1:
            notes = (f"{COUNTED_BY_RANK} {found} examples, the rank of those of linear layers.",)
    elif (least := evidence.batch_size() or 1) > batch_size:
        notes = (
            f"The gradient of a layer that takes one vector of each example has rank {least}, more than batch_size="
            f"{batch_size}, which is taken as stated: values that were dropped or rounded raise a rank.",
        )
    assert found is not None
    known = None if loss is None else loss_of(loss, num_classes, next(plain.parameters()))
    return UserUpload(plain, parameters, buffers, named, {}, found, plan, num_classes, known, notes)


def examples_by_rank(
    plain: nn.Module, shape: tuple[int, ...], parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> int | None:
    """Infer the number of examples from the ranks of the layers' ``gradients`` as matrices; ``None`` if unknown.

    ``plain``: model; ``shape``: shape of an example; ``gradients``: changes of ``parameters`` in training.
    """
    num_classes, vectors = _watched(plain, shape, parameters)
    return _Evidence(parameters, gradients, num_classes, vectors, of_weights=True).batch_size()


def expect_range(given: tuple[float, float]) -> tuple[float, float]:
    """Return ``given`` as (least, largest) floats; ``UserError`` unless it is two increasing finite numbers."""
    try:
        low, high = (float(value) for value in given)
    except (TypeError, ValueError):
        low = high = float("nan")
    if not float("-inf") < low < high < float("inf"):
        raise UserError(
            f"input_range is expected to be two numbers, the larger one last, but got {given!r}; try (0, 1)."
        )
    return low, high


def as_tensor(value: object) -> object:
    """Return a NumPy array as a tensor of the same precision; other values unchanged."""
    return torch.as_tensor(value) if isinstance(value, np.ndarray | np.generic) else value


def named_tensors(model: nn.Module, gradients: Mapping[str, Any] | Sequence[Any]) -> dict[str, Tensor]:
    """Return ``gradients`` as detached tensors by parameter name, without wrappers' prefixes or tied duplicates."""
    inner, plain = unwrapped(model), plain_names(unwrapped(model))
    own = {plain[name]: p for name, p in inner.named_parameters(remove_duplicate=False)}
    if not isinstance(gradients, Mapping):
        values = list(gradients)
        gradients = dict(zip(_names_in_order(inner, len(values)), values, strict=True))
    gradients = {
        name: as_tensor(value)
        for name, value in gradients.items()
        if value is not None or name not in plain or own[plain[name]].requires_grad
    }
    wrapped = {name: plain.get(name, name) for name in gradients}
    if model is not inner:
        outer = plain_names(model)
        wrapped = {name: outer.get(name, wrapped[name]) for name in gradients}
    for name, gradient in gradients.items():
        known, got = own.get(wrapped[name]), getattr(gradient, "shape", None)
        if known is None or got != known.shape:
            wanted = "that of a parameter of the model" if known is None else f"a tensor {tuple(known.shape)}"
            what = type(gradient).__name__ if got is None else tuple(got)
            raise UserError(f"The gradient {name} is expected to be {wanted}, but is {what}; give that model's.")
    renamed = {wrapped[name]: g.detach() for name, g in gradients.items()}
    return once_each(inner, renamed) if plain == {name: name for name in plain} else renamed


def _names_in_order(inner: nn.Module, count: int) -> list[str]:
    trained = [name for name, p in inner.named_parameters() if p.requires_grad]
    names = [name for name, _ in inner.named_parameters()]
    if count not in (len(names), len(trained)):
        frozen, which = "", "model.parameters()"
        if len(trained) < len(names):
            frozen = f", or of the {len(trained)} that are trained"
            which = "[p for p in model.parameters() if p.requires_grad]"
        raise UserError(
            f"A gradient is expected for each of {len(names)} parameters{frozen}, but got {count};"
            f" take those of torch.autograd.grad(loss, {which})."
        )
    return [plain_names(inner)[name] for name in (names if count == len(names) else trained)]


class _LinearCalls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[int, list[torch.Size]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and len(args) > 1:
            self.shapes.setdefault(id(args[1]), []).append(args[0].shape)
        return func(*args, **(kwargs or {}))


@without_checkpointing()
def _watched(model: nn.Module, shape: tuple[int, ...], parameters: Mapping[str, Tensor]) -> tuple[int, frozenset[str]]:
    """Return the number of outputs, and the linear layers whose gradient's rank is the number of examples."""
    copied = detached_copy(model).eval().requires_grad_(True)
    own = dict(copied.named_parameters())
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(parameters[name])
    like = next(iter(own.values()))
    images = torch.rand((2, *shape), generator=torch.Generator().manual_seed(0)).to(like)
    images[1] *= 0.5
    with _LinearCalls() as calls, torch.enable_grad():
        outputs: Tensor = copied(images)
        slope = (outputs.logsumexp(1) - outputs[:, 0]).sum() + outputs.square().sum() * (outputs.shape[1] == 1)
    vectors = {}
    for path, module in copied.named_modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight") if isinstance(module, nn.Linear) else None
        shapes = calls.shapes.get(id(weight), [])
        if weight is not None and len(shapes) == 1 and len(shapes[0]) == 2:
            vectors[path] = weight
    found = torch.autograd.grad(slope, list(vectors.values()), allow_unused=True) if vectors else ()
    telling = set()  # those whose gradient (M, N) of two examples of one class shows both
    for path, gradient in zip(vectors, found, strict=True):
        values = [] if gradient is None else _singular_values(gradient.detach()).tolist()
        if len(values) > 1 and values[1] > _APART * _rounding(gradient) * values[0]:
            telling.add(path)
    return outputs.shape[1], frozenset(telling)


def computed_in(values: Tensor) -> torch.dtype:
    """Infer the floating-point type in which ``values`` were computed: low precisions leave their last bits zero."""
    values = values.detach().flatten()[:_LOOKED_AT]
    if values.dtype == torch.float64 and bool((values.float() == values).all()):
        values = values.float()
    if values.dtype != torch.float32:
        return values.dtype
    bits = values[values != 0].contiguous().view(torch.int32)
    if len(bits) < 4 or float((bits & 0xF != 0).float().mean()) > 0.01:
        return torch.float32
    return torch.float16 if bool((bits & 0x1FFF == 0).all() & (bits & 0xFFFF != 0).any()) else torch.bfloat16


def _rounding(gradient: Tensor) -> float:
    return _ROUNDING.get(computed_in(gradient), 0.03)


def _singular_values(gradient: Tensor) -> Tensor:
    values: Tensor = torch.linalg.svdvals(_sketched(_sketched(gradient).T).cpu().double())
    return values


def _sketched(values: Tensor) -> Tensor:
    """Reduce the columns of ``values`` (M, N) by a random matrix; ranks up to ``_MOST`` stay (Halko et al. 2011)."""
    values = values.double() if values.numel() <= _LARGE else values.float()
    if values.shape[1] <= _MOST + _SPARE:
        return values
    rng = torch.Generator().manual_seed(0)
    return values @ torch.randn(values.shape[1], _MOST + _SPARE, generator=rng).to(values)


@dataclass(frozen=True, eq=False)
class _Evidence:
    """Gradients of a model, from which the number of examples behind them is inferred."""

    parameters: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    num_classes: int
    vectors: frozenset[str]  # names of the linear layers that take one vector of each example
    of_weights: bool = False  # ``True`` if gradients are differences of weights, whose rounding adds to their rank

    def batch_size(self) -> int | None:
        """Return the largest rank of a layer's gradient as the number of examples; ``None`` if no layer shows it."""
        # a layer's gradient is a sum of one outer product for each example; under cross entropy over K classes, the
        # output layer's columns sum to 0, so its rank is at most K - 1
        ranks, whole, full = list[int](), list[int](), 0
        for name in sorted(self.vectors, key=self._size):
            if ranks and self._size(name) > _LARGE:
                break
            rank, room = self._rank(name)
            if 0 < rank <= max(1, room // 2) and rank < room:
                ranks.append(rank)
                whole += [] if self._has_holes(name) else [rank]
            elif rank:
                full = max(full, rank)
        ranks = whole or ranks
        outputs = [n for n in self.vectors if len(self.gradients.get(f"{n}.weight", ())) == self.num_classes]
        if ranks and max(ranks) >= full and not any(map(self._has_holes, outputs)):
            return max(ranks)
        return 1 if self._is_of_one() else None

    def _size(self, name: str) -> int:
        weight = self.gradients.get(f"{name}.weight")
        return 0 if weight is None else weight.numel()

    def _rank(self, name: str) -> tuple[int, int]:
        """Return the rank of a layer's gradient and the largest possible rank; (0, 0) if unknown."""
        weight = self.gradients.get(f"{name}.weight")
        if weight is None or not bool(weight.any()):
            return 0, 0
        joined = self._joined(name)
        if not bool(joined.isfinite().all()):
            return 0, 0
        room = min(int(joined.any(1).sum()), int(joined.any(0).sum()))
        if weight.shape[0] == self.num_classes:
            room = min(room, self.num_classes - 1)
        values = _singular_values(joined)
        least, room = _rounding(weight), min(room, _MOST)
        if self.of_weights:  # the largest singular value of rounding errors
            size = float(self.parameters[f"{name}.weight"].square().mean().sqrt())
            least = max(least, 2.0**-23 * size * sum(math.sqrt(n) for n in weight.shape) / float(values[0]))
        values = values / values[0]
        rank = int((values > least).sum())
        if rank < len(values) and float(values[rank]) * _GAP > float(values[rank - 1]):
            return 0, 0
        return rank, room

    def _joined(self, name: str) -> Tensor:
        weight, bias = self.gradients[f"{name}.weight"], self.gradients.get(f"{name}.bias")
        joined = weight.float() if weight.dtype != torch.float64 else weight
        return joined if bias is None else torch.cat([joined, bias.to(joined)[:, None]], 1)

    def _has_holes(self, name: str) -> bool:
        size = self._joined(name).abs()
        rows = size[size.amax(1) > 1e-30]  # smaller ones are the rounding of a probability of zero
        return bool((rows[:, rows.any(0)] == 0).any())

    def _is_of_one(self) -> bool:
        names = [(f"{name}.weight", f"{name}.bias") for name in self.vectors]
        names = [own for own in names if set(own) <= self.gradients.keys() & self.parameters.keys()]
        names = [own for own in names if len(self.gradients[own[1]]) == self.num_classes]
        if self.num_classes > 2 or len(names) != 1:
            return False
        weight, bias = (self.gradients[name].double() for name in names[0])
        if not bool(bias.any()):
            return False
        features = weight.T @ bias / bias.square().sum()
        if float((weight - bias[:, None] * features).norm()) > _SAME * float(weight.norm()):
            return False
        own = [self.parameters[name].double() for name in names[0]]
        outputs = own[0] @ features + own[1]
        made = outputs.sigmoid() if self.num_classes == 1 else outputs.softmax(0)
        target = (made - bias).detach()
        return bool((target - target.round()).abs().max() < _SAME)


Weights = nn.Module | Mapping[str, Any] | Sequence[Any]
"""Model, its ``state_dict()``, or the arrays of that dict in order, like Flower's ``get_parameters``."""


def read_update(
    before: Weights,
    after: Weights,
    plan: LocalPlan,
    *,
    model: nn.Module | None,
    shape: tuple[int, ...],
    num_examples: int,
    loss: LossLike | None,
) -> UserUpload:
    """Check a user's weights, and return them as an upload; see :meth:`fl_privacy.types.Observation.of_update`."""
    if model is None and not isinstance(before, nn.Module):
        raise UserError(
            "before is expected to be the model as it was sent, but got its values alone; give model=net as well."
        )
    used = before if model is None else model
    assert isinstance(used, nn.Module)
    if before is after:
        raise UserError(
            "before and after are expected to be two sets of weights, but got the same object; keep a copy from before"
            " the training: copy.deepcopy(net.state_dict())."
        )
    if not isinstance(plan, LocalPlan):
        raise UserError(f"plan is expected to be a LocalPlan, but got {type(plan).__name__}; try LocalPlan(lr=0.1).")
    whole("num_examples", num_examples, at_least=1, example="an update does not show it; give num_examples=8")
    plain, inner = plain_model(used, shape), unwrapped(used)
    sent, replied = _values("before", inner, before), _values("after", inner, after)
    own = set(plain_names(inner).values()) & {plain_names(inner).get(n, n) for n in first_names(inner)}
    (parameters, buffers), (weights, statistics) = (
        [{name: value for name, value in values.items() if (name in own) is wanted} for wanted in (True, False)]
        for values in (sent, replied)
    )
    missing = [name for name in weights if name not in parameters]
    if missing:
        raise UserError(f"before is expected to have all values of after, but lacks {missing[0]}; give all of them.")
    if weights and all(bool((value == parameters[name]).all()) for name, value in weights.items()):
        raise UserError(
            "before and after are expected to differ, but are equal: nothing was trained, or both share memory;"
            " keep copy.deepcopy(net.state_dict()) from before the training."
        )
    plan = replace(plan, shares="weights", buffers="shared" if statistics else "withheld")
    outputs, _ = _watched(plain, shape, parameters)
    known = None if loss is None else loss_of(loss, outputs, next(detached_copy(plain).parameters()))
    return UserUpload(plain, parameters, buffers, weights, statistics, num_examples, plan, outputs, known)


def _values(what: str, inner: nn.Module, given: Weights) -> dict[str, Tensor]:
    plain = plain_names(inner)
    state = {plain.get(name, name): value for name, value in inner.state_dict().items()}
    if isinstance(given, nn.Module):
        outer = unwrapped(given)
        given = {plain_names(outer).get(name, name): value for name, value in outer.state_dict().items()}
    elif isinstance(given, Mapping):
        given = {plain.get(name, name): value for name, value in given.items()}
    else:
        arrays = list(given)
        every = [plain[name] for name, _ in inner.named_parameters()]
        trained = [plain[name] for name, p in inner.named_parameters() if p.requires_grad]
        names = next((some for some in (list(state), every, trained) if len(some) == len(arrays)), None)
        if names is None:
            raise UserError(
                f"{what} is expected to have an array for each of {len(state)} entries of the model's state_dict(), of"
                f" its {len(every)} parameters or of the {len(trained)} that are trained, but got {len(arrays)}; give"
                " them in that order."
            )
        given = dict(zip(names, arrays, strict=True))
    found = {}
    for name, value in given.items():
        tensor = as_tensor(value)
        if name not in state or not isinstance(tensor, Tensor) or tensor.shape != state[name].shape:
            wanted = f"{tuple(state[name].shape)}" if name in state else "an entry of the model's state_dict()"
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(value).__name__
            raise UserError(f"{what}: {name} is expected to be {wanted}, but is {got}; give the same model's weights.")
        found[name] = tensor.detach().clone()
    return once_each(inner, found)
