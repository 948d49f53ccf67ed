"""Claims of differential privacy that an audit comes across: the strategy's own, and what clients' replies state."""

from dataclasses import replace

from flwr.serverapp.strategy import Strategy

from fl_privacy.dp_check.asked import Asked
from fl_privacy.dp_check.claims import Claim, Facts, recompute
from fl_privacy.dp_check.verdict import ClaimVerdict
from fl_privacy.flower.dp_mechanisms import stated_by
from fl_privacy.flower.dp_subjects import verdicts_on
from fl_privacy.flower.stated_by_replies import COUNTS, KEYS, SETTINGS, StatedByReplies
from fl_privacy.results.claims import ClaimRecord, records_of

DRAWS = 500
"""On either neighbor, of a strategy under audit: more would hold up the page."""


def audited_claims(strategy: Strategy, replies: StatedByReplies, rounds: int) -> tuple[ClaimRecord, ...]:
    """Hold what the strategy and the clients claim against what is stated, and the strategy against many draws.

    Args:
        strategy: that trains.
        replies: what clients stated.
        rounds: of the training.
    """
    found: list[ClaimVerdict] = []
    if stated_by(strategy) is not None:
        found += verdicts_on(
            strategy, Asked(rounds=rounds, draws=DRAWS), name=f"the server's {type(strategy).__name__}"
        )
    if "epsilon" in replies.stated:
        found.append(_of_clients(replies.stated, rounds))
    beside = sorted(replies.metrics - COUNTS - SETTINGS - KEYS.keys())
    if found and beside:
        note = (
            f"Beside their arrays clients send {', '.join(beside[:6])}: figures of their data that no noise covers;"
            " withhold them, or add noise and count them in."
        )
        found[0] = replace(found[0], notes=(*found[0].notes, note))
    return records_of(found)


def _of_clients(stated: dict[str, float], rounds: int) -> ClaimVerdict:
    """What clients report of their own training, recomputed as far as they say how they sample."""
    delta = stated.get("delta", 1e-5)
    if not 0 < delta < 1 or stated["epsilon"] < 0:
        return ClaimVerdict(subject="clients' own reports", claim=None, notes=("What they report is no epsilon.",))
    claim = Claim(epsilon=stated["epsilon"], delta=delta, unit="example", rounds=rounds, by="clients")
    multiplier, rate = stated.get("noise_multiplier"), stated.get("sample_rate", 1.0)
    missing = [] if multiplier else ["their noise multiplier"]
    facts = Facts(
        noise_multiplier=multiplier if multiplier and multiplier > 0 else None,
        sample_rate=rate if 0 < rate <= 1 else 1.0,
        sampling=None if rate < 1 else "none",
        rounds=rounds,
        missing=(*missing, "how many steps of a round add noise (taken to be one)"),
    )
    return ClaimVerdict(subject="clients' own reports", claim=claim, recomputed=recompute(facts, delta=delta))
