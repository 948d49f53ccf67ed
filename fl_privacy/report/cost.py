"""Tabulate a defense's change to updates, and its cost."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from fl_privacy.measure import FEW, Statistic
from fl_privacy.report.words import MISSING, percent, ratio, seconds, size


class HasCost(Protocol):
    """A run's summary or a study's row, with its costs."""

    @property
    def update_distortion(self) -> Mapping[str, Statistic]: ...

    @property
    def upload(self) -> Mapping[str, Statistic]: ...


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A row of the table, or a column in comparisons."""

    section: Literal["update_distortion", "upload"]
    name: str
    title: str
    meaning: str
    show: Callable[[float | None], str]

    def statistic(self, cost: HasCost) -> Statistic | None:
        return (cost.update_distortion if self.section == "update_distortion" else cost.upload).get(self.name)

    def mean(self, cost: HasCost) -> str:
        statistic = self.statistic(cost)
        return self.show(statistic.mean) if statistic else MISSING

    def interval(self, cost: HasCost) -> str:
        statistic = self.statistic(cost)
        if not statistic or not statistic.ci95:
            return MISSING
        return "[{}, {}]".format(*map(self.show, statistic.ci95))

    def few(self, cost: HasCost) -> str:
        statistic = self.statistic(cost)
        return f"only {statistic.groups}" if statistic and statistic.groups < FEW else ""

    def number(self, cost: HasCost) -> int:
        statistic = self.statistic(cost)
        return statistic.n if statistic else 0


FIGURES = (
    Figure(
        section="update_distortion",
        name="signal_to_distortion",
        title="‖B‖/‖E‖",
        meaning="Norm of the clean update over that of what the defense changed. Below 1 the change drowns the update;"
        " SPN's analysis expects reconstruction to fail there.",
        show=ratio,
    ),
    Figure(
        section="update_distortion",
        name="cosine",
        title="Cosine",
        meaning="Cosine of the angle between the defended and the clean update: 1 for the same direction, 0 for an"
        " unrelated one.",
        show=lambda value: MISSING if value is None else f"{value:.3f}",
    ),
    Figure(
        section="update_distortion",
        name="zeros",
        title="Zeros",
        meaning="Share of the elements that are zero or withheld.",
        show=percent,
    ),
    Figure(
        section="update_distortion",
        name="contraction",
        title="‖B⁻¹E‖",
        meaning="For updates of one example and a fully connected first layer, whose input solves B x = W: the change"
        " by the defense over the bias gradient, in the row with the largest bias gradient that was uploaded. Below 1"
        " the input can be determined (SPN, Theorem 2.2).",
        show=ratio,
    ),
    Figure(
        section="update_distortion",
        name="error_bound",
        title="Error bound",
        meaning="Bound on the relative error of that input by the theorem; infinite if its condition does not hold.",
        show=ratio,
    ),
    Figure(
        section="update_distortion",
        name="condition",
        title="κ(B)",
        meaning="Condition number of that system with all rows: the largest over the smallest bias gradient.",
        show=ratio,
    ),
    Figure(
        section="update_distortion",
        name="solvable",
        title="Solvable",
        meaning="Share of the updates for which that condition holds.",
        show=percent,
    ),
    Figure(
        section="upload",
        name="upload_bytes",
        title="Upload",
        meaning="Bytes of one client's update in one round of training, as it is encoded.",
        show=size,
    ),
    Figure(
        section="upload",
        name="defense_seconds",
        title="Defense",
        meaning="Time of the defense for one client in one round, on top of the training's own pass, which includes"
        " further terms of the loss.",
        show=seconds,
    ),
    Figure(
        section="upload",
        name="node_cpu_seconds",
        title="On a node",
        meaning="CPU time of a client's whole round on one core of this machine, with the memory of a small device"
        " (`fl-privacy node-cost`).",
        show=seconds,
    ),
    Figure(
        section="upload",
        name="node_peak_bytes",
        title="Memory there",
        meaning="Peak private memory of that process, PyTorch included.",
        show=size,
    ),
    Figure(
        section="upload",
        name="node_joules",
        title="Energy there",
        meaning="Energy of the whole processor during that round, in joules, as the kernel counts it.",
        show=lambda value: MISSING if value is None else f"{value:.3g} J",
    ),
    Figure(
        section="upload",
        name="node_fits",
        title="Fits",
        meaning="Whether the round could be done with that memory.",
        show=lambda value: MISSING if value is None else "yes" if value else "no",
    ),
)


def figures_of(*costs: HasCost) -> list[Figure]:
    """List the figures that any of the runs recorded."""
    return [figure for figure in FIGURES if any(figure.statistic(cost) for cost in costs)]
