"""Mechanisms that make many releases in one call, and faults that only a direction across arrays shows."""

import torch
from torch import Tensor

from fl_privacy.dp_check import check_mechanism
from fl_privacy.dp_check.bounds import gaussian_mu, is_gaussian, noticed_mu
from fl_privacy.dp_check.draws import ManyAtOnce
from fl_privacy.types import Tensors

DELTA = 1e-5
LIKE = {"weight": torch.zeros(20)}
RNG = torch.Generator().manual_seed(2)


def clipped(value: Tensor) -> Tensor:
    return value / value.norm().clamp_min(1)


def noise(n: int, std: float) -> Tensor:
    return std * torch.randn(n, 20, generator=RNG)


def needed(epsilon: float) -> float:
    return 1 / gaussian_mu(epsilon, DELTA)


def test_many_at_once_are_as_one_by_one() -> None:
    def many(update: Tensors, n: int) -> Tensors:
        return {"weight": clipped(update["weight"]) + noise(n, needed(1))}

    honest = check_mechanism(ManyAtOnce(many=many), claimed=1.0, delta=DELTA, like=LIKE, clip_norm=1.0)
    assert not honest.contradicted
    assert honest.noticed is not None and 1.2 < honest.noticed < 1.8
    assert check_mechanism(ManyAtOnce(many=many), claimed=0.5, delta=DELTA, like=LIKE, clip_norm=1.0).contradicted


def test_one_seed_on_all_clients_is_found_in_their_difference() -> None:
    def many(update: Tensors, n: int) -> Tensors:
        shared = noise(n, needed(1))
        return {"weight": clipped(update["weight"]) + shared, "weight of another": shared}

    found = check_mechanism(ManyAtOnce(many=many), claimed=1.0, delta=DELTA, like=LIKE, clip_norm=1.0)
    assert found.contradicted
    assert "carry the same noise" in found.reason


def test_values_that_leave_unchanged_are_counted() -> None:
    def many(update: Tensors, n: int) -> Tensors:
        kept = torch.rand(n, 20, generator=RNG) < 0.2
        return {"weight": torch.where(kept, update["weight"], 1e-6 * noise(n, 1.0))}

    found = check_mechanism(
        ManyAtOnce(many=many), claimed=0.1, delta=DELTA, like=LIKE, clip_norm=1e-6, noise="other", draws=1000
    )
    assert found.contradicted
    assert "leave as they are" in found.reason


def test_an_answer_that_seldom_changes_is_counted_and_not_called_bare() -> None:
    def many(update: Tensors, n: int) -> Tensors:
        truth = float(update["weight"].any())
        lies = torch.rand(n, 1, generator=RNG) < 1 / (1 + 2980.96)
        return {"answer": torch.where(lies, 1 - truth, truth)}

    found = check_mechanism(ManyAtOnce(many=many), claimed=8.0, delta=DELTA, like=LIKE, noise="other", draws=300)
    assert not found.contradicted
    assert not found.bare


def test_noise_of_heavy_tails_is_not_taken_for_gaussian() -> None:
    rng = torch.Generator().manual_seed(1)
    assert is_gaussian(torch.randn(2000, generator=rng).numpy())
    uniform = torch.rand(2000, generator=rng) - 0.5
    assert not is_gaussian((uniform.sign() * torch.log1p(-2 * uniform.abs())).numpy())


def test_power_grows_with_draws() -> None:
    few, many = (noticed_mu(0.3, draws, error=0.001) for draws in (200, 20_000))
    assert 0.3 < many < few
