"""The gradient of one batch, differentiated by its inputs alone: no mixed derivative by a weight is computed."""

from collections.abc import Callable, Sequence
from typing import Literal
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from fl_privacy.gradients.batch import LossChange, loss_gradients
from fl_privacy.gradients.fastest import same_gradients, with_slope
from fl_privacy.gradients.frozen import differentiable_twice, frozen_copy
from fl_privacy.gradients.layered import Layered
from fl_privacy.gradients.victims import VictimModel
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors

BatchGradient = Callable[[Tensor], Tensors]
"""(inputs (B, ...)) -> gradient of the mean loss by name, differentiable by the inputs."""

_Plain = Callable[[Tensor, Tensor], Tensors]
"""(inputs (B, ...), labels (B,)) -> the same by differentiating the loss."""

_Way = Literal["folded", "layered", "plain"]

_FEW = 2
"""Examples that a way is tried on."""

_tried: "WeakKeyDictionary[nn.Module, dict[tuple[object, ...], _Way]]" = WeakKeyDictionary()
"""The fastest way that gave the right gradients of a model, by all that it may depend on."""


def gradient_by_inputs(
    model: nn.Module,
    state: ModelState,
    batch: Batch,
    names: Sequence[str],
    *,
    plan: LocalPlan,
    changes: Sequence[LossChange] = (),
) -> BatchGradient:
    """The gradient at ``state`` of the loss on any inputs with the labels of ``batch``.

    It is computed layer by layer (:class:`Layered`, as one victim), which leaves out every derivative by the weights,
    wherever that gives the same as differentiating the loss twice. It does not where a defense changes the loss, where
    dropout draws masks, and where layers are used outside of their own forward pass.

    Args:
        model: architecture.
        state: its values; they get no gradient.
        batch: B examples; the shape of its inputs is that of all to come.
        names: of the parameters whose gradient is wanted.
        plan: of the client; its batch-norm mode and loss scale hold.
        changes: of the loss.
    """
    frozen = ModelState({name: p.detach() for name, p in state.parameters.items()}, state.buffers)

    def plain(inputs: Tensor, labels: Tensor) -> Tensors:
        found = loss_gradients(
            model,
            frozen,
            Batch(inputs, labels),
            batch_norm=plan.batch_norm,
            loss_scale=plan.loss_scale,
            changes=changes,
            create_graph=True,
        ).gradients
        return {name: found[name] for name in names}

    layered = None if changes or _drops(model) else _layered(model, frozen, batch, names, plan, plain=plain)
    if layered is None:
        return lambda inputs: plain(inputs, batch.labels)

    def gradient(inputs: Tensor) -> Tensors:
        with differentiable_twice():
            found = layered(inputs.unsqueeze(0), batch.labels.unsqueeze(0))
        return {name: found[name][0] for name in names}

    return gradient


def _drops(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules())


def _layered(
    model: nn.Module, state: ModelState, batch: Batch, names: Sequence[str], plan: LocalPlan, *, plain: _Plain
) -> Layered | None:
    """Set up at ``state``; ``None`` where it would give other gradients than ``plain``, which is tried once a model."""
    inputs, labels = batch.inputs[:_FEW].detach(), batch.labels[:_FEW]
    tried = _tried.setdefault(model, {})
    key = (frozenset(names), plan.batch_norm, inputs.shape, labels.shape)
    if tried.get(key) == "plain":
        return None
    value = next(iter(state.parameters.values()))
    victim = VictimModel(frozen_copy(model, state, plan, device=value.device, dtype=value.dtype), names, plan)
    if key not in tried:
        tried[key] = _fastest(victim, inputs, labels, plain)
    if tried[key] == "plain":
        return None
    layered = Layered(victim)
    return layered.folded(inputs.unsqueeze(0)) if tried[key] == "folded" else layered


def _fastest(victim: VictimModel, inputs: Tensor, labels: Tensor, plain: _Plain) -> _Way:
    expected = with_slope(plain, inputs, labels)
    one = inputs.unsqueeze(0), labels.unsqueeze(0)
    ways: tuple[_Way, ...] = ("folded", "layered")
    for way in ways:
        try:
            layered = Layered(victim)
            found = with_slope(layered.folded(one[0]) if way == "folded" else layered, *one)
        except RuntimeError:
            continue
        if same_gradients({name: value[0] for name, value in found.items()}, expected):
            return way
    return "plain"
