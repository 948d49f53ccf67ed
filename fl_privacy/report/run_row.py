"""A run as a row of the page of many."""

from collections.abc import Sequence
from dataclasses import dataclass

from fl_privacy.metrics import pmm
from fl_privacy.report.readings import (
    Reading,
    Tone,
    most_exposed,
    most_recognized,
    recognized_otherwise,
    tone_of,
    worst_by,
)
from fl_privacy.results import Attacker, Recognized, Run, Summary


@dataclass(frozen=True, kw_only=True, eq=False)
class RunRow:
    """A run in the table.

    Attributes:
        letter: stands for it in the charts.
        run: all that it recorded.
        name: the options that tell it from the others.
        differences: ``key=value`` of the settings that the runs don't share.
        readings: what each attacker read in each round.
        pmm: in percent.
        link: to its own page.
    """

    letter: str
    run: Run
    name: str
    differences: list[str]
    readings: Sequence[Reading]
    pmm: float | None
    link: str | None

    @property
    def summary(self) -> Summary:
        return self.run.summary

    @property
    def epsilon(self) -> float | None:
        """The epsilon spent; ``None`` where there is no guarantee."""
        return self.run.summary.privacy.epsilon if self.run.summary.privacy else None

    @property
    def recognized(self) -> Reading | None:
        """The one that recognized the largest share of the images."""
        return most_recognized(self.readings)

    @property
    def beside(self) -> list[Recognized]:
        """What else is recognizable: by another metric, or as what the defense put in place of the images."""
        if self.recognized is None or self.recognized.recognized:
            return []
        return [bound for bound in (recognized_otherwise(self.readings), most_exposed(self.readings)) if bound]

    @property
    def tone(self) -> Tone:
        """Of all attackers and rounds."""
        return tone_of(self.readings)

    @property
    def attacked(self) -> bool:
        """Whether any image was."""
        return bool(self.readings)

    @property
    def unaware(self) -> bool:
        """Whether it was defended, but attacked by no one who knows the defense."""
        return (
            self.attacked
            and not self.run.identity.undefended
            and all(r.attacker is Attacker.PLAIN for r in self.readings)
        )

    def worst(self, name: str) -> Reading | None:
        """The one that read most by the mean of the metric ``name``."""
        return worst_by(name, self.readings)

    def mean(self, name: str) -> float | None:
        worst = self.worst(name)
        statistic = worst and worst.statistic(name)
        return statistic.mean if statistic else None


def pmm_of(run: Run, runs: Sequence[Run]) -> float | None:
    """PMM of ``run``, if need be against an undefended run among ``runs`` that trained alike."""
    summary = run.summary
    if summary.pmm is not None or summary.final_accuracy is None or run.identity.undefended:
        return summary.pmm
    for other in runs:
        accuracy = other.summary.final_accuracy
        alike = other.identity.training == run.identity.training
        if other.finished and other.identity.undefended and alike and accuracy:
            return pmm(summary.final_accuracy, accuracy)
    return None
