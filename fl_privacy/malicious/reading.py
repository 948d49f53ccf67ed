"""From images read out of a layer to a reconstruction, and its labels."""

import torch
from torch import Tensor

from fl_privacy.attacks.gradient_inversion.attackable import NotAttackableError
from fl_privacy.attacks.gradient_inversion.labels import choose_labels
from fl_privacy.gradients import frozen_copy
from fl_privacy.types import Batch, Certainty, Observation, Reconstruction

UNKNOWN = -1
"""Label of an image whose class was not read."""


def reconstruction_of(
    observation: Observation, images: Tensor, proven: Tensor, *, labels: bool = True
) -> Reconstruction:
    """What was read of ``observation``.

    Args:
        observation: of the update.
        images: (N, D) or (N, C, H, W).
        proven: (N,) which of them are single images.
        labels: whether the update is one batch's, so that its labels follow from the output layer.
    """
    if not len(images):
        return Reconstruction(id=observation.id, batch=None, failure="Nothing in the update tells of a single image.")
    shaped = images.reshape(len(images), *observation.input_shape)
    each = tuple(Certainty.PROVEN if sure else Certainty.APPROXIMATE for sure in proven.tolist())
    found, source = _labels(observation, len(images)) if labels else (torch.full((len(images),), UNKNOWN), "inferred")
    return Reconstruction(
        id=observation.id,
        batch=Batch(shaped.clamp(0, 1).float().cpu(), found),
        loss=float((~proven).double().mean()),
        label_source=source,
        certainty=min(each, key=list(reversed(Certainty)).index),
        certainties=each,
    )


def _labels(observation: Observation, number: int) -> tuple[Tensor, str]:
    """(number,) the batch's labels as far as they are told or follow from the output layer, in no order."""
    found, source = None, "inferred"
    state, unknown = observation.assumed(), torch.full((number,), UNKNOWN)
    if any(name not in state.parameters for name, _ in observation.model.named_parameters()):
        return unknown, source
    sent = next(iter(state.parameters.values()))
    model = frozen_copy(observation.model, state, observation.plan, device=sent.device, dtype=sent.dtype)
    try:
        scale = observation.plan.loss_scale
        found, source = choose_labels(observation, "auto", model, loss_scale=scale, seed=0)
    except NotAttackableError:
        pass
    labels = unknown
    if found is not None:
        classes = (found.argmax(1) if found.dim() == 2 else found).cpu()
        labels[: len(classes)] = classes[:number]
    return labels, source
