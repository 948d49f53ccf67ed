"""Gradients that are compared a few victims at a time, beside those that are formed and compared as a whole."""

import pytest
import torch

from fl_privacy.attacks.gradient_inversion.layer_statistics import Explicit, Target, weighted_distance
from fl_privacy.attacks.gradient_inversion.objectives import L1, L2, OfLayers, WeightedL2L1

VICTIMS, POSITIONS = 5, 3
SHAPES = {"wide.weight": (300, 260), "wide.bias": (300,), "narrow.weight": (4, 300), "narrow.bias": (4,)}
LAYERS = {"narrow*": 0.5}


@pytest.mark.parametrize("objective", [WeightedL2L1(alpha=0.3, layers=LAYERS), L1(layers=LAYERS), L2(layers=LAYERS)])
def test_a_few_victims_at_a_time_are_compared_as_all_at_once(objective: OfLayers) -> None:
    torch.manual_seed(0)
    targets = {name: Target.of(torch.randn(VICTIMS, *shape)) for name, shape in SHAPES.items()}
    formed = {name: torch.randn(VICTIMS, *SHAPES[name]).requires_grad_() for name in ("wide.bias", "narrow.bias")}
    factored = {
        name: (
            torch.randn(VICTIMS, POSITIONS, SHAPES[name][0]).requires_grad_(),
            torch.randn(VICTIMS, POSITIONS, SHAPES[name][1]).requires_grad_(),
        )
        for name in ("wide.weight", "narrow.weight")
    }
    leaves = [*formed.values(), *(part for parts in factored.values() for part in parts)]
    upstream = torch.arange(1.0, VICTIMS + 1)

    whole = {**formed, **{name: deltas.mT @ inputs for name, (deltas, inputs) in factored.items()}}
    expected = objective({name: Explicit(whole[name], target) for name, target in targets.items()})  # type: ignore[operator]
    expected_slopes = torch.autograd.grad(expected @ upstream, leaves)
    weights = objective.coefficients(list(targets))
    assert weights is not None
    turned = {name: (deltas.mT, inputs.mT) for name, (deltas, inputs) in factored.items()}
    found = weighted_distance(formed, turned, targets, weights)
    torch.testing.assert_close(found, expected)
    for slope, other in zip(torch.autograd.grad(found @ upstream, leaves), expected_slopes, strict=True):
        torch.testing.assert_close(slope, other, rtol=1e-4, atol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(weighted_distance(formed, turned, targets, weights), expected)


def test_a_relative_distance_is_no_such_sum() -> None:
    assert L2(relative=True).coefficients(["weight"]) is None


def test_shapes_follow_without_values() -> None:
    """No size hangs on a value, which on a GPU every evaluation would wait for."""
    formed = {name: torch.empty(VICTIMS, *SHAPES[name], device="meta") for name in ("wide.bias", "narrow.bias")}
    targets = {name: Target.of(gradient) for name, gradient in formed.items()}
    found = weighted_distance(formed, {}, targets, dict.fromkeys(formed, (1.0, 0.5)))
    assert found.shape == (VICTIMS,)
