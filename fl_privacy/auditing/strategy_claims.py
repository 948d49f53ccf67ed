"""Differential privacy claims in an audit, of the strategy and in clients' replies, and uncovered figures."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import Message
from flwr.serverapp.strategy import Strategy

from fl_privacy.dp_check.check import DpCheckRequest
from fl_privacy.dp_check.claims import Claim, Facts, recompute
from fl_privacy.dp_check.verdict import ClaimVerdict
from fl_privacy.flower.dp_mechanisms import stated_by, verdicts_on
from fl_privacy.runs.folder.claims import ClaimRecord, records_of

KEYS = {name: name for name in ("epsilon", "delta", "noise_multiplier", "sample_rate")}
KEYS |= {name.replace("_", "-"): name for name in KEYS}
"""Metric of clients that train by Opacus -> its meaning."""

MOST_STATED, DRAWS = 1e12, 500
"""Limit above which a client's stated figures are ignored, and number of draws on either neighbor, so that the page is
not delayed."""

COUNTS = frozenset({"num-examples", "num_examples"})

SETTINGS = frozenset({"target_delta", "target-delta", "target_epsilon", "max_grad_norm", "max-grad-norm"})
"""Metrics that are training settings, and no figures of the client's data."""


@dataclass(eq=False)
class StatedByReplies:
    """Names of clients' metrics, and the largest epsilon and least noise ``stated`` in the last round."""

    stated: dict[str, float] = field(default_factory=dict)
    metrics: set[str] = field(default_factory=set)

    def see(self, replies: Sequence[Message]) -> None:
        found: dict[str, list[float]] = {}
        usable = (reply for reply in replies if not reply.has_error() and reply.has_content())
        for record in (record for reply in usable for record in reply.content.metric_records.values()):
            for name, value in list(record.items())[:64]:
                if type(value) in (int, float) and abs(value) < MOST_STATED:  # type: ignore[arg-type]
                    self.metrics.add(str(name)[:64])
                    if name in KEYS:
                        found.setdefault(KEYS[name], []).append(float(value))  # type: ignore[arg-type]
        for name, values in found.items():
            self.stated[name] = min(values) if name == "noise_multiplier" else max(values)


def audited_claims(strategy: Strategy, replies: StatedByReplies, rounds: int) -> tuple[ClaimRecord, ...]:
    """Check the claims of strategy and clients against stated facts, and the strategy's against many draws."""
    found: list[ClaimVerdict] = []
    if stated_by(strategy) is not None:
        name, request = f"the server's {type(strategy).__name__}", DpCheckRequest(rounds=rounds, draws=DRAWS)
        found += verdicts_on(strategy, request, name=name)
    if "epsilon" in replies.stated:
        found.append(_of_clients(replies.stated, rounds))
    if found:
        found[0] = replace(found[0], notes=(*found[0].notes, *uncovered(sorted(replies.metrics))))
    return records_of(found)


def uncovered(metrics: Iterable[str]) -> tuple[str, ...]:
    """Return a sentence that names metrics on clients' data, if there are any."""
    names = [name for name in metrics if name not in COUNTS | SETTINGS | KEYS.keys()]
    said = (
        f"Next to their arrays clients send {', '.join(names[:6])}: figures about their data that no noise covers;"
        " withhold them, or add noise and count them in."
    )
    return (said,) if names else ()


def _of_clients(stated: dict[str, float], rounds: int) -> ClaimVerdict:
    delta = stated.get("delta", 1e-5)
    if not 0 < delta < 1 or stated["epsilon"] < 0:
        return ClaimVerdict(subject="clients' own reports", claim=None, notes=("What they report is no epsilon.",))
    claim = Claim(epsilon=stated["epsilon"], delta=delta, unit="example", rounds=rounds, by="clients")
    multiplier, rate = stated.get("noise_multiplier"), stated.get("sample_rate", 1.0)
    multiplier = multiplier if multiplier is not None and multiplier >= 0 else None
    missing = ["their noise multiplier"] if multiplier is None else []
    facts = Facts(
        noise_multiplier=multiplier,
        sample_rate=rate if 0 < rate <= 1 else 1.0,
        sampling=None if rate < 1 else "none",
        rounds=rounds,
        missing=(*missing, "how many steps of a round add noise (taken to be one)"),
    )
    return ClaimVerdict(subject="clients' own reports", claim=claim, recomputed=recompute(facts, delta=delta))
