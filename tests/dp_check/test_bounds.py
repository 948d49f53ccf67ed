"""Bounds and curves against values of other programs and closed forms."""

import math

import numpy as np
import pytest
from scipy import stats

from fl_privacy.dp_check.bounds import (
    GuessCounts,
    best_one_run_epsilon,
    counted_epsilon,
    counts_above,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
    largest_counted_epsilon,
    measured_mu,
    one_run_epsilon,
    one_run_gaussian_epsilon,
    one_run_mu,
    one_run_p_value,
    two_gaussians_epsilon,
)
from fl_privacy.errors import UserError

ONE_RUN = [
    (1000, 100, 95, 1e-5, 2.1651757879),
    (1000, 1000, 600, 1e-5, 0.2972269576),
    (500, 200, 200, 1e-5, 4.1800803503),
    (10_000, 1500, 1439, 1e-5, 2.9337365567),
    (100, 30, 16, 1e-5, 0.0),
]
"""Canaries, guesses, right ones, delta, and the bound that jax-privacy 2.0 gives at a significance of 5 %."""


@pytest.mark.parametrize(("canaries", "guesses", "right", "delta", "expected"), ONE_RUN)
def test_bounds_of_one_run_are_those_of_jax_privacy(
    canaries: int, guesses: int, right: int, delta: float, expected: float
) -> None:
    found = one_run_epsilon(canaries=canaries, guesses=guesses, right=right, delta=delta)
    assert found == pytest.approx(expected, abs=1e-6)


ONE_RUN_GAUSSIAN = [
    (1000, 100, 95, 0.05, 3.32330049),
    (1000, 1000, 600, 0.05, 0.58354037),
    (500, 200, 200, 0.05, 8.06811121),
    (500, 106, 104, 0.001, 2.99046511),
    (2000, 300, 292, 0.05, 4.69325093),
    (10_000, 1000, 950, 0.001, 2.79420463),
    (100, 30, 16, 0.05, 0.0),
    (20, 10, 10, 0.05, 2.25384131),
]
"""Canaries, guesses, right ones, error, and the bound by f-DP at delta 1e-5 that jax-privacy 2.0 gives."""


@pytest.mark.parametrize(("canaries", "guesses", "right", "error", "expected"), ONE_RUN_GAUSSIAN)
def test_bounds_by_a_gaussian_curve_are_those_of_jax_privacy(
    canaries: int, guesses: int, right: int, error: float, expected: float
) -> None:
    mu = one_run_mu(canaries=canaries, guesses=guesses, right=right, error=error)
    assert gaussian_epsilon(mu, 1e-5) == pytest.approx(expected, abs=3e-6)


@pytest.mark.parametrize(("epsilon", "canaries", "least"), [(8.0, 500, 3.9), (8.0, 2000, 4.5), (1.0, 2000, 0.2)])
def test_the_bound_by_a_gaussian_curve_comes_near_and_stays_below(epsilon: float, canaries: int, least: float) -> None:
    rng, found = np.random.default_rng(4), []
    for _ in range(30):
        taken = rng.random(canaries) < 0.5
        scores = rng.normal(size=canaries) + gaussian_mu(epsilon, 1e-5) * taken
        found.append(one_run_gaussian_epsilon(scores[taken], scores[~taken], delta=1e-5)[0])
    assert np.mean(found) >= least
    assert np.mean(np.array(found) > epsilon) <= 0.05


@pytest.mark.parametrize(("rate", "steps", "noise"), [(0.5, 20, 1.0), (0.1, 1, 0.6), (0.02, 200, 0.6)])
def test_a_sampled_gaussian_leaks_no_more_than_the_gaussian_of_its_epsilon(
    rate: float, steps: int, noise: float
) -> None:
    """At each delta above that of the claim: so rejecting the Gaussian curve rejects the claim of sampled noise."""
    accounting = pytest.importorskip("dp_accounting")
    made = accounting.pld.PLDAccountant(value_discretization_interval=1e-2)
    made.compose(accounting.PoissonSampledDpEvent(rate, accounting.GaussianDpEvent(noise)), steps)
    epsilon = made.get_epsilon(1e-5)
    mu = gaussian_mu(epsilon, 1e-5)
    for at in np.linspace(0, 0.99 * epsilon, 12):
        assert made.get_delta(at) <= gaussian_delta(mu, at)


