"""What clients state of their privacy is looked at before it counts."""

import math

import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fl_privacy.auditing.strategy_report import StatedByReplies, audited_claims
from fl_privacy.flower.inside.identity import identify_process


def reply(**metrics: float) -> Message:
    identify_process()
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 8, **metrics})}), 1, "train")


@pytest.mark.parametrize("lie", [math.nan, math.inf, -math.inf, 1e300])
def test_a_figure_that_is_none_hides_no_honest_one(lie: float) -> None:
    seen = StatedByReplies()
    seen.see([reply(epsilon=2.0, noise_multiplier=1.0), reply(epsilon=lie, noise_multiplier=lie, delta=lie)])
    assert seen.stated == {"epsilon": 2.0, "noise_multiplier": 1.0}
    (claim,) = audited_claims(FedAvg(), seen, rounds=1)
    assert claim.claimed == 2.0


@pytest.mark.parametrize(("noise", "status"), [(0.0, "unsupported"), (-1.0, "untested"), (50.0, "untested")])
def test_a_noise_of_zero_is_a_figure_and_supports_no_claim(noise: float, status: str) -> None:
    seen = StatedByReplies()
    seen.see([reply(epsilon=2.0, noise_multiplier=noise)])
    (claim,) = audited_claims(FedAvg(), seen, rounds=1)
    assert claim.status == status, claim
