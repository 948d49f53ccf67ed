"""What a sweep over defenses showed: leakage beside utility, a row for each defense at each strength."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fl_privacy.config.study import UNDEFENDED
from fl_privacy.metrics import Statistic, pmm
from fl_privacy.report.cost import Cost
from fl_privacy.report.run_page import uploads_of
from fl_privacy.results import Attacker, Finding, Leakage, Summary, is_finished, read_run, read_summary
from fl_privacy.results.candidates import Candidate, candidate_of
from fl_privacy.results.readings import Reading, readings_of


@dataclass(frozen=True, kw_only=True)
class SweepEntry:
    """Folders with the results of a defense at one strength in a sweep; jobs that did not finish have none.

    Attributes:
        family: of the defense; outcomes of one family make a curve. ``UNDEFENDED`` names the one without a defense.
        strength: in words; empty for a defense that the grid has at one strength.
        training: folder of its run.
        attacks: folders of the attacks on it by the attack's name.
    """

    family: str
    strength: str
    training: Path
    attacks: Mapping[str, Path]

    @property
    def undefended(self) -> bool:
        """Say whether the clients had no defense."""
        return self.family == UNDEFENDED


@dataclass(frozen=True)
class Versus:
    """An attack and its attacker; ``worst`` is the one of the others that came nearest."""

    attack: str
    attacker: Attacker | Literal["worst"]


@dataclass(frozen=True, kw_only=True, eq=False)
class DefenseRow:
    """Results of a defense at one strength in a sweep.

    Attributes:
        outcome: what was done.
        training: summary of the run; ``None`` if it did not finish.
        pmm: in percent; ``None`` if the training or the undefended one did not finish.
        leakage: in the last attacked round, by who attacked.
        readings: in all rounds, over all attacks.
        update_distortion: of the attacked updates, as in a run's summary.
        attacks: summaries of the attacks that finished, by the attack's name.
        findings: what was inferred beside images, from the training and from the attacks.
        uploads: what the attacked uploads were computed from, in a sentence, by the attack's name.
    """

    outcome: SweepEntry
    training: Summary | None
    pmm: float | None
    leakage: Mapping[Versus, Leakage]
    readings: Sequence[Reading]
    update_distortion: Mapping[str, Statistic]
    attacks: Mapping[str, Summary] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    uploads: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return family and strength."""
        return f"{self.outcome.family} ({self.outcome.strength})" if self.outcome.strength else self.outcome.family

    @property
    def accuracy(self) -> float | None:
        """Return the accuracy at the end of the training, in [0, 1]."""
        return self.training.final_accuracy if self.training else None

    @property
    def cost(self) -> Cost:
        """Return the cost of the defense: what it did to updates and took."""
        return Cost(update_distortion=self.update_distortion, upload=self.training.upload if self.training else {})

    @property
    def complete(self) -> bool:
        """Say whether the training and every attack finished."""
        return self.training is not None and {v.attack for v in self.leakage} == set(self.outcome.attacks)

    def mean(self, versus: Versus, metric: str) -> float | None:
        """Return the mean over the images of one attack."""
        statistic = self.statistic(versus, metric)
        return statistic.mean if statistic else None

    def statistic(self, versus: Versus, metric: str) -> Statistic | None:
        """Return the statistic over the images of one attack; ``None`` where it was not measured."""
        leakage = self.leakage.get(versus)
        return leakage.metrics.get(metric) if leakage else None

    def candidate(self, asked: Collection[str] = ()) -> Candidate | None:
        """Return the candidate for the choice of a defense; ``None`` unless it is complete and an attack gave images.

        Args:
            asked: what was asked beside images, of any row.
        """
        if not self.complete:
            return None
        return candidate_of(
            self.readings,
            name=self.name,
            accuracy=self.accuracy,
            pmm=self.pmm,
            findings=self.findings,
            asked=asked,
            undefended=self.outcome.undefended,
        )


def read_rows(outcomes: Sequence[SweepEntry]) -> list[DefenseRow]:
    """Return a row for each outcome, in order."""
    trained = {outcome.training: read_summary(outcome.training) for outcome in outcomes}
    summaries = [trained[outcome.training] for outcome in outcomes if outcome.undefended]
    undefended = next((s.final_accuracy for s in summaries if s), None)
    return [_row(outcome, trained[outcome.training], undefended) for outcome in outcomes]


def row_as_plain(row: DefenseRow) -> dict[str, Any]:
    """Return the row as plain values for ``trade_off.json``; the same whatever the clock showed."""
    return {
        "family": row.outcome.family,
        "strength": row.outcome.strength,
        "accuracy": row.accuracy,
        "pmm": row.pmm,
        "update_distortion": {name: asdict(statistic) for name, statistic in row.update_distortion.items()},
        "bytes_per_upload": row.training.upload["upload_bytes"].mean if row.training else None,
        "inferred": [finding.as_record() | {"seconds": None, "fpr": [], "tpr": []} for finding in row.findings],
        "leakage": [{"attack": v.attack, "attacker": v.attacker} | _figures(of) for v, of in row.leakage.items()],
    }


def _figures(leakage: Leakage) -> dict[str, Any]:
    content = asdict(leakage)
    return {name: content[name] for name in ("images", "failures", "metrics", "thresholds")} | {
        "counts": leakage.counts.as_plain()
    }


def _row(outcome: SweepEntry, training: Summary | None, undefended: float | None) -> DefenseRow:
    runs = {name: read_run(path) for name, path in outcome.attacks.items() if is_finished(path)}
    attacks = {name: run.summary for name, run in runs.items()}
    leakage = {
        Versus(name, attacker): last
        for name, found in attacks.items()
        for attacker in Attacker
        if (last := found.last_by(attacker))
    }
    accuracy = training.final_accuracy if training else None
    return DefenseRow(
        outcome=outcome,
        training=training,
        pmm=pmm(accuracy, undefended) if accuracy is not None and undefended else None,
        leakage=leakage,
        readings=[
            reading
            for name, found in attacks.items()
            for reading in readings_of(found, name, undefended=outcome.undefended)
        ],
        update_distortion=next((found.update_distortion for found in attacks.values() if found.update_distortion), {}),
        attacks=attacks,
        uploads={name: uploads_of(run) for name, run in runs.items()},
        findings=[f for found in (training, *attacks.values()) if found for f in found.inferred],
    )
