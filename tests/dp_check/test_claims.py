"""Recomputed epsilons against the packages that others count with."""

import math
from dataclasses import replace

import pytest

from fl_privacy.defenses.privacy import epsilon as by_opacus
from fl_privacy.dp_check import Claim, Facts, recompute
from fl_privacy.dp_check.bounds import gaussian_epsilon
from fl_privacy.dp_check.claims import composed_epsilons, expect_claim
from fl_privacy.dp_check.verdict import ClaimVerdict, Status
from fl_privacy.errors import UserError

pytest.importorskip("dp_accounting")


def test_without_sampling_the_distribution_is_that_of_one_gaussian_release() -> None:
    found = recompute(Facts(noise_multiplier=5.0, rounds=25), delta=1e-5)
    assert found.pld == pytest.approx(4.377178, abs=1e-5)  # mu = 1
    assert found.rdp is not None
    assert found.pld < found.rdp < 1.15 * found.pld


def test_sampled_as_opacus_counts_it() -> None:
    facts = Facts(noise_multiplier=1.1, sample_rate=0.02, sampling="poisson", releases=10, rounds=5)
    found = recompute(facts, delta=1e-5)
    ours = by_opacus(noise_multiplier=1.1, sample_rate=0.02, steps=50, delta=1e-5)
    assert found.rdp == pytest.approx(ours, rel=0.03)
    assert found.epsilon == found.pld


@pytest.mark.parametrize("sampling", ["shuffle", None])
def test_other_sampling_than_poisson_amplifies_nothing(sampling: str | None) -> None:
    facts = Facts(noise_multiplier=1.0, sample_rate=0.01, sampling=sampling)  # type: ignore[arg-type]
    found = recompute(facts, delta=1e-5)
    assert found.epsilon == pytest.approx(4.377178, abs=1e-5)
    assert "sampl" in " ".join((*found.caveats, *found.missing))


def test_a_replaced_unit_moves_twice_as_far() -> None:
    replaced = recompute(Facts(noise_multiplier=2.0), delta=1e-5, neighbors="replace").epsilon
    assert replaced == pytest.approx(4.377178, abs=1e-5)


def test_no_noise_and_no_knowledge() -> None:
    assert recompute(Facts(noise_multiplier=0.0), delta=1e-5).epsilon == math.inf
    unknown = recompute(Facts(noise_multiplier=None, missing=("the noise",)), delta=1e-5)
    assert (unknown.epsilon, unknown.missing) == (None, ("the noise",))
    assert recompute(Facts(noise_multiplier=1.0, releases=0), delta=1e-5).epsilon == 0.0


def test_a_vast_epsilon_takes_no_minutes() -> None:
    found = recompute(Facts(noise_multiplier=0.1, sample_rate=0.9, sampling="poisson", rounds=200), delta=1e-5)
    assert found.epsilon is not None
    assert found.epsilon > 1000


def test_claims_are_complete() -> None:
    assert expect_claim(1.0, 1e-5) == Claim(epsilon=1.0, delta=1e-5)
    with pytest.raises(UserError, match="expected with its delta"):
        expect_claim(1.0, None)
    with pytest.raises(UserError, match="delta"):
        Claim(epsilon=1.0, delta=1.0)


def test_a_sample_of_replaced_units_is_no_contradiction() -> None:
    facts = Facts(noise_multiplier=1.0, sample_rate=0.01, sampling="poisson", rounds=1000)
    found = recompute(facts, delta=1e-5, neighbors="replace")
    claim = Claim(epsilon=8.0, delta=1e-5, neighbors="replace", rounds=1000)  # add or remove: 2.1
    assert found.epsilon is not None and found.epsilon > 100
    assert ClaimVerdict(subject="a sample", claim=claim, recomputed=found).status is Status.UNSUPPORTED


@pytest.mark.long
def test_a_shift_in_one_sampled_step_is_composed_over_all_steps() -> None:
    facts = Facts(noise_multiplier=1.1, sample_rate=0.05, sampling="poisson", releases=20)
    claim = Claim(epsilon=1.0, delta=1e-5, sampled=facts)
    exact = min(composed_epsilons(noise_multiplier=1.1, sample_rate=0.05, steps=20, delta=1e-5))
    assert 0.99 * exact < claim.total(1 / 1.1) <= exact
    assert claim.total(math.inf) > 20
    assert claim.total(0.0) == 0.0
    shuffled = replace(claim, sampled=replace(facts, sampling="shuffle"))
    assert shuffled.total(1 / 1.1) == pytest.approx(gaussian_epsilon(1 / 1.1 / 20**0.5, 1e-5)), "one batch in twenty"
