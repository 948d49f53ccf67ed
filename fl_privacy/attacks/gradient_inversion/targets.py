"""Convert an upload to the tensors that an attack matches."""

from typing import Literal

import torch
from torch import Tensor

from fl_privacy.models.gradients.choose_method import number_of_steps, sgd_factor
from fl_privacy.types import LocalPlan, Observation, Tensors

LocalSteps = Literal["unroll", "first_order"]
"""Matching of several local steps: by replaying them, or with delta / lr as a gradient at the weights sent."""


def needs_unrolling(plan: LocalPlan, num_examples: int, local_steps: LocalSteps) -> bool:
    """Return ``True`` if local steps have to be replayed."""
    if plan.shares == "gradient" or local_steps == "first_order":
        return False
    return plan.optimizer != "sgd" or number_of_steps(num_examples, plan) > 1


def is_sum_of_gradients(plan: LocalPlan) -> bool:
    """Return ``True`` if the update is a sum of gradients with known factors."""
    return plan.shares == "gradient" or (plan.optimizer == "sgd" and not plan.weight_decay)


def accumulated_gradient(observation: Observation) -> Tensors:
    """Return the shared gradient, or the sum ``-delta / lr`` of the local steps."""
    if observation.plan.shares == "gradient":
        return observation.update()
    return {name: -delta / observation.plan.lr for name, delta in observation.update().items()}


def as_gradient(observation: Observation) -> Tensors:
    """Return the update as a mean gradient at the weights sent: exact for one step of SGD, first order for more.

    Adam's steps keep only the sign.
    """
    plan, total = observation.plan, accumulated_gradient(observation)
    if plan.shares == "gradient" or plan.optimizer != "sgd":
        return total
    factor = sgd_factor(number_of_steps(observation.upload.num_examples, plan), plan)
    sent = observation.sent.parameters
    return {name: t / factor - plan.weight_decay * sent[name] for name, t in total.items()}


def matched_per_uploaded(plan: LocalPlan, num_examples: int, *, unrolls: bool) -> float:
    """Return the absolute factor from uploaded to matched tensors, 1 for a gradient."""
    if plan.shares == "gradient":
        return 1.0
    if unrolls or plan.optimizer != "sgd":
        return 1 / plan.lr
    return 1 / (plan.lr * sgd_factor(number_of_steps(num_examples, plan), plan))


def stack(updates: list[Tensors], names: list[str], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Stack each name's tensors to (V, *shape)."""
    return {name: torch.stack([u[name].to(device=device, dtype=dtype) for u in updates]) for name in names}
