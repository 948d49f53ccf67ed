"""What model inversion hands back: the best attempt of each victim, with the labels that the update tells."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fl_privacy.attacks.gradient_inversion.attackable import NotAttackableError
from fl_privacy.attacks.gradient_inversion.grouping import failed
from fl_privacy.attacks.gradient_inversion.guesses import guessed_outputs
from fl_privacy.attacks.gradient_inversion.labels import choose_labels, infer_labels, output_layer
from fl_privacy.attacks.gradient_inversion.standings import Minimum
from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.film import Snapshot, shortened
from fl_privacy.losses import CROSS_ENTROPY, is_plain
from fl_privacy.types import Batch, Observation, Reconstruction

UNKNOWN = -1
"""Label of an image whose label the update does not tell."""


def best_reconstruction(
    observation: Observation,
    model: nn.Module,
    found: Minimum,
    images: Tensor,
    *,
    rows: range,
    films: Mapping[int, tuple[Snapshot, ...]],
    sentences: tuple[str, ...] = (),
) -> Reconstruction:
    """The best of the attempts ``rows`` at ``observation``.

    Args:
        observation: of the victim.
        model: with the values that the attacker works with.
        found: of all attempts.
        images: (V, B, C, H, W) of all attempts.
        rows: attempts at this victim.
        films: of the attempts that were filmed.
        sentences: what was done against the defense.
    """
    losses = found.loss[rows.start : rows.stop]
    if not losses.isfinite().any():
        return failed(observation, "The objective is not finite at any start; check the update.")
    best = rows.start + int(losses.argmin())
    history = found.history[:, best]
    told = observation.knowledge.labels
    labels = _inferred(observation, model, images[best]) if told is None else told
    return Reconstruction(
        id=observation.id,
        batch=Batch(images[best], labels.cpu()),
        loss=float(found.loss[best]),
        history=tuple(history[history.isfinite()].tolist()),
        label_source="inferred" if told is None else "known",
        countermeasures=sentences,
        film=shortened(films.get(best, ())),
    )


def _inferred(observation: Observation, model: nn.Module, images: Tensor) -> Tensor:
    unknown = torch.full((len(images),), UNKNOWN)
    layer = output_layer(model, observation.num_classes)
    if layer is None:
        return unknown
    values = next(model.parameters())
    scale = observation.plan.loss_scale
    gradient = {n: g.to(values) / scale for n, g in as_gradient(observation).items() if n in layer}
    if not any(g.any() for g in gradient.values()):
        return unknown
    if not is_plain(observation.loss or CROSS_ENTROPY):
        return _of_other_loss(observation, model, unknown)
    outputs = guessed_outputs(model, images.to(values), layer[0])
    labels = infer_labels(gradient, layer, len(images), *outputs)
    return unknown if labels is None else labels


def _of_other_loss(observation: Observation, model: nn.Module, unknown: Tensor) -> Tensor:
    try:
        labels, _ = choose_labels(observation, "auto", model, loss_scale=observation.plan.loss_scale, seed=0)
    except NotAttackableError:
        return unknown
    return unknown if labels is None else labels
