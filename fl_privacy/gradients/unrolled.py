"""Updates of several local steps: the client's training, replayed and differentiated through."""

import math

import torch
from torch import Tensor
from torch.func import grad, vmap

from fl_privacy.gradients.victims import VictimGradients, VictimLoss, VictimModel
from fl_privacy.types import LocalPlan, Tensors


def number_of_steps(num_examples: int, plan: LocalPlan) -> int:
    """How many local steps ``step_slices`` would give, counted without making them: claims may be of any size."""
    if num_examples < 1:
        return 0
    size = min(plan.batch_size or num_examples, num_examples)
    if plan.epochs is not None:
        return plan.epochs * -(-num_examples // size)
    return plan.steps or 1


def step_slices(num_examples: int, plan: LocalPlan) -> list[slice]:
    """The examples of each local step in an order of the attacker's own, since the client's is secret.

    None where there is no example.
    """
    if num_examples < 1:
        return []
    size = min(plan.batch_size or num_examples, num_examples)
    if plan.epochs is not None:
        return [slice(i, i + size) for _ in range(plan.epochs) for i in range(0, num_examples, size)]
    one_pass = [slice(i * size, (i + 1) * size) for i in range(num_examples // size)]
    steps = plan.steps or 1
    return (one_pass * math.ceil(steps / len(one_pass)))[:steps]


class Unrolled(VictimGradients):
    """``-delta / lr`` of the client's local steps; every parameter moves, only the uploaded ones are returned."""

    def __init__(self, victim_model: VictimModel) -> None:
        self._victim_model = victim_model
        self._loss = VictimLoss(victim_model)
        self._sent = self._loss.parameters()

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensors:
        """Accumulated gradients by name."""
        updates: Tensors = vmap(self._train)(inputs, labels)
        return updates

    def _train(self, inputs: Tensor, labels: Tensor) -> Tensors:
        plan = self._victim_model.plan
        held = plan.held(self._sent)
        moved = {name: torch.zeros_like(p) for name, p in self._sent.items() if name not in held}
        moments: list[Tensors] = [{}, {}]
        for number, batch in enumerate(step_slices(len(inputs), plan), start=1):
            parameters = {name: self._sent[name] - plan.lr * m for name, m in moved.items()}
            gradients: Tensors = grad(self._loss)(parameters, inputs[batch], labels[batch])
            if plan.weight_decay and plan.optimizer != "adamw":
                gradients = {name: g + plan.weight_decay * parameters[name] for name, g in gradients.items()}
            step, moments = step_direction(gradients, moments, plan, number)
            if plan.optimizer == "adamw":
                step = {name: s + plan.weight_decay * parameters[name] for name, s in step.items()}
            moved = {name: m + step[name] for name, m in moved.items()}
        return {name: moved[name] for name in self._victim_model.names}


def step_direction(
    gradients: Tensors, moments: list[Tensors], plan: LocalPlan, number: int
) -> tuple[Tensors, list[Tensors]]:
    """What ``torch.optim.SGD`` or ``torch.optim.Adam`` multiply by the learning rate in step ``number`` (from 1)."""
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
