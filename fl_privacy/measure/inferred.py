"""Results of inference attacks, as recorded by a run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fl_privacy.measure.roc import Estimate


@dataclass(frozen=True, kw_only=True)
class Measure(Estimate):
    """An estimate, and its bound by the clients' differential privacy, if any."""

    bound: float | None = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one inference method.

    Attributes:
        about: question, one of ``fl_privacy.attacks.inference.About``.
        positives: number of queries with the answer yes; all queries if there are many answers.
        measures: by name, see ``report.inferred``.
        fpr: (P,) false positive rates of a ROC curve, ascending; may be empty.
        tpr: (P,) true positive rates.
        epsilon: epsilon spent by the last round; ``None`` without guarantee.
        proven_epsilon: largest epsilon that the attack disproves.
        seconds: time of all methods of the question, without scoring.
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
    **{field.name: field.type for field in fields(Finding)},
    "measures": Mapping[str, list[float | None]],
}
"""Fields and types of an ``inference`` record."""


def finding_of(record: Mapping[str, Any]) -> Finding:
    """Build a finding from its record, without damaged measures."""
    measures = {
        name: Measure(value=v[0], low=v[1], high=v[2], chance=v[3], bound=v[4])
        for name, v in record["measures"].items()
        if len(v) == 5 and None not in v[:4]
    }
    fields = {name: record[name] for name in FINDING if name != "measures"}
    return Finding(measures=measures, **fields)
