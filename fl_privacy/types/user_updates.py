"""Inference of a user's weights before and after local training: FedAvg in a notebook."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from fl_privacy.errors import UserError
from fl_privacy.models.losses import Loss, LossLike, loss_of
from fl_privacy.models.unwrap_model import detached_copy, first_names, once_each, plain_model, plain_names, unwrapped
from fl_privacy.types.plan import LocalPlan
from fl_privacy.types.user_gradients import as_tensor, count_outputs

Weights = nn.Module | Mapping[str, Any] | Sequence[Any]
"""Model, its ``state_dict()``, or the arrays of that in order, like Flower's ``get_parameters``."""


@dataclass(frozen=True, eq=False)
class SharedUpdate:
    """Model sent to a client and the client's reply.

    Attributes:
        parameters, buffers: values that were sent, by name.
        weights, statistics: parameters and uploaded buffers after the local training.
    """

    model: nn.Module
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    weights: dict[str, Tensor]
    statistics: dict[str, Tensor]
    plan: LocalPlan
    num_classes: int
    loss: Loss | None


def read_update(
    before: Weights,
    after: Weights,
    plan: LocalPlan,
    *,
    model: nn.Module | None,
    input_shape: Sequence[int],
    num_examples: int,
    loss: LossLike | None,
) -> SharedUpdate:
    """Infer the origin of ``before`` and ``after``; see :meth:`fl_privacy.types.Observation.of_update`."""
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
        raise UserError(f"plan is expected to be a LocalPlan, but got {type(plan).__name__}; LocalPlan(lr=0.1, ...).")
    if isinstance(num_examples, bool) or not isinstance(num_examples, int) or num_examples < 1:
        raise UserError(
            f"num_examples is expected to be how many examples the client trained on, at least 1, but got"
            f" {num_examples!r}: an update of several steps does not show it; give num_examples=8."
        )
    shape = tuple(input_shape)
    plain = plain_model(used, shape)
    inner = unwrapped(used)
    sent, replied = _values("before", inner, before), _values("after", inner, after)
    own = set(plain_names(inner).values()) & {plain_names(inner).get(n, n) for n in first_names(inner)}
    (parameters, buffers), (weights, statistics) = (
        [{name: value for name, value in values.items() if (name in own) is wanted} for wanted in (True, False)]
        for values in (sent, replied)
    )
    missing = [name for name in weights if name not in parameters]
    if missing:
        raise UserError(f"before is expected to have all that after has, but {missing[0]} is missing; keep all of it.")
    if weights and all(bool((value == parameters[name]).all()) for name, value in weights.items()):
        raise UserError(
            "before and after are expected to differ, but are equal: nothing was trained, or before is no copy of its"
            " own; keep copy.deepcopy(net.state_dict()) from before the training."
        )
    plan = replace(plan, shares="weights", buffers="shared" if statistics else "withheld")
    outputs = count_outputs(plain, shape, parameters)
    known = None if loss is None else loss_of(loss, outputs, next(detached_copy(plain).parameters()))
    return SharedUpdate(plain, parameters, buffers, weights, statistics, plan, outputs, known)


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
