"""Refiner's Appendix M: what is solved for lies where it should, and inverting it gives noise."""

import pytest
import torch

from fl_privacy.attacks import inverting_gradients, refiner_solved
from fl_privacy.attacks._refiner_aware import solve_gradient
from fl_privacy.errors import UserError
from tests.attacks.victims import observations, smooth_net


def weighted(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> float:
    return sum(float((weights[n] * (one[n] - other[n])).double().square().sum()) for n in one)


@pytest.mark.parametrize("scaled", [False, True])
def test_the_solution_has_the_asked_distance(scaled: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    upload = {"a.weight": torch.randn(4, 3, generator=rng), "a.bias": torch.randn(4, generator=rng)}
    weights = {n: torch.rand(t.shape, generator=rng) for n, t in upload.items()}
    found = solve_gradient(upload, weights, 0.01, torch.Generator().manual_seed(1), scaled=scaled)
    assert weighted(upload, found, weights) == pytest.approx(0.01, rel=1e-4)
    again = solve_gradient(upload, weights, 0.01, torch.Generator().manual_seed(1), scaled=scaled)
    assert all(torch.equal(found[n], again[n]) for n in found)


def test_what_weighs_nothing_stays_at_its_random_start() -> None:
    upload = {"w": torch.zeros(1000)}
    weights = {"w": torch.cat([torch.ones(500), torch.zeros(500)])}
    found = solve_gradient(upload, weights, 1e-6, torch.Generator().manual_seed(0))["w"]
    assert float(found[:500].norm()) < 2e-3 and float(found[500:].std()) == pytest.approx(1, abs=0.1)
    near = solve_gradient(upload, weights, 1e-6, torch.Generator().manual_seed(0), spread=0.25)["w"]
    torch.testing.assert_close(near[500:], 0.25 * found[500:])


def test_it_reads_less_than_the_attack_that_takes_the_upload_for_the_gradient() -> None:
    victims = observations(smooth_net(), 2)
    plain = inverting_gradients(iterations=60, dtype="float64", compile="off")(victims, seed=0)
    solved = refiner_solved(iterations=60, dtype="float64")(victims, seed=0)
    for victim, one, other in zip(victims, plain, solved, strict=True):
        assert one.batch is not None and other.batch is not None and one.id == other.id == victim.id
        assert other.loss > 3 * one.loss  # nothing has the gradient that was made up


def test_bad_settings_are_a_line() -> None:
    for options in ({"radius": 0.0}, {"decay": 1.5}, {"constant": -1.0}, {"base": "dlg"}):
        with pytest.raises(UserError, match=r"attack\."):
            refiner_solved(**options)  # type: ignore[arg-type]
