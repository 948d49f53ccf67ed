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


@dataclass(frozen=True)
class Figure:
    """A row of the table, or a column in comparisons."""

    section: Literal["update_distortion", "upload"]
    name: str
    title: str
    show: Callable[[float | None], str]

    @property
    def meaning(self) -> str:
        return MEANINGS[self.name]

    def statistic(self, cost: HasCost) -> Statistic | None:
        return (cost.update_distortion if self.section == "update_distortion" else cost.upload).get(self.name)

    def mean(self, cost: HasCost) -> str:
        statistic = self.statistic(cost)
        return self.show(statistic.mean) if statistic else MISSING

    def interval(self, cost: HasCost) -> str:
        statistic = self.statistic(cost)
        return "[{}, {}]".format(*map(self.show, statistic.ci95)) if statistic and statistic.ci95 else MISSING

    def few(self, cost: HasCost) -> str:
        statistic = self.statistic(cost)
        return f"only {statistic.groups}" if statistic and statistic.groups < FEW else ""

    def number(self, cost: HasCost) -> int:
        statistic = self.statistic(cost)
        return statistic.n if statistic else 0


MEANINGS = {
    "signal_to_distortion": "Norm of the clean update over that of what the defense changed. Below 1 the change drowns"
    " the update; SPN's analysis expects reconstruction to fail there.",
    "cosine": "Cosine of the angle between the defended and the clean update: 1 for the same direction, 0 for an"
    " unrelated one.",
    "zeros": "Share of the elements that are zero or withheld.",
    "contraction": "For updates of one example and a fully connected first layer, whose input solves B x = W: the"
    " change by the defense over the bias gradient, in the row with the largest bias gradient that was uploaded. Below"
    " 1 the input can be determined (SPN, Theorem 2.2).",
    "error_bound": "Bound on the relative error of that input by the theorem; infinite if its condition does not hold.",
    "condition": "Condition number of that system with all rows: the largest over the smallest bias gradient.",
    "solvable": "Share of the updates for which that condition holds.",
    "upload_bytes": "Bytes of one client's update in one round of training, as it is encoded.",
    "defense_seconds": "Time of the defense for one client in one round, on top of the training's own pass, which"
    " includes further terms of the loss.",
    "node_cpu_seconds": "CPU time of a client's whole round on one core of this machine, with the memory of a small"
    " device (`fl-privacy node-cost`).",
    "node_peak_bytes": "Peak private memory of that process, PyTorch included.",
    "node_joules": "Energy of the whole processor during that round, in joules, as the kernel counts it.",
    "node_fits": "Whether the round could be done with that memory.",
}

FIGURES = (
    Figure("update_distortion", "signal_to_distortion", "‖B‖/‖E‖", ratio),
    Figure("update_distortion", "cosine", "Cosine", lambda value: MISSING if value is None else f"{value:.3f}"),
    Figure("update_distortion", "zeros", "Zeros", percent),
    Figure("update_distortion", "contraction", "‖B⁻¹E‖", ratio),
    Figure("update_distortion", "error_bound", "Error bound", ratio),
    Figure("update_distortion", "condition", "κ(B)", ratio),
    Figure("update_distortion", "solvable", "Solvable", percent),
    Figure("upload", "upload_bytes", "Upload", size),
    Figure("upload", "defense_seconds", "Defense", seconds),
    Figure("upload", "node_cpu_seconds", "On a node", seconds),
    Figure("upload", "node_peak_bytes", "Memory there", size),
    Figure("upload", "node_joules", "Energy there", lambda value: MISSING if value is None else f"{value:.3g} J"),
    Figure("upload", "node_fits", "Fits", lambda value: MISSING if value is None else "yes" if value else "no"),
)


def figures_of(*costs: HasCost) -> list[Figure]:
    """List the figures that any of the runs recorded."""
    return [figure for figure in FIGURES if any(figure.statistic(cost) for cost in costs)]
