from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_privacy.attacks import GradientInversion, inverting_gradients
from fl_privacy.attacks.gradient_inversion.layer_statistics import Explicit, Products, Target
from fl_privacy.attacks.gradient_inversion.objectives import Cosine
from fl_privacy.models import ResNet10
from fl_privacy.models.gradients.layered import factorize
from fl_privacy.types import Observation
from tests.attacks.victims import CLASSES, observations


def _operands() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(s, generator=generator).double() for s in ((3, 9, 2), (3, 11, 2), (3, 9, 2), (3, 11, 2)))


def test_products_are_the_statistics_of_the_gradient() -> None:
    deltas, inputs, seen_deltas, seen_inputs = _operands()
    seen = seen_deltas @ seen_inputs.mT
    factors = factorize(seen, 2)
    assert factors is not None
    target = Target.of(seen)
    ours = Products(deltas, inputs, factors, target.without_value())
    reference = Explicit(deltas @ inputs.mT, target)
    for name in ("squared", "distance", "absolute"):
        torch.testing.assert_close(getattr(ours, name), getattr(reference, name))
    scales = torch.tensor([1.0, 2, -3]).double(), torch.tensor([0.5, 0, 4]).double()
    torch.testing.assert_close(ours.apart(*scales), reference.apart(*scales))


def test_one_victim_of_full_rank_forbids_factors() -> None:
    _, _, deltas, inputs = _operands()
    seen = deltas @ inputs.mT
    seen[1] += 1e-3 * torch.randn(9, 11, generator=torch.Generator().manual_seed(1)).double()
    assert factorize(seen, 2) is None


def _forming(attack: GradientInversion) -> GradientInversion:
    objective = Cosine()
    object.__setattr__(objective, "elementwise", True)
    return replace(attack, objective=objective)


def _noisy(victim: Observation) -> Observation:
    tensors = {n: t + 1e-3 * torch.randn(t.shape).double() for n, t in victim.upload.tensors.items()}
    return replace(victim, upload=replace(victim.upload, tensors=tensors))


@pytest.mark.parametrize("defended", [False, True])
def test_attacks_end_the_same_with_and_without_forming_gradients(defended: bool) -> None:
    torch.manual_seed(0)
    model: nn.Module = ResNet10(in_channels=2, image_size=8, num_classes=CLASSES, width=16, norm="group").double()
    victims = observations(model, 2)
    if defended:
        victims[0] = _noisy(victims[0])
    attack = inverting_gradients(iterations=5, sign="none", dtype="float64")
    for ours, reference in zip(attack(victims, seed=0), _forming(attack)(victims, seed=0), strict=True):
        assert ours.loss == pytest.approx(reference.loss, rel=1e-8)
        assert ours.batch is not None and reference.batch is not None
        torch.testing.assert_close(ours.batch.inputs, reference.batch.inputs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("near", [1e-1, 1e-3, 1e-5])
def test_the_cosine_keeps_its_digits_in_float32_near_zero(near: float, per_layer: bool) -> None:
    """Loss and slope, of gradients that are formed and that are not, against float64 on the same numbers."""
    seen_deltas, seen_inputs, off_deltas, off_inputs = (t.float() for t in _operands())
    deltas, inputs = seen_deltas + near * off_deltas, seen_inputs + near * off_inputs
    objective = Cosine(per_layer=per_layer)

    def evaluated(dtype: torch.dtype, formed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        leaf, others = deltas.to(dtype).requires_grad_(), inputs.to(dtype)
        seen = seen_deltas.to(dtype) @ seen_inputs.to(dtype).mT
        target = Target.of(seen)
        if formed:
            found = objective({"weight": Explicit(leaf @ others.mT, target)})
        else:
            factors = factorize(seen, 2)
            assert factors is not None
            found = objective({"weight": Products(leaf, others, factors, target.without_value())})
        return found.detach(), torch.autograd.grad(found.sum(), leaf)[0]

    loss, slope = evaluated(torch.float64, True)
    assert 0 < loss.max() < near**2 * 10
    for formed in (True, False):
        for found, expected in zip(evaluated(torch.float32, formed), (loss, slope), strict=True):
            error = (found.double() - expected).flatten(1 - (found.dim() == 1)).norm() / expected.norm()
            assert error < max(1e-5, 1e-6 / near)
