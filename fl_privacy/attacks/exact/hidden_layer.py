"""Reconstruct exactly the features that entered a later fully connected layer, from its gradient."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.attacks.attack import timely
from fl_privacy.attacks.exact.certificate import Reproduction
from fl_privacy.attacks.exact.first_layer import fit
from fl_privacy.attacks.exact.repeats import times_of
from fl_privacy.attacks.exact.spear import AGREEMENT, columns_of, sparse_factors
from fl_privacy.attacks.gradient_inversion.labels import output_layer
from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.models import Rest
from fl_privacy.models.gradients.hooks import entering, owners
from fl_privacy.types import Observation

_ROUNDS, _STARTS = 20, 64
"""Numbers of searches for sparse directions in the gradient of a batch, and of their starts."""

_ONE_HOT = 0.01
"""Largest distance of targets from those of one class."""


@dataclass(frozen=True, eq=False)
class HiddenFeatures:
    """Inputs of a hidden layer of a victim, and their labels.

    Attributes:
        values: (B, N) float64 inputs, in an order of their own.
        labels: (B,) classes in that order.
    """

    path: str
    values: Tensor
    labels: Tensor


def first_hidden_layer(observation: Observation) -> str | None:
    """Return the path of the first uploaded fully connected layer behind others; ``None`` if there is none.

    Batch statistics rule it out, since each image needs features of its own.
    """
    model, sent = observation.model, observation.upload.tensors
    normalizes = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    if normalizes and observation.plan.batch_norm != "eval":
        return None
    values = next(model.parameters())
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad(), entering(owners(model)) as calls:
            model.eval()(values.new_zeros(2, *observation.input_shape))
    finally:
        for module, training in modes:
            module.training = training
    names = [call.name for call in calls]
    for call in calls[1:]:
        told = f"{call.name}.weight" in sent and f"{call.name}.bias" in sent
        if isinstance(call.module, nn.Linear) and told and names.count(call.name) == 1 and call.inputs.dim() == 2:
            return call.name
    return None


def hidden_features(reproduction: Reproduction, path: str, rng: torch.Generator) -> HiddenFeatures | None:
    """Reconstruct the inputs of the layer at ``path`` by :mod:`fl_privacy.attacks.exact.spear`; ``None`` if uncertain.

    One image is left to :class:`fl_privacy.attacks.ModelInversion`: matching its features, a quotient of gradients (Gu
    et al. 2021, Lemma 1), twice loses quality (LeNet with tanh, 600 evaluations: 47 instead of 54 dB).
    """
    observation = reproduction.observation
    gradient, count = as_gradient(observation), observation.upload.num_examples
    weight, bias = gradient[f"{path}.weight"], gradient[f"{path}.bias"]
    if count == 1 or not bias.any():
        return None
    output = output_layer(observation.model, observation.num_classes)
    if (output and path == output[0].rpartition(".")[0]) or (basis := columns_of(weight, count)) is None:
        return None
    if basis.shape[1] < count and len(weight) <= max(count + 1, observation.num_classes):
        return None  # with so few outputs, different examples have a low rank, too
    if basis.shape[1] == 1:
        return _with_labels(reproduction, path, fit(weight[None], bias[None]))
    state = observation.assumed().parameters
    own = state[f"{path}.weight"], state[f"{path}.bias"]
    searched = sparse_factors(weight, bias, own, basis, rng=rng, starts=_STARTS)
    for _, factors in zip(timely(range(_ROUNDS)), searched, strict=False):
        if factors is not None and factors.agreement >= AGREEMENT:
            return _with_labels(reproduction, path, factors.inputs)
    return None


def _with_labels(reproduction: Reproduction, path: str, features: Tensor) -> HiddenFeatures | None:
    """Repeat features (R, N) as often as they occur, with labels; ``None`` if either is not clear."""
    observation = reproduction.observation
    rest = Rest(reproduction.model, path, observation.input_shape)
    if len(features) < observation.upload.num_examples:
        times = times_of(reproduction, features, rest)(observation.upload.num_examples)
        if times is None:
            return None
        features = features.repeat_interleave(torch.tensor(times, device=features.device), 0)
    labels = reproduction.labels_of(features, path)
    if labels is not None and labels.is_floating_point():
        classes = labels.argmax(1)
        one_each = float((labels - F.one_hot(classes, labels.shape[1])).abs().max()) < _ONE_HOT
        labels = classes if one_each else None
    return None if labels is None else HiddenFeatures(path, features, labels)