def test_without_delta_the_p_value_is_a_binomial_tail() -> None:
    found = one_run_p_value(canaries=50, guesses=20, right=18, epsilon=1.0, delta=0.0)
    assert found == pytest.approx(stats.binom.sf(17, 20, 1 / (1 + math.exp(-1))))


@pytest.mark.parametrize("delta", [1e-8, 1e-5, 1e-2])
@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 4.0])
def test_the_gaussian_mechanism_there_and_back(mu: float, delta: float) -> None:
    epsilon = gaussian_epsilon(mu, delta)
    if epsilon:
        assert gaussian_delta(mu, epsilon) == pytest.approx(delta, rel=1e-5)
        assert gaussian_mu(epsilon, delta) == pytest.approx(mu, rel=1e-6)
    assert two_gaussians_epsilon(mean=mu, std=1.0, std_without=1.0, delta=delta) == pytest.approx(epsilon, abs=1e-4)


def test_no_noise_is_no_guarantee() -> None:
    assert gaussian_epsilon(math.inf, 1e-5) == math.inf
    assert gaussian_epsilon(0.0, 1e-5) == 0.0


def test_counts_are_those_of_a_loop() -> None:
    rng = np.random.default_rng(0)
    first, second, at = rng.normal(1, 1, 50), rng.normal(0, 1, 70), np.array([-1.0, 0.0, 2.0])
    counts = counts_above(first, second, at)
    assert counts.hits.tolist() == [sum(value >= t for value in first) for t in at]
    assert counts.misses.tolist() == [sum(value >= t for value in second) for t in at]


def test_what_so_many_draws_can_show() -> None:
    assert largest_counted_epsilon(1000, delta=1e-5, error=0.05) == pytest.approx(math.log(1000 / 5), abs=0.3)
    alike = GuessCounts(hits=np.array([500.0]), of_hits=1000, misses=np.array([500.0]), of_misses=1000)
    assert counted_epsilon(alike, delta=1e-5, error=0.05).tolist() == [0.0]


def test_measured_mu_is_too_large_as_seldom_as_it_says() -> None:
    rng = np.random.default_rng(1)
    found = [measured_mu(rng.normal(0.3, 1, 400), rng.normal(0, 1, 400), error=0.1) for _ in range(2000)]
    wrong = np.mean(np.array(found) > 0.3)
    assert wrong <= 0.065  # half of the error goes to the other side
    assert np.mean(found) > 0.15


def test_the_best_number_of_guesses_costs_no_confidence() -> None:
    """Canaries that tell nothing: a bound above zero in 5 % of the runs at most."""
    rng = np.random.default_rng(2)
    found = [best_one_run_epsilon(rng.normal(size=100), rng.normal(size=100), delta=1e-5)[0] for _ in range(300)]
    assert np.mean(np.array(found) > 0) <= 0.05
    epsilon, guesses, right = best_one_run_epsilon(rng.normal(8, 1, 200), rng.normal(size=200), delta=1e-5)
    assert epsilon > 3.5
    assert guesses == right


@pytest.mark.parametrize("wrong", [{"right": 11}, {"guesses": 2000}, {"delta": 1.0}, {"canaries": 0}])
def test_what_can_not_be_is_said(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match="expected"):
        one_run_epsilon(**{"canaries": 1000, "guesses": 10, "right": 5, "delta": 1e-5, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("score", [0.0, math.inf, math.nan])
def test_equal_scores_show_nothing(score: float) -> None:
    assert best_one_run_epsilon(np.full(250, score), np.full(250, score), delta=1e-5)[0] == 0.0
