"""Label counts of a batch, once there is a guess at its images."""

import torch
from torch import Tensor

from fl_privacy.attacks.gradient_inversion.guesses import usual_outputs
from fl_privacy.attacks.gradient_inversion.labels import (
    expected_counts,
    infer_labels,
    nearest_counts,
    output_layer,
)
from fl_privacy.attacks.gradient_inversion.preparation import Prepared
from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.rng import derive_generator
from fl_privacy.types import Observation, Tensors


@torch.no_grad()
def other_labels(prepared: Prepared, observation: Observation, number: int) -> list[Tensor]:
    """So many label counts of a batch (B,) that are the next likely ones after those inferred, or fewer."""
    layer = output_layer(observation.model, observation.num_classes)
    size = observation.upload.num_examples
    if layer is None or size == 1 or prepared.rounds[0].unrolls:
        return []
    like = next(prepared.observer.parameters())
    rng = derive_generator(prepared.seed, "attack", str(observation.id), "labels")
    gradient = _gradient_of(observation, layer, like)
    outputs = usual_outputs(prepared.observer, observation.input_shape, layer, rng, gradient)
    expected = expected_counts(gradient, layer, size, *outputs)
    return [] if expected is None else nearest_counts(expected, size, number + 1)[1:]


def _gradient_of(observation: Observation, layer: tuple[str, str | None], like: Tensor) -> Tensors:
    """Of the output layer, unscaled."""
    scale = observation.plan.loss_scale
    return {name: g.to(like) / scale for name, g in as_gradient(observation).items() if name in layer}


@torch.no_grad()
def refined_labels(prepared: Prepared, observation: Observation, labels: Tensor, images: Tensor) -> Tensor | None:
    """Labels (B,) whose counts follow from what the model makes of ``images``; ``None`` where they stay as they are.

    Counts are inferred from the mean gradient of the output layer, p - y, with the mean p of guessed images. At first
    these are noise, which a trained model takes for something else than photographs; what a descent has made of them is
    closer to what the client has. Images keep their labels as far as the counts allow.

    Args:
        prepared: of the attack.
        observation: of the victim.
        labels: (B,) class indices that ``images`` were found with.
        images: (B, C, H, W).
    """
    layer = output_layer(observation.model, observation.num_classes)
    if layer is None or layer[1] is None or layer[1] not in observation.upload.tensors:
        return None
    probabilities = prepared.observer(images).softmax(1).mean(0)
    gradient = _gradient_of(observation, layer, images)
    found = infer_labels(gradient, layer, len(labels), probabilities, torch.ones_like(probabilities))
    if found is None:
        return None
    spare = torch.bincount(found, minlength=observation.num_classes)
    result, unlabeled = labels.clone(), []
    for place, label in enumerate(labels.tolist()):
        if spare[label] > 0:
            spare[label] -= 1
        else:
            unlabeled.append(place)
    result[unlabeled] = torch.arange(len(spare), device=labels.device).repeat_interleave(spare).to(labels)
    return result if unlabeled else None
