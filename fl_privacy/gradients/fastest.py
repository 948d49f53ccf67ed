"""Which way the victims' gradients are computed."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from fl_privacy.gradients.frozen import differentiable_twice
from fl_privacy.gradients.layered import Layered
from fl_privacy.gradients.victims import OneByOne, Vectorized, VictimGradients, VictimModel
from fl_privacy.types import Tensors

_TOLERANCE = 1e-3


def victim_gradients(victim_model: VictimModel, inputs: Tensor, labels: Tensor) -> VictimGradients:
    """The fastest way that gives the right gradients of this model, found by trying.

    Args:
        victim_model: model, plan and tensors to match.
        inputs: (V, B, C, H, W) of a trial.
        labels: (V, B).
    """
    reference = OneByOne(victim_model)
    expected = with_slope(reference, inputs, labels)
    reasons = []
    candidates: dict[str, Callable[[], VictimGradients]] = {
        "Folded": lambda: Layered(victim_model).folded(inputs),
        "Layered": lambda: Layered(victim_model),
        "Vectorized": lambda: Vectorized(victim_model),
    }
    for name, candidate in candidates.items():
        try:
            gradients = candidate()
            if isinstance(gradients, Layered):
                gradients.expect_right_factors(inputs, labels)
            found = with_slope(gradients, inputs, labels)
        except RuntimeError as error:
            reasons.append(str(error).strip().splitlines()[0])
            continue
        if same_gradients(found, expected):
            return gradients
        reasons.append(f"{name} gives other gradients")
    warnings.warn(
        f"{type(victim_model.model).__name__} can't be batched over victims, which are attacked one by one"
        f" ({'; '.join(reasons)}).",
        stacklevel=2,
    )
    return reference


def with_slope(gradients: Callable[[Tensor, Tensor], Tensors], inputs: Tensor, labels: Tensor) -> Tensors:
    """Gradients, and under an empty name the derivative of their squared norm by the inputs, which attacks follow."""
    with differentiable_twice():
        leaf = inputs.detach().requires_grad_()
        result = gradients(leaf, labels)
        (slope,) = torch.autograd.grad(torch.stack([g.square().sum() for g in result.values()]).sum(), leaf)
    return {**{name: g.detach() for name, g in result.items()}, "": slope}


def same_gradients(found: Tensors, expected: Tensors) -> bool:
    """Tensor by tensor, up to rounding errors of the largest: a bias in front of batch norm has only those."""
    whole = max(float(value.norm()) for value in expected.values())
    return all(
        float((found[name] - value).norm()) <= _TOLERANCE * (float(value.norm()) + _TOLERANCE * whole)
        for name, value in expected.items()
    )
