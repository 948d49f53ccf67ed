"""Check if observations can be attacked, and convert uploads to the tensors that an attack matches."""

from typing import Literal

import torch
from torch import Tensor

from fl_privacy.models.gradients.choose_method import number_of_steps, sgd_factor
from fl_privacy.types import LocalPlan, Observation, Tensors
from fl_privacy.types.modality import modality_of


class NotAttackableError(Exception):
    """The reason why victims can't be attacked, in one line."""


def why_not_attackable(observation: Observation, *, informative: bool = True) -> str | None:
    """Return why ``observation`` can't be attacked, or ``None``; ``informative`` refuses zero or constant updates."""
    wrong = _wrong_model(observation) or _wrong_tensors(observation)
    return wrong or (_nothing_to_learn(observation) if informative else None) or _wrong_knowledge(observation)


def expect_images(observation: Observation) -> None:
    """Raise ``NotAttackableError`` if the examples are rows of a table, without neighboring pixels."""
    kind = modality_of(observation.model)
    if kind.continuous and not kind.pixels:
        raise NotAttackableError("Images are expected, but got rows of a table; use attack=auto, or attack=tableak.")


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _wrong_model(observation: Observation) -> str | None:
    assumed = observation.assumed().parameters
    for name, parameter in observation.model.named_parameters():
        sent = assumed.get(name)
        if sent is None:
            return f"The values sent are expected to cover the model, but {name} is missing; give a stand-in for it."
        if sent.shape != parameter.shape:
            return f"{name} is expected to be sent as {tuple(parameter.shape)}, but got {tuple(sent.shape)}; check it."
        if not _finite(sent):
            return f"The values sent are expected to be finite, but {name} is not; check the model."
    return None


def _wrong_tensors(observation: Observation) -> str | None:
    upload = observation.upload
    if upload.num_examples < 1:
        return f"An update of at least 1 example is expected, but got {upload.num_examples}; set num_examples."
    if not upload.tensors:
        return "The upload is expected to hold tensors, but all were withheld; use defense=none."
    for name, tensor in upload.tensors.items():
        sent = observation.sent.parameters.get(name)
        if sent is None:
            return f"The upload is expected to hold tensors of the model, but got {name}; give the model that was sent."
        if tensor.shape != sent.shape:
            return f"{name} is expected to be uploaded as {tuple(sent.shape)}, but got {tuple(tensor.shape)}; check it."
        if not _finite(tensor):
            return f"The upload is expected to be finite, but {name} is not; check the training."
    return None


def _nothing_to_learn(observation: Observation) -> str | None:
    update = observation.update().values()
    if not any(tensor.any() for tensor in update):
        return (
            "The update is zero everywhere: the arrays uploaded equal those sent, and nothing can be learned from them;"
            " if the client's update leaves in another record, as in bytes, it was not attacked."
        )
    if all(tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()) for tensor in update):
        return "An update that varies is expected, but every tensor is constant; check the upload."
    return None


def _wrong_knowledge(observation: Observation) -> str | None:
    labels, count = observation.knowledge.labels, observation.upload.num_examples
    if labels is None or getattr(observation.model, "next_token", False):
        return None
    if labels.is_floating_point() and labels.shape == (count, observation.num_classes):
        if labels.min() >= 0 and (labels.sum(1) - 1).abs().max() < 1e-3:
            return None
        return "Known labels are expected to be probabilities that add up to 1, but some do not; scale each example's."
    if labels.shape != (count,) or labels.dtype not in (torch.int64, torch.int32):
        return (
            f"The known labels are expected to be {count} class indices or rows of {observation.num_classes}"
            f" probabilities, but got {tuple(labels.shape)} {labels.dtype}; give one for each example."
        )
    if labels.min() < 0 or labels.max() >= observation.num_classes:
        return (
            f"Known labels in [0, {observation.num_classes}) are expected, but reach from {int(labels.min())} to"
            f" {int(labels.max())}; check them, or set num_classes."
        )
    return None


LocalSteps = Literal["unroll", "first_order"]
"""Matching of several local steps: by replaying them, or with delta / lr as a gradient at the sent weights."""


def needs_unrolling(plan: LocalPlan, num_examples: int, local_steps: LocalSteps) -> bool:
    """Return whether the attack has to simulate the client's local steps; ``local_steps``: the attack's setting."""
    if plan.shares == "gradient" or local_steps == "first_order":
        return False
    return plan.optimizer != "sgd" or number_of_steps(num_examples, plan) > 1


def is_sum_of_gradients(plan: LocalPlan) -> bool:
    """Return whether the update is a weighted sum of gradients, with weights that ``plan`` determines."""
    return plan.shares == "gradient" or (plan.optimizer == "sgd" and not plan.weight_decay)


def accumulated_gradient(observation: Observation) -> Tensors:
    """Return the shared gradient, or the sum ``-delta / lr`` of the local steps."""
    if observation.plan.shares == "gradient":
        return observation.update()
    return {name: -delta / observation.plan.lr for name, delta in observation.update().items()}


def as_gradient(observation: Observation) -> Tensors:
    """Return the update as a mean gradient at the sent weights, exact for one step of SGD.

    For several steps, it is a first-order approximation. For Adam, only the signs are right.
    """
    plan, total = observation.plan, accumulated_gradient(observation)
    if plan.shares == "gradient" or plan.optimizer != "sgd":
        return total
    factor = sgd_factor(number_of_steps(observation.upload.num_examples, plan), plan)
    sent = observation.sent.parameters
    return {name: t / factor - plan.weight_decay * sent[name] for name, t in total.items()}


def matched_per_uploaded(plan: LocalPlan, num_examples: int, *, unrolls: bool) -> float:
    """Return the positive factor by which an upload is multiplied to give the tensors that the attack compares.

    It is 1 for an uploaded gradient. ``unrolls``: ``True`` if the attack simulates local steps.
    """
    if plan.shares == "gradient":
        return 1.0
    if unrolls or plan.optimizer != "sgd":
        return 1 / plan.lr
    return 1 / (plan.lr * sgd_factor(number_of_steps(num_examples, plan), plan))


def stack(updates: list[Tensors], names: list[str], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Stack the tensors of V updates, by name, to (V, *shape)."""
    return {name: torch.stack([u[name].to(device=device, dtype=dtype) for u in updates]) for name in names}
