"""From images read out of a layer to a reconstruction, and its labels."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from fl_privacy.attacks.gradient_inversion.attackable import NotAttackableError
from fl_privacy.attacks.gradient_inversion.evidence import Usual, evident_defense
from fl_privacy.attacks.gradient_inversion.labels import choose_labels, output_layer
from fl_privacy.gradients import frozen_copy
from fl_privacy.malicious.imprint_block import BLOCK
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
        proven: (N,) which of them are single images, if nobody has changed the update; where it shows that somebody
            did, none is.
        labels: whether the update is one batch's, so that its labels follow from the output layer.
    """
    if not len(images):
        return Reconstruction(id=observation.id, batch=None, failure="Nothing in the update tells of a single image.")
    proven = proven & (not _is_defended(observation))
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


def _is_defended(observation: Observation) -> bool:
    """Whether the first or the last layer of the honest model shows zeros or few levels that somebody has put there.

    Their gradients have no scattered zeros; those of layers in between have, where few neurons fire.
    """
    layer, tensors = output_layer(observation.model, observation.num_classes), observation.upload.tensors
    honest = [name for name, tensor in tensors.items() if tensor.dim() > 1 and not name.startswith(f"{BLOCK}.")]
    ends = {*honest[:1], *([layer[0]] if layer else [])}
    if not all(bool(tensors[name].any()) for name in ends & tensors.keys()):
        return True
    upload = replace(observation.upload, tensors={name: tensors[name] for name in ends & tensors.keys()})
    return bool(evident_defense(replace(observation, upload=upload), Usual(scattered=0.0, columns=1.0, noise=math.inf)))


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
