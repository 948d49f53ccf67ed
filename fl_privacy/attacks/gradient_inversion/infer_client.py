"""Infer what is undisclosed of a client: loss, mode, scale of inputs, gradient behind Adam."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fl_privacy.attacks.gradient_inversion.adam_step import without_adam
from fl_privacy.attacks.gradient_inversion.attackable import NotAttackableError
from fl_privacy.attacks.gradient_inversion.clients_loss import ASSUMED, SOFT_LABELS, WHOLE_LABELS, found_loss
from fl_privacy.attacks.gradient_inversion.other_modalities import search_of
from fl_privacy.models import normalized
from fl_privacy.models.gradients import frozen_copy
from fl_privacy.models.losses import CROSS_ENTROPY
from fl_privacy.models.unwrap_model import detached_copy, once_each
from fl_privacy.types import Certainty, LocalPlan, ModelState, Observation, Reconstruction, Tensors
from fl_privacy.types.plan import Normalization

_SAME = 1e-6
"""Largest relative difference of outputs of the same images."""

_UNIT = (0.0, 1.0)

DRAWS = "The model draws at random in training; the attack computes without, since the draws are the client's secret."
_RETURNS_MORE = "In training the model returns more than its outputs; it is attacked as in evaluation mode."


@dataclass(frozen=True)
class _Passes:
    """Reasons, by passes over the same images, why training, or any, mode can't be attacked."""

    not_in_training: str = ""
    in_no_mode: str = ""


_passes: "WeakKeyDictionary[nn.Module, dict[object, _Passes]]" = WeakKeyDictionary()
"""Findings by model, shape of its images, mode and batch norm."""

_scaled: "WeakKeyDictionary[nn.Module, dict[tuple[float, float], nn.Module]]" = WeakKeyDictionary()
"""Copies of models that take inputs in [0, 1], by the model's own range."""


@dataclass(frozen=True, eq=False)
class Disclosed:
    """A completed observation, with a loss, in a mode without draws, of inputs in [0, 1].

    ``wrong`` is the reason why it can't be attacked, or ``None``.
    """

    observation: Observation
    wrong: str | None = None


def disclosed(observations: Sequence[Observation]) -> list[Disclosed]:
    """Complete each observation by what can be inferred."""
    states: dict[tuple[int, int], ModelState] = {}
    return [_disclosed(observation, states) for observation in observations]


def restored(observation: Observation, attacked: Disclosed, found: Reconstruction) -> Reconstruction:
    """Return ``found`` in the scale of the client's inputs, with a sentence for each inference.

    Assumptions on labels are left out if these reproduce the update.
    """
    assumed = {WHOLE_LABELS, SOFT_LABELS} if found.certainty is not Certainty.APPROXIMATE else set[str]()
    notes = tuple(dict.fromkeys(n for n in (*attacked.observation.notes, *found.notes) if n not in assumed))
    low, high = observation.input_range
    if found.batch is not None and observation.input_range != _UNIT:
        found = replace(found, batch=replace(found.batch, inputs=low + (high - low) * found.batch.inputs))
    return found if notes == found.notes else replace(found, notes=notes)


def _disclosed(observation: Observation, states: dict[tuple[int, int], ModelState]) -> Disclosed:
    if not search_of(observation.model).completed:
        return Disclosed(observation)
    try:
        seen = _once_each(observation, states)
        seen = _in_unit_range(_without_draws(seen))
        return Disclosed(without_adam(_with_loss(seen)))
    except NotAttackableError as reason:
        return Disclosed(observation, str(reason))


def _once_each(observation: Observation, states: dict[tuple[int, int], ModelState]) -> Observation:
    model, own = observation.model, {name for name, _ in observation.model.named_parameters()}
    twice = {name for name, _ in model.named_parameters(remove_duplicate=False)} - own
    if not twice:
        return observation
    key = id(model), id(observation.sent)
    if key not in states:
        sent = observation.sent
        states[key] = ModelState(once_each(model, sent.parameters), sent.buffers)
    upload = replace(observation.upload, tensors=once_each(model, observation.upload.tensors))
    return replace(observation, sent=states[key], upload=upload)


