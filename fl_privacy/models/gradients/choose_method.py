"""Choice of the fastest method for gradients, and replay of local training steps."""

import copy
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from fl_privacy.models.gradients import victims
from fl_privacy.models.gradients.layered import Layered
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors

logger: logging.Logger = logging.getLogger(__name__)
_TOLERANCE = 1e-3

# fastest first: functions of the victims' model and inputs (V, B, ...)
_METHODS: dict[str, Callable[[victims.VictimModel, Tensor], victims.VictimGradients]] = {
    "folded": lambda victim_model, inputs: Layered(victim_model).folded(inputs),
    "layered": lambda victim_model, _: Layered(victim_model),
    "vectorized": lambda victim_model, _: victims.Vectorized(victim_model),
}


def victim_gradients(victim_model: victims.VictimModel, inputs: Tensor, labels: Tensor) -> victims.VictimGradients:
    """Return the fastest method for victims' gradients that gives the right ones for ``inputs`` and ``labels``."""
    reference = victims.OneByOne(victim_model)
    name, reasons = _fastest(list(_METHODS), victim_model, inputs, labels, with_slope(reference, inputs, labels))
    if name in _METHODS:
        return _METHODS[name](victim_model, inputs)
    name = type(victim_model.model).__name__
    logger.info("%s can't be batched over victims, which are attacked one by one (%s).", name, "; ".join(reasons))
    return reference


def _fastest(
    methods: Sequence[str], victim_model: victims.VictimModel, inputs: Tensor, labels: Tensor, expected: Tensors
) -> tuple[str, list[str]]:
    reasons: list[str] = []
    for name in methods:
        try:
            gradients = _METHODS[name](victim_model, inputs)
            if isinstance(gradients, Layered):
                gradients.expect_right_factors(inputs, labels)
            if same_gradients(with_slope(gradients, inputs, labels), expected):
                return name, reasons
            # rounding may cross a kink of ReLU or max pooling, but hardly in double precision
            exact = replace(victim_model, model=copy.deepcopy(victim_model.model).double())
            trial = [each.double() if each.is_floating_point() else each for each in (inputs, labels)]
            both = _METHODS[name](exact, trial[0]), victims.OneByOne(exact)
            if same_gradients(*(with_slope(each, *trial) for each in both)):
                return name, reasons
            reasons.append(f"{name} gives other gradients")
        except (RuntimeError, ValueError, AttributeError, KeyError) as error:  # forms that only the plain network has
            reasons.append(str(error).strip().splitlines()[0])
    return "plain", reasons


def with_slope(gradients: Callable[[Tensor, Tensor], Tensors], inputs: Tensor, labels: Tensor) -> Tensors:
    """Return gradients by name and, under the empty name, the derivative of their squared norm by ``inputs``."""
    with victims.differentiable_twice():
        leaf = inputs.detach().requires_grad_()
        result = gradients(leaf, labels)
        (slope,) = torch.autograd.grad(torch.stack([g.square().sum() for g in result.values()]).sum(), leaf)
    return {**{name: g.detach() for name, g in result.items()}, "": slope}


def same_gradients(found: Tensors, expected: Tensors) -> bool:
    """Return whether ``found`` equals ``expected`` up to rounding errors, relative to the largest gradient."""
    whole = max(float(value.norm()) for value in expected.values())
    return all(
        float((found[name] - value).norm()) <= _TOLERANCE * (float(value.norm()) + _TOLERANCE * whole)
        for name, value in expected.items()
    )


