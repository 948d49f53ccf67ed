"""Infer an unknown loss from the output layer's gradient."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.attacks.gradient_inversion.attackable import NotAttackableError
from fl_privacy.attacks.gradient_inversion.labels import output_layer
from fl_privacy.attacks.gradient_inversion.solved_labels import Head, SingleExample, labels_behind
from fl_privacy.attacks.gradient_inversion.targets import as_gradient, is_sum_of_gradients
from fl_privacy.models.losses import BINARY_CROSS_ENTROPY, CROSS_ENTROPY, SQUARED_ERROR, Loss
from fl_privacy.types import Observation, Tensors
from fl_privacy.types.user_gradients import computed_in

_FITS = 1e-3
"""Share of the output layer's gradient that the right loss may leave unexplained, in single precision."""

_ROUNDED = 4
"""The same in half precision, in units of its rounding."""

_COARSE_FROM, _EQUAL = 64, 0.05
"""Number of values, and their share of equal ones, that show half precision."""

_ROUNDINGS = 4
"""Roundings of a probability near 1 by which the sum of all may be off."""

_WHOLE = 2e-3
"""Largest distance of targets from whole numbers."""

ASSUMED = (
    "The client's loss is taken for cross entropy, which the gradient of its output layer neither shows nor denies."
)

ONE_OUTPUT = (
    "The network has one output, of which there is no cross entropy: the client's loss is taken for squared error,"
    " whose targets explain the gradient of every loss. They are the client's own only if that is its loss (loss= of"
    " Observation.of_gradients)."
)

WHOLE_LABELS = (
    "The output layer's gradient is that of a cross entropy; of a batch it says neither whether labels are smoothed nor"
    " whether classes are weighted, so that plain ones are assumed: give loss= to Observation.of_gradients if they are"
    " not."
)

SOFT_LABELS = (
    "The output layer's gradient asks for more classes than the batch has examples: its labels are smoothed or mixed,"
    " and descents, which assume one class for each example, read less than with the client's loss="
    " (Observation.of_gradients)."
)


def found_loss(observation: Observation, model: nn.Module) -> tuple[Loss, str]:
    """Infer the loss of a client, with a sentence on how, empty for plain cross entropy.

    ``model`` is frozen, with the values sent, in double precision.

    Raises:
        NotAttackableError: no known loss fits the update.
    """
    layer = output_layer(observation.model, observation.num_classes)
    plain = (SQUARED_ERROR, ONE_OUTPUT) if observation.num_classes == 1 else (CROSS_ENTROPY, ASSUMED)
    if layer is None or layer[0] not in observation.upload.tensors or not is_sum_of_gradients(observation.plan):
        return plain
    like, scale = next(model.parameters()), observation.plan.loss_scale
    sent = {n: g for n, g in as_gradient(observation).items() if n in layer}
    gradient = {n: g.to(like) / scale for n, g in sent.items()}
    fits = max(_FITS, *(_ROUNDED * torch.finfo(precision_of(g)).eps for g in sent.values()))
    if observation.upload.num_examples == 1 and layer[1] in gradient:
        single = SingleExample.of(model, observation.input_shape, layer, gradient)
        return plain if single is None else _of_one(single, fits)
    return plain if observation.num_classes == 1 else _of_many(observation, layer, gradient, fits)


def precision_of(gradient: Tensor) -> torch.dtype:
    """Return the type that a gradient was computed in, even if it was scaled afterwards.

    Half precision has so few values that many are equal.
    """
    values = gradient[gradient != 0].abs().sort().values
    coarse = len(values) >= _COARSE_FROM and float((values.diff() == 0).float().mean()) > _EQUAL
    return torch.bfloat16 if coarse else computed_in(gradient)


def _of_one(single: SingleExample, fits: float) -> tuple[Loss, str]:
    for loss in _candidates(single.head):
        labels, left = labels_behind(single.head, loss, single.slopes)
        if loss is CROSS_ENTROPY and left < fits and not labels.is_floating_point():
            return CROSS_ENTROPY, ""
        if left < fits and _likely(loss, labels):
            found = _smoothed(labels) if loss is CROSS_ENTROPY else loss
            return found, f"The client's loss was found to be {found.name}, which gives its output layer's gradient."
    if not _denies_softmax(single.slopes[0], fits):
        return CROSS_ENTROPY, ASSUMED
    raise NotAttackableError(
        "None of cross entropy, binary cross entropy and squared error gives the gradient of the output layer; give the"
        " client's loss= to Observation.of_gradients."
    )


