"""From an upload to the tensors that an attack matches."""

from typing import Literal

import torch
from torch import Tensor

from fl_privacy.models.gradients.choose_method import number_of_steps, sgd_factor
from fl_privacy.types import LocalPlan, Observation, Tensors

LocalSteps = Literal["unroll", "first_order"]
"""How several local steps are matched: by replaying them, or with delta / lr as a gradient at the weights sent."""


def needs_unrolling(plan: LocalPlan, num_examples: int, local_steps: LocalSteps) -> bool:
    """Say whether local steps have to be replayed: the update is more than a gradient up to a factor."""
    if plan.shares == "gradient" or local_steps == "first_order":
        return False
    return plan.optimizer != "sgd" or number_of_steps(num_examples, plan) > 1


def is_sum_of_gradients(plan: LocalPlan) -> bool:
    """Say whether the update is a sum of gradients with known factors, or one of them."""
    return plan.shares == "gradient" or (plan.optimizer == "sgd" and not plan.weight_decay)


def accumulated_gradient(observation: Observation) -> Tensors:
    """Return the gradient shared, or the sum ``-delta / lr`` of what the local steps subtracted."""
    if observation.plan.shares == "gradient":
        return observation.update()
    return {name: -delta / observation.plan.lr for name, delta in observation.update().items()}


def as_gradient(observation: Observation) -> Tensors:
    """Return the update as a mean gradient at the weights sent: exact for one step of SGD, to first order for more.

    The steps of Adam hide the scale of the gradient; its sign survives.
    """
    plan, total = observation.plan, accumulated_gradient(observation)
    if plan.shares == "gradient" or plan.optimizer != "sgd":
        return total
    factor = sgd_factor(number_of_steps(observation.upload.num_examples, plan), plan)
    sent = observation.sent.parameters
    return {name: t / factor - plan.weight_decay * sent[name] for name, t in total.items()}


def matched_per_uploaded(plan: LocalPlan, num_examples: int, *, unrolls: bool) -> float:
    """Return the factor from the uploaded to the matched tensors: 1 for a gradient; for a delta without its sign."""
    if plan.shares == "gradient":
        return 1.0
    if unrolls or plan.optimizer != "sgd":
        return 1 / plan.lr
    return 1 / (plan.lr * sgd_factor(number_of_steps(num_examples, plan), plan))


def stack(updates: list[Tensors], names: list[str], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Stack each name's tensors to (V, *shape)."""
    return {name: torch.stack([u[name].to(device=device, dtype=dtype) for u in updates]) for name in names}
