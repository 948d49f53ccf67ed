"""What inference attacks found out beside images, as a run records it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fl_privacy.measure.roc import Estimate


@dataclass(frozen=True, kw_only=True)
class Measure(Estimate):
    """An estimate, beside the largest that the clients' differential privacy allows; ``None`` where it bounds none."""

    bound: float | None = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Finding of one inference method.

    Attributes:
        about: what was asked, one of ``fl_privacy.attacks.inference.About``.
        method: name of the method.
        title: for pages.
        source: who proposed it.
        rounds: how many were read.
        last_round: the last of them.
        positives: examples asked about for which the answer is yes; of questions with many answers all of them.
        negatives: for which it is no.
        measures: by name, see ``report.inference``.
        fpr: (P,) of a ROC curve, ascending; empty where there is none.
        tpr: (P,) as ``fpr``.
        epsilon: that the clients had spent by the last round; ``None`` without guarantee.
        delta: of both epsilons.
        proven_epsilon: the largest that the attack disproves.
        notes: sentences on how to read it.
        failure: why there is no finding.
        seconds: that all methods of the question took together, without the judgment.
    """

    about: str
    method: str
    title: str
    source: str = ""
    rounds: int = 0
    last_round: int = 0
    positives: int = 0
    negatives: int = 0
    measures: Mapping[str, Measure] = field(default_factory=dict)
    fpr: Sequence[float] = ()
    tpr: Sequence[float] = ()
    epsilon: float | None = None
    delta: float | None = None
    proven_epsilon: float | None = None
    notes: Sequence[str] = ()
    failure: str | None = None
    seconds: float | None = None

    def as_record(self) -> dict[str, Any]:
        """Return the fields of a record of ``metrics.jsonl``; each measure is value, low, high, chance, bound."""
        measures = {name: [m.value, m.low, m.high, m.chance, m.bound] for name, m in self.measures.items()}
        lists = {"fpr": list(self.fpr), "tpr": list(self.tpr), "notes": list(self.notes)}
        return {**asdict(self), "measures": measures, **lists}


FINDING: dict[str, Any] = {
    "about": str,
    "method": str,
    "title": str,
    "source": str,
    "rounds": int,
    "last_round": int,
    "positives": int,
    "negatives": int,
    "measures": Mapping[str, list[float | None]],
    "fpr": list[float],
    "tpr": list[float],
    "epsilon": float | None,
    "delta": float | None,
    "proven_epsilon": float | None,
    "notes": list[str],
    "failure": str | None,
    "seconds": float | None,
}
"""Fields of a record of the kind ``inference`` and their types."""


def finding_of(record: Mapping[str, Any]) -> Finding:
    """Build a finding from the record that ``Finding.as_record`` gave; a measure that is damaged is left out."""
    measures = {
        name: Measure(value=v[0], low=v[1], high=v[2], chance=v[3], bound=v[4])
        for name, v in record["measures"].items()
        if len(v) == 5 and None not in v[:4]
    }
    fields = {name: record[name] for name in FINDING if name != "measures"}
    return Finding(measures=measures, **fields)