def _of_many(
    observation: Observation, layer: tuple[str, str | None], gradient: Tensors, fits: float
) -> tuple[Loss, str]:
    """Infer the loss of a batch: under a softmax, the gradient's columns add up to zero.

    With one class an example, at most as many values of the bias's gradient, means of p - y, are negative as examples.
    """
    weight = gradient[layer[0]]
    bias = gradient.get(layer[1] or "")
    columns = weight if bias is None else torch.cat([weight, bias[:, None]], 1)
    if float(columns.sum(0).norm()) < fits * float(columns.norm()):
        asked_for = 0 if bias is None else int((bias < -fits * bias.abs().max()).sum())
        return CROSS_ENTROPY, SOFT_LABELS if asked_for > observation.upload.num_examples else WHOLE_LABELS
    rank = int((torch.linalg.svdvals(columns.cpu()) > fits * torch.linalg.matrix_norm(columns.cpu(), 2)).sum())
    if bias is None or not _denies_softmax(bias, fits):
        return CROSS_ENTROPY, ASSUMED
    if rank > observation.upload.num_examples or rank == min(columns.shape):
        return CROSS_ENTROPY, ASSUMED
    raise NotAttackableError(
        "The client's loss is no cross entropy, whose gradients of the output layer add up to 0, and of a batch the"
        " update does not say which other; give loss= to Observation.of_gradients, as 'bce', 'mse' or a function."
    )


def _denies_softmax(slopes: Tensor, fits: float) -> bool:
    """Return ``True`` if the bias' gradient (K,) does not add up to 0, has no zeros, and exceeds rounding.

    Zeros come from a defense; tiny slopes from probabilities near 1, known only to their rounding.
    """
    rounding = _ROUNDINGS * torch.finfo(torch.float32).eps
    return bool((slopes != 0).all()) and float(slopes.sum().abs()) > max(rounding, fits * float(slopes.norm()))


def _candidates(head: Head) -> list[Loss]:
    summed = [
        Loss(f"{loss.name}, summed over the outputs", _Summed(loss), targets=loss.targets, takes="rows")
        for loss in (BINARY_CROSS_ENTROPY, SQUARED_ERROR)
    ]
    found = [CROSS_ENTROPY, BINARY_CROSS_ENTROPY, summed[0], SQUARED_ERROR, summed[1]]
    outputs = head.outputs.detach()
    if outputs.min() >= 0 and outputs.max() <= 1:
        bits = Loss("binary cross entropy of probabilities", F.binary_cross_entropy, targets="bits", takes="rows")
        found.insert(0, bits)
    return found


class _Summed:
    """A mean loss times the number of outputs, which is their sum."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.shape[1] * self._loss.function(outputs, labels)


def _likely(loss: Loss, labels: Tensor) -> bool:
    """Return ``True`` for targets that a client may have; any number fits a squared error."""
    if loss.targets == "classes":
        return True
    near = (labels - labels.round()).abs().max() < _WHOLE and bool(
        ((labels.round() == 0) | (labels.round() == 1)).all()
    )
    return bool(near) or (loss is SQUARED_ERROR and labels.shape[1] == 1)


def _smoothed(labels: Tensor) -> Loss:
    """Return the cross entropy of soft labels (1, K), with label smoothing if all others are equal."""
    others = labels[0].sort().values[:-1]
    share = float(others.mean()) * labels.shape[1]
    if labels.shape[1] > 2 and float(others.std()) < _WHOLE * float(others.mean()) and 0 < share < 1:
        share = round(share, 4)
        smooth = nn.CrossEntropyLoss(label_smoothing=share)
        return Loss(f"cross entropy with labels smoothed by {share:g}", smooth)
    return Loss("cross entropy of soft labels", F.cross_entropy)
