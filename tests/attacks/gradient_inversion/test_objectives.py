import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy.attacks.gradient_inversion import GradientInversion
from fl_privacy.attacks.gradient_inversion.layer_statistics import Explicit, LayerStatistics, Target, Zero
from fl_privacy.attacks.gradient_inversion.objectives import (
    L1,
    L2,
    Cosine,
    GaussianKernel,
    LayerWeights,
    Objective,
    WeightedL2L1,
    layer_weight,
    weighted_names,
)
from fl_privacy.attacks.optimizers import Adam
from fl_privacy.attacks.preset_options import vary
from fl_privacy.errors import UserError
from tests.attacks.victims import observations, smooth_net

GENERATOR = torch.Generator().manual_seed(0)
GUESS = {n: torch.randn(3, *s, generator=GENERATOR).double() for n, s in (("a.weight", (4, 2)), ("a.bias", (4,)))}
SEEN = {name: torch.randn(value.shape, generator=GENERATOR).double() for name, value in GUESS.items()}


def _loss(objective: Objective) -> Tensor:
    return objective({name: Explicit(GUESS[name], Target.of(SEEN[name])) for name in GUESS})


def _flat(row: int, tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([t[row].flatten() for t in tensors.values()])


@pytest.mark.parametrize("row", range(3))
def test_each_row_is_the_formula_of_its_victim(row: int) -> None:
    guess, seen = _flat(row, GUESS), _flat(row, SEEN)
    assert _loss(L2())[row].item() == pytest.approx(F.mse_loss(guess, seen, reduction="sum").item())
    assert _loss(L2(relative=True))[row].item() == pytest.approx(
        ((guess - seen) ** 2).sum().item() / (seen @ seen).item()
    )
    assert _loss(L1())[row].item() == pytest.approx(F.l1_loss(guess, seen, reduction="sum").item())
    assert _loss(Cosine())[row].item() == pytest.approx(1 - F.cosine_similarity(guess, seen, dim=0).item())
    by_layer = [1 - F.cosine_similarity(GUESS[n][row].flatten(), SEEN[n][row].flatten(), dim=0).item() for n in GUESS]
    assert _loss(Cosine(per_layer=True))[row].item() == pytest.approx(sum(by_layer) / 2)
    assert _loss(Cosine(layers={"*.bias": 0}))[row].item() == pytest.approx(by_layer[0])
    assert _loss(Cosine(per_layer=True, layers={"*.bias": 3}))[row].item() == pytest.approx(
        (by_layer[0] + 3 * by_layer[1]) / 4
    )


@dataclass(frozen=True, kw_only=True)
class _Huber:
    """An objective of one's own, which is no sum of squared and absolute distances."""

    bound: float = 1.0
    layers: LayerWeights = field(default_factory=dict)
    elementwise: bool = field(default=True, init=False)
    by_layer: bool = field(default=True, init=False)

    def __call__(self, statistics: Mapping[str, LayerStatistics]) -> Tensor:
        losses = []
        for name, one in statistics.items():
            apart = one.difference.abs()
            bounded = torch.where(apart <= self.bound, apart.square(), self.bound * (2 * apart - self.bound)).sum(1)
            losses.append(layer_weight(self.layers, name) * bounded)
        return torch.stack(losses).sum(0)


def test_an_objective_of_ones_own_sees_each_difference_and_takes_weights_of_layers() -> None:
    found = _loss(_Huber(bound=0.5))
    for row in range(3):
        expected = 2 * F.huber_loss(_flat(row, GUESS), _flat(row, SEEN), reduction="sum", delta=0.5)
        assert found[row].item() == pytest.approx(expected.item())
    torch.testing.assert_close(_loss(_Huber(bound=1e3)), _loss(L2()))
    zero = {name: Zero(Target.of(SEEN[name])) for name in SEEN}
    formed = {name: Explicit(torch.zeros_like(SEEN[name]), Target.of(SEEN[name])) for name in SEEN}
    torch.testing.assert_close(_Huber()(zero), _Huber()(formed))
    attack = GradientInversion(objective=_Huber(), optimizer=Adam(lr=0.05), iterations=3, dtype="float64")
    victims = observations(smooth_net(), 2)
    assert all(result.loss < result.history[0] for result in attack(victims, seed=0))
    (muted, _) = names = list(victims[0].upload.tensors)[:2]
    weighed = vary(attack, {"layers": {name: 0.0 for name in names if name != muted}})
    assert isinstance(weighed.objective, _Huber) and set(weighed.objective.layers) == {names[1]}
    with pytest.raises(UserError, match=r"attack\.layers .* _Unweighed is none"):
        vary(replace(attack, objective=_Unweighed()), {"layers": {"*": 1.0}})


class _Unweighed:
    elementwise, by_layer, layers = True, True, dict[str, float]()

    def __call__(self, statistics: Mapping[str, LayerStatistics]) -> Tensor:
        return torch.stack([one.distance for one in statistics.values()]).sum(0)


@pytest.mark.parametrize("size", [1.0, 1e-5])
def test_the_cosine_by_layer_is_that_of_the_published_code(size: float) -> None:
    """The dot product over the greater of both lengths' product and 1e-10, as PyTorch's own had it then."""
    guess, seen = GUESS["a.bias"] * size, SEEN["a.bias"] * 1e-7
    leaf = guess.clone().requires_grad_()
    found = Cosine(per_layer=True)({"a.bias": Explicit(leaf, Target.of(seen))})
    expected = 1 - (guess * seen).sum(1) / (guess.norm(dim=1) * seen.norm(dim=1)).clamp_min(1e-10)
    torch.testing.assert_close(found.detach(), expected)
    assert (size == 1e-5) == bool((guess.norm(dim=1) * seen.norm(dim=1) < 1e-10).any())


def test_rounding_errors_count_as_nothing_in_the_cosine_by_layer() -> None:
    noise = torch.randn(2, 1, 6, generator=GENERATOR) * 1e-8
    leaf = noise[0].clone().requires_grad_()
    loss = Cosine(per_layer=True)({"bias": Explicit(leaf, Target.of(noise[1]))})
    (slope,) = torch.autograd.grad(loss.sum(), leaf)
    assert loss.item() == pytest.approx(1, abs=1e-5)
    assert float(slope.norm()) * 1e-8 < 1e-5  # moving it by its own size changes nothing


@pytest.mark.parametrize("form", ["literal", "normalized"])
def test_gaussian_kernel(form) -> None:
    expected = 0.0
    for name, weight in (("a.weight", 1.0), ("a.bias", 0.25)):
        guess, seen = GUESS[name][1].numpy(), SEEN[name][1].numpy()
        sigma = 2 * seen.var() * (seen.size if form == "normalized" else 1)
        expected += weight * (1 - math.exp(-((guess - seen) ** 2).sum() / sigma))
    objective = GaussianKernel(form=form, bandwidth=2, depth="geometric", last=0.25)
    assert _loss(objective)[1].item() == pytest.approx(expected)


@pytest.mark.parametrize("form", ["literal", "normalized"])
def test_a_kernel_for_each_layer_takes_weight_and_bias_together(form) -> None:
    guess = {n: torch.randn(2, 3, generator=GENERATOR) for n in ("a.weight", "a.bias", "b.weight")}
    seen = {n: torch.randn(2, 3, generator=GENERATOR) + 2 for n in guess}
    found = GaussianKernel(form=form, last=0.5, per="layer")(
        {n: Explicit(g, Target.of(seen[n])) for n, g in guess.items()}
    )
    expected = 0.0
    for names, weight in ((("a.weight", "a.bias"), 1.0), (("b.weight",), 0.5)):
        g, s = (np.concatenate([side[n][0].numpy() for n in names]) for side in (guess, seen))
        sigma = s.var() * (s.size if form == "normalized" else 1)
        expected += weight * (1 - math.exp(-((g - s) ** 2).sum() / sigma))
    assert found[0].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("form", ["literal", "normalized"])
def test_a_kernel_for_each_element_has_the_slope_of_equation_6_and_its_maximum(form) -> None:
    seen = {
        n: torch.randn(1, *s, generator=GENERATOR).double() * 3 for n, s in (("a.weight", (4, 5)), ("a.bias", (4,)))
    }
    variance = torch.cat([value.flatten() for value in seen.values()]).var(correction=0)
    guess = {
        n: (value + 5 * torch.rand(value.shape, generator=GENERATOR)).requires_grad_() for n, value in seen.items()
    }
    kernel = GaussianKernel(form=form, last=0.5, per="element")
    loss = kernel({n: Explicit(g, Target.of(seen[n])) for n, g in guess.items()})
    slopes = torch.autograd.grad(loss.sum(), guess.values())
    for (name, g), slope in zip(guess.items(), slopes, strict=True):
        apart = (g - seen[name]).detach()
        torch.testing.assert_close(slope, 2 * apart / variance * torch.exp(-apart.square() / variance))  # Eq. 6, Q = 1
    apart = torch.linspace(0, 4, 4001).double() * variance.sqrt()
    alone = torch.cat([seen["a.weight"].flatten(), seen["a.bias"].flatten()]).expand(len(apart), -1)
    moved = (alone + torch.nn.functional.pad(apart[:, None], (0, 23))).requires_grad_()
    (slope,) = torch.autograd.grad(kernel({"a.weight": Explicit(moved, Target.of(alone))}).sum(), moved)
    most = apart[slope[:, 0].argmax()]
    # by Eq. 7 as it follows from Eq. 6 the slope is largest where 2 (g' - g)^2 is sigma^2; the text prints sigma^2
    assert float(2 * most.square() / variance) == pytest.approx(1, abs=5e-3)


def test_the_literal_kernel_has_no_slope_far_away_and_the_normalized_one_has() -> None:
    seen = torch.randn(1, 10_000, generator=GENERATOR)
    slopes = []
    for form in ("literal", "normalized"):
        guess = torch.zeros(1, 10_000).requires_grad_()
        loss = GaussianKernel(form=form)({"w": Explicit(guess, Target.of(seen))})
        slopes.append(torch.autograd.grad(loss.sum(), guess)[0].abs().max().item())
    assert slopes[0] == 0 < slopes[1]


def test_a_zero_gradient_has_a_finite_loss_and_slope() -> None:
    mixed = WeightedL2L1(relative=True)
    for objective in (L2(), L2(relative=True), L1(), Cosine(), Cosine(per_layer=True), GaussianKernel(), mixed):
        guess = torch.zeros(1, 3, requires_grad=True)
        loss = objective({"w": Explicit(guess, Target.of(torch.tensor([[1.0, 2, 3]])))})
        assert loss.isfinite().all()
        assert torch.autograd.grad(loss.sum(), guess)[0].isfinite().all()
    nothing = {"w": Explicit(torch.zeros(1, 3), Target.of(torch.tensor([[1.0, 2, 3]])))}
    assert float(mixed(nothing)) == pytest.approx(1)


def test_muted_layers_are_left_out() -> None:
    assert weighted_names({"a.*": 0, "a.bias": 2}, ["a.weight", "a.bias"]) == ["a.bias"]
    with pytest.raises(UserError, match="muted"):
        weighted_names({"*": 0}, ["a.weight"])
    with pytest.raises(UserError, match="typo"):
        weighted_names({"typo": 0}, ["a.weight"])