def _without_draws(observation: Observation) -> Observation:
    """Switch to evaluation mode if the model draws or returns more than outputs in training."""
    if not _covers(observation):
        return observation
    plan = observation.plan
    seen, key = _passes.setdefault(observation.model, {}), (observation.input_shape, plan.mode, plan.batch_norm)
    if key not in seen:
        seen[key] = _compared(observation)
    if seen[key].in_no_mode:
        raise NotAttackableError(seen[key].in_no_mode)
    if not seen[key].not_in_training:
        return observation
    notes = (*observation.notes, seen[key].not_in_training)
    return replace(observation, plan=_evaluating(plan), notes=notes)


def _evaluating(plan: LocalPlan) -> LocalPlan:
    return replace(plan, mode="eval")


def _covers(observation: Observation) -> bool:
    assumed = observation.assumed().parameters
    return all(
        name in assumed and assumed[name].shape == parameter.shape and bool(assumed[name].isfinite().all())
        for name, parameter in observation.model.named_parameters()
    )


def _compared(observation: Observation) -> _Passes:
    if observation.plan.mode == "train":
        outputs = _two_passes(observation, observation.plan)
        if outputs is not None and _alike(*outputs):
            return _Passes()
        evaluated = _two_passes(observation, _evaluating(observation.plan))
        if evaluated is None:
            return _Passes()  # the attack reports the reason
        why = _RETURNS_MORE if outputs is None else DRAWS
    else:
        evaluated, why = _two_passes(observation, observation.plan), ""
    if evaluated is not None and not _alike(*evaluated):
        return _Passes(
            in_no_mode="The model draws at random in evaluation mode, too, so that gradients of guesses can't be"
            " compared; let it draw only where self.training is set."
        )
    return _Passes(not_in_training=why)


@torch.no_grad()
def _two_passes(observation: Observation, plan: LocalPlan) -> tuple[Tensor, Tensor] | None:
    """Return outputs (2, K) of the same images under other random numbers, or ``None``."""
    like = next(iter(observation.assumed().parameters.values()))
    model = frozen_copy(observation.model, observation.assumed(), plan, device=like.device, dtype=torch.float32)
    images = torch.rand((2, *observation.input_shape), generator=torch.Generator().manual_seed(0)).to(like.device)
    found = []
    devices = [like.device] if like.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        for seed in (1, 2):
            torch.manual_seed(seed)
            try:
                outputs = model(images)
            except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
                return None
            if not isinstance(outputs, Tensor):
                return None
            found.append(outputs)
    return found[0], found[1]


def _alike(one: Tensor, other: Tensor) -> bool:
    same = one.shape == other.shape and bool((one - other).norm() <= _SAME * one.norm())
    return same or not bool(one.isfinite().all())


def _in_unit_range(observation: Observation) -> Observation:
    if observation.input_range == _UNIT:
        return observation
    low, high = observation.input_range
    copies = _scaled.setdefault(observation.model, {})
    if observation.input_range not in copies:
        scaling = Normalization([-low / (high - low)], [1 / (high - low)])
        copies[observation.input_range] = normalized(detached_copy(observation.model), scaling)
    known = observation.knowledge

    def unit(images: Tensor | None) -> Tensor | None:
        return None if images is None else (images - low) / (high - low)

    knowledge = replace(known, public_images=unit(known.public_images), previous=unit(known.previous))
    return replace(observation, model=copies[observation.input_range], input_range=_UNIT, knowledge=knowledge)


def _with_loss(observation: Observation) -> Observation:
    if observation.loss is not None:
        return observation
    if not _covers(observation) or not _fits(observation.upload.tensors, observation.sent.parameters):
        return observation
    values = next(iter(observation.assumed().parameters.values()))
    model = frozen_copy(
        observation.model, observation.assumed(), observation.plan, device=values.device, dtype=torch.float64
    )
    try:
        loss, sentence = found_loss(observation, model)
    except NotAttackableError:
        if DRAWS not in observation.notes:
            raise
        loss, sentence = CROSS_ENTROPY, ASSUMED  # the gradient depends on the draws
    return replace(observation, loss=loss, notes=(*observation.notes, *((sentence,) if sentence else ())))


def _fits(update: Tensors, sent: Tensors) -> bool:
    return all(name in sent and sent[name].shape == value.shape for name, value in update.items())
