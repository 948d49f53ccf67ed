"""Flower's own mod and strategy as mechanisms: what they state, and what they do."""

import math

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.client.mod import LocalDpMod as LocalDpModOfOldMessages, fixedclipping_mod as clipping_of_old_messages
from flwr.clientapp.mod import LocalDpMod
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import NeighboringRelation, PrivacyConfig, RdpAccountant, SamplingMethod
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)

from fl_privacy.dp_check import check_mechanism, recompute
from fl_privacy.dp_check.bounds import gaussian_epsilon
from fl_privacy.dp_check.check import DpCheckRequest
from fl_privacy.dp_check.claims import composed_epsilons
from fl_privacy.dp_check.verdict import ClaimVerdict, Status
from fl_privacy.errors import UserError
from fl_privacy.flower.dp_mechanisms import mechanism_of_mod, mechanism_of_strategy, stated_by, verdicts_on

pytestmark = pytest.mark.usefixtures("short_pilot")

LIKE = {"conv.weight": torch.zeros(4, 1, 3, 3), "fc.weight": torch.zeros(5, 8), "fc.bias": torch.zeros(5)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("sensitivity", "false", "reason"),
    [
        (0.0, True, "no noise is added"),
        (0.25, True, "standard deviation"),
        (1.0, False, "nothing contradicts"),
    ],
)
def test_local_dp_with_less_sensitivity_than_it_clips_to(sensitivity: float, false: bool, reason: str) -> None:
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=sensitivity, epsilon=1.0, delta=1e-5)
    stated = stated_by(mod)
    assert stated is not None and stated.claim is not None
    found = check_mechanism(
        mechanism_of_mod(mod), claimed=stated.claim, like=LIKE, clip_norm=stated.clip_norm, draws=200
    )
    assert found.contradicted is false
    assert reason in found.sentence
    epsilon = recompute(stated.facts, delta=1e-5).epsilon
    assert epsilon is not None and (epsilon > 1.0) is false


def broken(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    raise KeyError("weight")


@pytest.mark.parametrize(
    ("subject", "why"),
    [
        (lambda update: None, "returned NoneType"),
        (lambda update: {"a": "text"}, "returned str"),
        (lambda update: {"a": torch.zeros(0)}, "returned Tensor"),
        (lambda update: {name: torch.complex(value, value) for name, value in update.items()}, "real numbers"),
        (lambda update: {}, "returned nothing"),
        (lambda update: update["none"], "raised KeyError"),
        (broken, "raised KeyError"),
        (LocalDpModOfOldMessages(1.0, 1.0, 1.0, 1e-5), "take the same name from flwr.clientapp.mod"),
        (clipping_of_old_messages, "take the same name from flwr.clientapp.mod"),
    ],
)
def test_what_is_no_release_is_one_line(subject: object, why: str) -> None:
    with pytest.raises(UserError, match=why):
        verdicts_on(subject, DpCheckRequest(epsilon=1.0, draws=200))


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 1e-5), (1.0, 0.0)])
def test_a_formula_without_a_value_is_a_missing_fact(epsilon: float, delta: float) -> None:
    stated = stated_by(LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=epsilon, delta=delta))
    assert stated is not None
    assert stated.facts.noise_multiplier is None
    assert "no value" in stated.facts.missing[0]


@pytest.mark.long
def test_figures_that_a_mod_adds_count_as_sent() -> None:
    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        values = reply.content["arrays"].to_torch_state_dict()
        reply.content["metrics"]["norm"] = float(values["fc.bias"].norm())
        reply.content["arrays"] = ArrayRecord({name: torch.randn(value.shape) for name, value in values.items()})
        return reply

    (found,) = verdicts_on(mod, DpCheckRequest(epsilon=3.0, draws=200, like=LIKE))
    assert found.status is Status.CONTRADICTED
    assert found.reason == "the metric norm leaves without noise"


@pytest.mark.long
def test_an_adaptive_norm_does_not_drift_over_the_draws() -> None:
    strategy = DifferentialPrivacyServerSideAdaptiveClipping(
        FedAvg(), 0.5, 2, initial_clipping_norm=0.5, clipped_count_stddev=0.5
    )
    (found,) = verdicts_on(strategy, DpCheckRequest(draws=200, like={"weight": torch.zeros(4)}))
    assert strategy.clipping_norm == 0.5
    assert found.check is not None and not found.check.contradicted, found.sentence


