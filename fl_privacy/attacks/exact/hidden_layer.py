"""What entered a later fully connected layer, read exactly from its gradient: the features of a client's images."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_privacy.attacks.exact.certificate import Reproduction
from fl_privacy.attacks.exact.factorization import column_space, sparse_factors
from fl_privacy.attacks.exact.rank_one import fit, residual
from fl_privacy.attacks.gradient_inversion.labels import output_layer
from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.gradients.watch import entering, owners
from fl_privacy.types import Observation

_FITS = 1e-3
"""Share of a layer's gradient that an outer product leaves where it is of one example and undefended."""

_AGREEMENT = 0.99
"""Of the signs in front of a ReLU with the zeros of what came back through it."""

_ROUNDS, _STARTS = 20, 64
"""Of searches for sparse directions in the gradient of a batch."""


@dataclass(frozen=True, eq=False)
class HiddenFeatures:
    """Of a victim.

    Attributes:
        path: of the layer.
        values: (B, N) float64 what entered it, in an order of its own where B > 1.
        labels: (B,) classes in that order; ``None`` of a single image.
    """

    path: str
    values: Tensor
    labels: Tensor | None


def first_hidden_layer(observation: Observation) -> str | None:
    """Path of the first fully connected layer behind others whose gradient was uploaded; ``None`` where there is none
    that one vector of features enters for each image, and where features are those of a whole batch.
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
    """What entered the layer at ``path``, ``None`` where its gradient does not tell for certain.

    Of one image it is the quotient of the gradients of weight and bias (Geiping et al. 2020, proposition 3.1; Gu et al.
    2021, Lemma 1), of a batch in front of a ReLU what SPEAR finds (:mod:`fl_privacy.attacks.exact.factorization`).
    """
    observation = reproduction.observation
    gradient, count = as_gradient(observation), observation.upload.num_examples
    weight, bias = gradient[f"{path}.weight"], gradient[f"{path}.bias"]
    if not bias.any():
        return None
    if count == 1:
        values = fit(weight[None], bias[None])
        sound = float(residual(weight[None], bias[None], values[None])) < _FITS
        return HiddenFeatures(path, values, None) if sound else None
    if path == _output(observation) or (basis := column_space(weight, count)) is None:
        return None
    state = observation.assumed().parameters
    own = state[f"{path}.weight"], state[f"{path}.bias"]
    searched = sparse_factors(weight, bias, own, basis, rng=rng, starts=_STARTS)
    for _, factors in zip(range(_ROUNDS), searched, strict=False):
        if factors is not None and factors.agreement >= _AGREEMENT:
            labels = reproduction.labels_of(factors.inputs, path)
            hard = labels is not None and not labels.is_floating_point()
            return HiddenFeatures(path, factors.inputs, labels) if hard else None
    return None


def _output(observation: Observation) -> str | None:
    """Path of the output layer."""
    layer = output_layer(observation.model, observation.num_classes)
    return layer[0].rpartition(".")[0] if layer else None
