"""What may be said of a claim: false only by proof, never true, and what so small a test could not have shown."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fl_privacy.defenses import dp_noise, dp_sgd, pruning
from fl_privacy.dp_check import Claim, Facts, check as asking, recompute
from fl_privacy.dp_check.bounds import gaussian_epsilon, gaussian_mu
from fl_privacy.dp_check.canaries import canary_test, estimated_epsilon
from fl_privacy.dp_check.check import DpCheckRequest
from fl_privacy.dp_check.of_defense import on_defense
from fl_privacy.dp_check.verdict import ClaimVerdict, Status
from fl_privacy.errors import UserError
from fl_privacy.report.inferred import render_claims
from fl_privacy.runs.folder.claims import read_claims, records_of, write_claims

DELTA = 1e-5


def scores(epsilon: float, canaries: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    taken = rng.random(canaries) < 0.5
    found = rng.normal(size=canaries) + gaussian_mu(epsilon, DELTA) * taken
    return found[taken], found[~taken]


def verdict(facts: Facts, epsilon: float) -> ClaimVerdict:
    claim = Claim(epsilon=epsilon, delta=DELTA)
    return ClaimVerdict(subject="a mod", claim=claim, recomputed=recompute(facts, delta=DELTA))


def test_figures_that_disagree_without_any_assumption_are_a_contradiction() -> None:
    assert verdict(Facts(noise_multiplier=1.0), 4.0).status is Status.CONTRADICTED
    assert verdict(Facts(noise_multiplier=1.0), 4.4).status is Status.UNTESTED
    shuffled = verdict(Facts(noise_multiplier=1.0, sample_rate=0.1, sampling="shuffle"), 1.0)
    assert shuffled.status is Status.UNSUPPORTED
    assert "shuffled set" in shuffled.as_plain()["notes"][0]
    assert verdict(Facts(noise_multiplier=0.0), 4.0).reason == "there is no noise"


def test_a_larger_figure_at_a_smaller_delta_contradicts_nothing() -> None:
    claim = Claim(epsilon=4.4, delta=DELTA)
    found = ClaimVerdict(subject="a mod", claim=claim, recomputed=recompute(Facts(noise_multiplier=1.0), delta=1e-9))
    assert found.recomputed is not None and (found.recomputed.epsilon or 0.0) > claim.epsilon
    assert found.status is Status.UNTESTED


def test_canaries_contradict_what_is_far_too_small_and_nothing_that_is_true() -> None:
    test = canary_test(*scores(12.0, 1000), delta=DELTA, unit="client")
    assert 0 < test.bound < 12.0
    assert test.estimate == pytest.approx(12.0, rel=0.15)
    false = ClaimVerdict(subject="a run", claim=Claim(epsilon=0.2, delta=DELTA), canaries=test)
    assert false.status is Status.CONTRADICTED
    assert false.headline == "The promised protection of each client's data does not hold"
    assert "more than it allows" in false.meaning
    true = canary_test(*scores(4.0, 1000), delta=DELTA, unit="client")
    honest = ClaimVerdict(subject="a run", claim=Claim(epsilon=4.0, delta=DELTA), canaries=true)
    assert honest.status is Status.OPEN
    assert "that does not prove it" in honest.headline


def test_a_bound_above_the_claim_speaks_against_it_also_where_it_does_not_call_it_false() -> None:
    test = canary_test(*scores(12.0, 1000), delta=DELTA, unit="client")
    claim = Claim(epsilon=(test.strict + test.bound) / 2, delta=DELTA)
    found = ClaimVerdict(subject="a run", claim=claim, canaries=test)
    assert found.status is Status.DOUBTED
    assert "nothing contradicts" not in found.sentence and "repeat with more canaries" in found.sentence
    assert "not surely enough" in found.headline
    assert records_of([found])[0].status == "doubted"
    other = ClaimVerdict(
        subject="a run", claim=Claim(epsilon=claim.epsilon, delta=DELTA, unit="example"), canaries=test
    )
    assert other.status is not Status.DOUBTED


def test_a_test_too_small_to_contradict_says_so() -> None:
    test = canary_test(*scores(12.0, 100), delta=DELTA, unit="client")
    found = ClaimVerdict(subject="a run", claim=Claim(epsilon=12.0, delta=DELTA), canaries=test)
    assert test.showable < 12.0
    assert found.status is Status.UNTESTED
    assert "so small a test could not have" in found.sentence


def test_canaries_of_another_unit_contradict_nothing() -> None:
    test = canary_test(*scores(12.0, 1000), delta=DELTA, unit="example")
    found = ClaimVerdict(subject="a run", claim=Claim(epsilon=0.2, delta=DELTA), canaries=test)
    assert found.status is not Status.CONTRADICTED


@pytest.mark.long
def test_bounds_of_canaries_are_above_the_truth_as_seldom_as_stated() -> None:
    found = [canary_test(*scores(1.0, 100, seed), delta=DELTA, unit="client").bound for seed in range(12)]
    assert np.mean(np.array(found) > 1.0) <= 1 / 12


def test_two_few_canaries_have_no_estimate() -> None:
    assert estimated_epsilon([1.0, 2.0], [0.0, 1.0], delta=DELTA) is None


def test_a_record_is_read_as_it_was_written_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    records = records_of([verdict(Facts(noise_multiplier=1.0), 9.0), verdict(Facts(noise_multiplier=0.0), 1.0)])
    assert [record.status for record in records] == ["contradicted", "untested"]
    path = write_claims(tmp_path, records)
    assert read_claims(tmp_path) == tuple(
        type(r)(**{**vars(r), "missing": tuple(r.missing), "notes": tuple(r.notes)}) for r in records
    )
    path.write_text(re.sub(r',\s*"estimate_least": null', "", path.read_text()))
    assert [record.estimate_least for record in read_claims(tmp_path)] == [None, None], "an earlier version's"
    path.write_text(path.read_text().replace('"status": "untested"', '"status": "true"'))
    with pytest.raises(UserError, match="damaged"):
        read_claims(tmp_path)


def test_the_page_begins_in_plain_words_and_in_red_where_a_claim_is_false() -> None:
    page = render_claims(records_of([verdict(Facts(noise_multiplier=0.0), 1.0)]), title="my_mod")
    heading = page[page.index("<h1") : page.index("</h1>")]
    assert "tone-leak" in heading
    assert "promised protection of each client" in heading
    assert "epsilon" not in heading
    honest = render_claims(records_of([verdict(Facts(noise_multiplier=1.0), 9.0)]), title="my_mod")
    assert "tone-leak" not in honest[honest.index("<h1") : honest.index("</h1>")]


@pytest.mark.long
def test_our_own_defenses_are_held_to_their_own_noise() -> None:
    small = {"weight": torch.zeros(30), "bias": torch.zeros(3)}
    (noise,) = on_defense(dp_noise(clip_norm=1.0, scale=1.0), DpCheckRequest(like=small, draws=300))
    assert noise.status is Status.OPEN
    assert noise.claim is not None and noise.claim.epsilon == pytest.approx(gaussian_epsilon(1.0, DELTA))
    (false,) = on_defense(dp_noise(clip_norm=1.0, scale=1.0), DpCheckRequest(like=small, draws=300, epsilon=0.5))
    assert false.status is Status.CONTRADICTED
    (step,) = on_defense(dp_sgd(clip_norm=0.5, noise_multiplier=1.0), DpCheckRequest(draws=200))
    assert step.status is Status.OPEN
    assert step.check is not None and step.check.moved == pytest.approx(0.5, abs=0.25)
    (none,) = on_defense(pruning(rate=0.9), DpCheckRequest(draws=200))
    assert none.status is Status.UNCLAIMED


def test_noise_without_clipping_is_said_to_clip_nothing() -> None:
    rng = torch.Generator().manual_seed(0)
    found = asking.tested(
        "noise",
        lambda update: {n: t + torch.randn(t.shape, generator=rng) for n, t in update.items()},
        None,
        DpCheckRequest(epsilon=0.1, draws=300),
    )
    assert found.status is Status.CONTRADICTED
    assert found.check is not None and found.check.reason.startswith("nothing is clipped")


def test_a_bound_at_a_smaller_delta_contradicts_no_claim_at_a_larger_one() -> None:
    test = canary_test(*scores(12.0, 1000), delta=DELTA, unit="client")
    assert test.contradicts(Claim(epsilon=0.5, delta=DELTA))
    assert test.contradicts(Claim(epsilon=0.5, delta=DELTA / 10))
    assert not test.contradicts(Claim(epsilon=0.5, delta=DELTA * 10))


def test_the_estimate_has_a_lower_limit_below_the_truth_and_near_it() -> None:
    found = [canary_test(*scores(8.0, 500, seed), delta=DELTA, unit="client") for seed in range(10)]
    least = [test.estimate_least or 0.0 for test in found]
    assert np.mean(least) >= 6.5 and sum(each > 8.0 for each in least) <= 1
    assert all(test.estimate is not None and test.estimate >= test.estimate_least >= test.bound for test in found)


def test_an_estimate_above_the_claim_calls_nothing_false() -> None:
    test = canary_test(*scores(8.0, 500), delta=DELTA, unit="client")
    assert test.estimate_least is not None
    between = Claim(epsilon=(test.bound + test.estimate_least) / 2, delta=DELTA)
    found = ClaimVerdict(subject="a run", claim=between, canaries=test)
    assert found.status is Status.DOUBTED and found.grounds == ()
    assert "no estimate decides alone" in found.sentence
    false = ClaimVerdict(subject="a run", claim=Claim(epsilon=test.strict / 2, delta=DELTA), canaries=test)
    assert false.grounds == ("canaries",) and "the claim is false by canaries" in false.sentence


def test_scores_of_another_shape_get_no_limit_and_a_bound_for_any_noise() -> None:
    rng = np.random.default_rng(0)
    there, absent = rng.laplace(2.0, 1, 500), rng.laplace(0.0, 1, 500)
    heavy = canary_test(there, absent, delta=DELTA, unit="client")
    assert (heavy.noise, heavy.estimate_least) == ("other", None) and "do not look Gaussian" in heavy.in_words
    wider = canary_test(rng.normal(2, 2, 500), rng.normal(0, 1, 500), delta=DELTA, unit="client")
    assert (wider.noise, wider.estimate_least) == ("gaussian", None) and "vary differently" in wider.in_words
    other = canary_test(*scores(8.0, 500), delta=DELTA, unit="client", noise="other")
    assert other.bound < canary_test(*scores(8.0, 500), delta=DELTA, unit="client").bound


def test_randomized_response_is_not_accused_by_a_gaussian_curve() -> None:
    """Its epsilon is 2 at any delta, which no Gaussian curve has."""
    rng = np.random.default_rng(1)
    taken = rng.random(2000) < 0.5
    answers = np.where(rng.random(2000) < 1 / (1 + np.exp(-2.0)), taken, ~taken) * 1.0
    assert not canary_test(answers[taken], answers[~taken], delta=DELTA, unit="client").exceeds(
        Claim(epsilon=2.0, delta=DELTA)
    )


def test_scores_that_are_no_numbers_give_no_estimate() -> None:
    assert estimated_epsilon([float("nan")] * 20, [1.0, 2.0] * 10, delta=DELTA) is None


@pytest.mark.parametrize("more", [{"rounds": 10**18}, {"clients": 10**12}, {"draws": 10**15}, {"parameters": 10**12}])
def test_numbers_that_would_never_end_are_one_line(more: dict[str, int]) -> None:
    with pytest.raises(UserError, match="is expected to be a whole number from"):
        DpCheckRequest(**more)