@pytest.mark.parametrize("epsilon", [0.5, 8.0, 60.0])
def test_above_one_the_formula_of_local_dp_mod_is_no_proof(epsilon: float) -> None:
    """Recomputed like the analytic mechanism of Balle and Wang 2018; far above 1 the claim itself is false."""
    stated = stated_by(LocalDpMod(1.0, 1.0, epsilon, 1e-5))
    assert stated is not None and stated.facts.noise_multiplier is not None
    assert bool(stated.notes) == (epsilon > 1)
    found = recompute(stated.facts, delta=1e-5)
    assert found.pld == pytest.approx(gaussian_epsilon(1 / stated.facts.noise_multiplier, 1e-5), rel=0.01)
    by_figures = ClaimVerdict(subject="mod", claim=stated.claim, recomputed=found).by_figures
    assert by_figures == (epsilon == 60.0)


def test_of_anything_else_nothing_is_stated() -> None:
    assert stated_by(object()) is None


@pytest.mark.long
def test_a_strategy_that_noises_the_mean_is_as_private_as_it_states() -> None:
    strategy = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 3)
    stated = stated_by(strategy)
    assert stated is not None and stated.facts.seen_by == "model"
    found = check_mechanism(
        mechanism_of_strategy(strategy, clients=3),
        claimed=gaussian_epsilon(1.0, 1e-5),
        delta=1e-5,
        like=LIKE,
        clip_norm=stated.clip_norm,
        draws=200,
    )
    assert not found.contradicted
    assert found.moved == pytest.approx(1.0, abs=0.4)
    assert not math.isinf(found.lower_bound)


def test_an_adapted_clipping_norm_spends_beside_the_mean() -> None:
    strategy = DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 1.0, 20)
    stated = stated_by(strategy)
    assert stated is not None and stated.facts.noise_multiplier is not None
    assert strategy.noise_multiplier > 1, "of the mean alone"
    mean_and_count = torch.tensor([1 / strategy.noise_multiplier, 1 / strategy.clipped_count_stddev]).norm()
    epsilon = recompute(stated.facts, delta=1e-5).pld
    assert epsilon == pytest.approx(gaussian_epsilon(float(mean_and_count), 1e-5), rel=1e-5)
    assert epsilon > gaussian_epsilon(1.0, 1e-5) > gaussian_epsilon(1 / strategy.noise_multiplier, 1e-5)
    documented = stated_by(DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 0.5, 100))
    assert documented is not None and documented.facts.noise_multiplier == pytest.approx(0.4981, abs=5e-5)


def budgeted(multiplier: float) -> DifferentialPrivacyServerSideFixedClipping:
    """Make a strategy whose accountant ends the training at epsilon 12."""
    budget = PrivacyConfig(
        target_delta=1e-6,
        population_size=10,
        neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        sampling_method=SamplingMethod.NO_AMPLIFICATION,
        max_epsilon=12.0,
    )
    return DifferentialPrivacyServerSideFixedClipping(FedAvg(), multiplier, 1.0, 1, accountant=RdpAccountant(budget))


@pytest.mark.parametrize(("asked", "allowed"), [(3, 3), (200, 66)], ids=["within the budget", "ended earlier"])
def test_a_strategy_with_an_accountant_claims_its_budget_for_the_rounds_that_it_allows(
    asked: int, allowed: int
) -> None:
    stated = stated_by(budgeted(4.0), rounds=asked)
    assert stated is not None and stated.claim is not None
    assert (stated.claim.epsilon, stated.claim.delta, stated.claim.rounds) == (12.0, 1e-6, allowed)
    assert stated.facts.rounds == allowed
    assert stated.facts.missing == (), "it refuses replies that count differently"
    spent = [composed_epsilons(noise_multiplier=4.0, sample_rate=1, steps=n, delta=1e-6)[0] for n in (66, 67)]
    assert spent[0] <= 12.0 < spent[1]


def test_a_strategy_that_its_accountant_never_lets_begin_claims_nothing() -> None:
    stated = stated_by(budgeted(0.2))
    assert stated is not None and stated.claim is None
    assert "before the first round" in stated.facts.missing[0]


@pytest.mark.long
def test_a_strategy_with_an_accountant_is_drawn_and_not_accused() -> None:
    (found,) = verdicts_on(budgeted(4.0), DpCheckRequest(rounds=200, draws=200, like={"weight": torch.zeros(4)}))
    assert found.status is Status.OPEN, found.sentence
