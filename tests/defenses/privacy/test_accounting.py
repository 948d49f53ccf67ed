import math
import sys

import pytest
from opacus.accountants import RDPAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from fl_privacy.defenses import Defense, compose, dp_noise, dp_sgd, none, pruning, quantization
from fl_privacy.defenses.privacy import epsilon, guarantee
from fl_privacy.effects import Part
from fl_privacy.errors import UserError

DELTA = 1e-5


def exact_gaussian_epsilon(noise_multiplier, steps):
    """Balle and Wang 2018, Theorem 8: the Gaussian mechanism without sampling, composed."""
    mu = math.sqrt(steps) / noise_multiplier
    delta = lambda e: norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu)  # noqa: E731
    return brentq(lambda e: delta(e) - DELTA, 0, 200)


@pytest.mark.parametrize("noise_multiplier, steps", [(5.0, 1), (20.0, 100), (2.0, 3)])
def test_accountants_agree_with_the_closed_form(noise_multiplier, steps):
    exact = exact_gaussian_epsilon(noise_multiplier, steps)
    options = {"noise_multiplier": noise_multiplier, "sample_rate": 1.0, "steps": steps, "delta": DELTA}
    assert exact <= epsilon(**options, accountant="prv") <= exact + 0.02
    assert exact <= epsilon(**options, accountant="rdp") <= 1.15 * exact


def test_rdp_is_that_of_opacus_step_by_step():
    accountant = RDPAccountant()
    for _ in range(30):
        accountant.step(noise_multiplier=1.1, sample_rate=0.128)
    ours = epsilon(noise_multiplier=1.1, sample_rate=0.128, steps=30, delta=DELTA)
    assert ours == pytest.approx(accountant.get_epsilon(DELTA))


def test_no_release_costs_nothing_and_no_noise_everything():
    assert epsilon(noise_multiplier=1, sample_rate=1, steps=0, delta=DELTA) == 0
    assert epsilon(noise_multiplier=0, sample_rate=1, steps=1, delta=DELTA) == math.inf


def test_dp_sgd_protects_an_example():
    found = guarantee(dp_sgd(noise_multiplier=1.1), sample_rate=0.1, delta=DELTA, steps_per_round=5)
    assert found.unit == "example"
    expected = epsilon(noise_multiplier=1.1, sample_rate=0.1, steps=50, delta=DELTA)
    assert found.epsilon(10) == expected
    assert found.epsilon(1) < found.epsilon(10)
    assert found.course([1, 4, 10]) == pytest.approx([found.epsilon(rounds) for rounds in (1, 4, 10)])
    assert f"({expected:.4g}, 1e-05)" in found.describe(10)


def test_clipped_noise_protects_a_client_with_no_gain_from_sampling():
    found = guarantee(dp_noise(scale=4.0, clip_norm=2.0), sample_rate=0.1, delta=DELTA, steps_per_round=5)
    assert (found.unit, found.noise_multiplier, found.sample_rate, found.steps_per_round) == ("client", 2.0, 1.0, 1)
    per_step = guarantee(
        dp_noise(scale=4.0, clip_norm=2.0, at="gradient"), sample_rate=0.1, delta=DELTA, steps_per_round=5
    )
    assert per_step.steps_per_round == 5
    layered = guarantee(
        dp_noise(scale=4.0, clip_norm=2.0, clip_scope="layer"), sample_rate=0.1, delta=DELTA, num_tensors=16
    )
    assert layered.noise_multiplier == 0.5


def test_processing_the_noised_update_keeps_the_guarantee():
    alone = guarantee(dp_sgd(), sample_rate=0.1, delta=DELTA)
    nested = compose(compose(dp_sgd(), pruning()), quantization(bits=4))
    assert guarantee(nested, sample_rate=0.1, delta=DELTA) == alone


@pytest.mark.parametrize(
    "defense, reason",
    [
        (none(), "do not defend"),
        (pruning(), "no calibrated noise"),
        (dp_noise(scale=100.0), "nothing is clipped"),
        (dp_noise(scale=1.0, clip_norm=1.0, noise="laplace"), "Gaussian"),
        (dp_noise(scale=0.0, clip_norm=1.0), "no noise"),
        (dp_sgd(noise_multiplier=0), "no noise"),
        (compose(dp_sgd(), dp_noise(clip_norm=1.0)), "do not cover"),
        (Defense(parts=(Part("shiver"),)), "none is known of shiver, whose noise, if it adds any"),
        (compose(dp_sgd(), Defense(parts=(Part("shiver"),))), "none is known of shiver"),
    ],
)
def test_no_guarantee_is_said_in_words(defense, reason):
    found = guarantee(defense, sample_rate=0.1, delta=DELTA)
    assert found.epsilon(1) == math.inf
    assert reason in found.describe(1)
    assert "No differential privacy guarantee" in found.describe(1)


def test_nothing_is_said_of_the_noise_of_a_defense_that_is_not_ours():
    assert "adds no" not in guarantee(Defense(parts=(Part("shiver"),)), sample_rate=0.1, delta=DELTA).describe(1)


def test_uploaded_batch_norm_statistics_void_the_guarantee():
    assert "statistics" in (guarantee(dp_sgd(), sample_rate=0.1, delta=DELTA, buffers_shared=True).missing or "")


@pytest.mark.parametrize("wrong", [{"sample_rate": 0}, {"sample_rate": 2}, {"delta": 0}, {"accountant": "gdp"}])
def test_bad_arguments_are_one_line(wrong):
    options = {"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 1, "delta": DELTA} | wrong
    with pytest.raises(UserError, match="expected"):
        epsilon(**options)


def test_missing_opacus_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.raises(UserError, match=r"pip install 'opacus'"):
        epsilon(noise_multiplier=1.0, sample_rate=0.1, steps=1, delta=DELTA)
