"""A run as a row of the page of many."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fl_privacy.metrics import pmm
from fl_privacy.results import Attacker, Reading, Recognized, Run, Summary, Verdict, verdict_of
from fl_privacy.results.readings import Extent, extent_of, most_exposed, worst_by


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

    @cached_property
    def verdict(self) -> Verdict:
        """What may be said of the run."""
        return verdict_of(self.run)

    @property
    def most(self) -> Reading | None:
        """The reading that leaks most."""
        return self.verdict.most

    @property
    def extent(self) -> Extent:
        """How much it leaks."""
        return extent_of(self.readings, told=len(self.verdict.told))

    @property
    def exposed(self) -> Recognized | None:
        """What came out as what the defense put in place of the images, where fewer of these were read."""
        exposed = most_exposed(self.readings)
        return (
            None if self.most is None or exposed is None or exposed.recognizable <= self.most.counts.read else exposed
        )

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
        """The one with the worst mean of the metric ``name``."""
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