def number_of_steps(num_examples: int, plan: LocalPlan) -> int:
    """Return a client's number of local steps; 0 if it has no examples."""
    if num_examples < 1:
        return 0
    size = min(plan.batch_size or num_examples, num_examples)
    return plan.steps or 1 if plan.epochs is None else plan.epochs * -(-num_examples // size)


def sgd_factor(steps: int, plan: LocalPlan) -> float:
    """Return how far ``steps`` steps of SGD with momentum go along a constant gradient, as a multiple of the lr."""
    velocity, total = 0.0, 0.0
    for _ in range(steps):
        velocity = 1 + plan.momentum * velocity
        total += 1 + plan.momentum * velocity if plan.nesterov else velocity
    return total


def step_slices(num_examples: int, plan: LocalPlan) -> list[slice]:
    """Return each local step's slice of ``num_examples``, without shuffling, since the client's order is secret."""
    if num_examples < 1:
        return []
    size = min(plan.batch_size or num_examples, num_examples)
    if plan.epochs is not None:
        return [slice(i, i + size) for _ in range(plan.epochs) for i in range(0, num_examples, size)]
    one_pass = [slice(i * size, (i + 1) * size) for i in range(num_examples // size)]
    steps = plan.steps or 1
    return (one_pass * math.ceil(steps / len(one_pass)))[:steps]


class Unrolled(victims.VictimGradients):
    """Computes gradients by replaying each victim's local steps: the parameters' change divided by -lr.

    ``trial``: inputs (V, B, ...) to test :func:`victims.joined_loss`; if it fails, the slower ``vmap`` is used.
    """

    def __init__(self, victim_model: victims.VictimModel, trial: Tensor | None = None) -> None:
        self._victim_model, self._trial = victim_model, trial
        self._loss = victims.VictimLoss(victim_model)
        self._sent = self._loss.parameters()
        self._joined = None if trial is None else self._tried(trial)

    def under(self, victim_model: victims.VictimModel) -> "Unrolled":
        return Unrolled(victim_model, self._trial)

    def _tried(self, trial: Tensor) -> victims.JoinedLoss | None:
        plan, joined = self._victim_model.plan, victims.joined_loss(self._victim_model)
        if joined is None or plan.held(self._sent):
            return None
        replay = Unrolled(replace(self._victim_model, plan=replace(plan, epochs=None, steps=2)))
        labels = torch.zeros(trial.shape[:2], dtype=torch.long, device=trial.device)
        try:
            expected, replay._joined = with_slope(replay, trial, labels), joined
            return joined if same_gradients(with_slope(replay, trial, labels), expected) else None
        except Exception:  # noqa: BLE001  (of anybody's model, such as one that takes one victim at a time)
            return None

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensors:
        plan, held = self._victim_model.plan, self._victim_model.plan.held(self._sent)
        trained = {name: p for name, p in self._sent.items() if name not in held}
        moved, moments = dict[str, Tensor](), list[Tensors]([{}, {}])
        for number, batch in enumerate(step_slices(inputs.shape[1], plan), start=1):
            parameters = {name: p - plan.lr * moved[name] if moved else p for name, p in trained.items()}
            gradients = self._gradients(parameters, inputs[:, batch], labels[:, batch], alike=not moved)
            step, moments = decaying_step(gradients, parameters, moments, plan, number)
            moved = {name: moved[name] + value if moved else value for name, value in step.items()}
        return {name: moved[name] for name in self._victim_model.names}

    def _gradients(self, parameters: Tensors, inputs: Tensor, labels: Tensor, *, alike: bool) -> Tensors:
        if self._joined is None:
            found: Tensors = vmap(grad(self._loss), (None if alike else 0, 0, 0))(parameters, inputs, labels)
            return found
        own = {name: p.expand(len(inputs), *p.shape) if alike else p for name, p in parameters.items()}
        own = {name: p if p.requires_grad else p.detach().requires_grad_() for name, p in own.items()}
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            loss = self._joined(own, inputs, labels)
            each = torch.autograd.grad(loss, list(own.values()), create_graph=create_graph, materialize_grads=True)
        return dict(zip(own, each, strict=True))


def step_direction(
    gradients: Tensors, moments: list[Tensors], plan: LocalPlan, number: int
) -> tuple[Tensors, list[Tensors]]:
    """Return a step of SGD or Adam, as the parameters' change divided by -lr, and the optimizer's new ``moments``.

    ``number``: number of the step, from 1. ``moments``: two dictionaries of running averages, [{}, {}] at first.
    """
    first, second = moments
    if plan.optimizer != "sgd":
        first = {n: 0.1 * g + (0.9 * first[n] if first else 0) for n, g in gradients.items()}
        second = {n: 0.001 * g * g + (0.999 * second[n] if second else 0) for n, g in gradients.items()}
        tiny = torch.finfo(next(iter(gradients.values())).dtype).tiny  # keeps the slope of the root finite at 0
        scale = {n: (s / (1 - 0.999**number) + tiny).sqrt() + 1e-8 for n, s in second.items()}
        return {n: m / (1 - 0.9**number) / scale[n] for n, m in first.items()}, [first, second]
    if not plan.momentum:
        return gradients, moments
    first = {n: g + plan.momentum * first[n] if first else g for n, g in gradients.items()}
    if plan.nesterov:
        return {n: g + plan.momentum * first[n] for n, g in gradients.items()}, [first, second]
    return first, [first, second]


def decaying_step(
    gradients: Tensors, parameters: Tensors, moments: list[Tensors], plan: LocalPlan, number: int
) -> tuple[Tensors, list[Tensors]]:
    """Return :func:`step_direction`'s update and moments, including the plan's weight decay of ``parameters``.

    ``number``: number of the step, from 1; ``moments``: the optimizer's running averages.
    """
    if plan.weight_decay and plan.optimizer != "adamw":
        gradients = {name: g + plan.weight_decay * parameters[name] for name, g in gradients.items()}
    step, moments = step_direction(gradients, moments, plan, number)
    if plan.optimizer == "adamw":
        step = {name: s + plan.weight_decay * parameters[name] for name, s in step.items()}
    return step, moments


def decayed(rows: Tensor, plan: LocalPlan, steps: int) -> Tensor:
    """Return some rows of a parameter after ``steps`` steps of weight decay alone, without a gradient."""
    if not plan.weight_decay:
        return rows
    moments: list[Tensors] = [{}, {}]
    for number in range(1, steps + 1):
        slope = torch.zeros_like(rows) if plan.optimizer == "adamw" else plan.weight_decay * rows
        direction, moments = step_direction({"": slope}, moments, plan, number)
        shrunk = rows * (1 - plan.lr * plan.weight_decay) if plan.optimizer == "adamw" else rows
        rows = shrunk - plan.lr * direction[""]
    return rows


BatchGradient = Callable[[Tensor], Tensors]
"""Function (inputs (B, ...)) -> gradient of the mean loss by name, differentiable with respect to the inputs."""

_Plain = Callable[[Tensor, Tensor], Tensors]  # function (inputs, labels) -> gradient by differentiating the loss
_FEW = 2  # number of examples of a trial

_tried: "WeakKeyDictionary[nn.Module, dict[tuple[object, ...], str]]" = WeakKeyDictionary()
"""Model -> fastest right method, by names, batch norm and shapes."""


def gradient_by_inputs(
    model: nn.Module,
    state: ModelState,
    batch: Batch,
    names: Sequence[str],
    *,
    plan: LocalPlan,
    changes: Sequence[victims.LossChange] = (),
) -> BatchGradient:
    """Return a differentiable function from inputs (shaped like the batch's) to the gradient of the loss at ``state``.

    ``names``: parameters of the gradient. ``changes``: a defense's changes of the loss, which make the function slower.
    """
    frozen = ModelState({name: p.detach() for name, p in state.parameters.items()}, state.buffers)

    def plain(inputs: Tensor, labels: Tensor) -> Tensors:
        how: dict[str, Any] = {"batch_norm": plan.batch_norm, "loss_scale": plan.loss_scale, "changes": changes}
        found = victims.loss_gradients(model, frozen, Batch(inputs, labels), **how, create_graph=True).gradients
        return {name: found[name] for name in names}

    layered = None if changes or victims.drops_out(model) else _layered(model, frozen, batch, names, plan, plain=plain)
    if layered is None:
        return lambda inputs: plain(inputs, batch.labels)

    def gradient(inputs: Tensor) -> Tensors:
        with victims.differentiable_twice():
            found = layered(inputs.unsqueeze(0), batch.labels.unsqueeze(0))
        return {name: found[name][0] for name in names}

    return gradient


def _layered(
    model: nn.Module, state: ModelState, batch: Batch, names: Sequence[str], plan: LocalPlan, *, plain: _Plain
) -> Layered | None:
    inputs, labels = batch.inputs[:_FEW].detach(), batch.labels[:_FEW]
    tried = _tried.setdefault(model, {})
    key = (frozenset(names), plan.batch_norm, inputs.shape, labels.shape)
    if tried.get(key) == "plain":
        return None
    value = next(iter(state.parameters.values()))
    victim = victims.VictimModel(
        victims.frozen_copy(model, state, plan, device=value.device, dtype=value.dtype), names, plan
    )
    one = inputs.unsqueeze(0), labels.unsqueeze(0)
    if key not in tried:
        expected = {name: value.unsqueeze(0) for name, value in with_slope(plain, inputs, labels).items()}
        tried[key], _ = _fastest(["folded", "layered"], victim, *one, expected)
    return None if tried[key] == "plain" else cast(Layered, _METHODS[tried[key]](victim, one[0]))
