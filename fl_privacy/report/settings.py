"""Summarize configurations, their differences, and a defense's cost."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fl_privacy.files import shipped
from fl_privacy.measure import FEW, Statistic
from fl_privacy.report.words import MISSING, percent, ratio, seconds, size
from fl_privacy.runs.config.settings import groups, is_within
from fl_privacy.runs.folder import Run, Summary
from fl_privacy.runs.folder.identity import RUNTIME
from fl_privacy.runs.folder.leakage import chosen_option
from fl_privacy.runs.folder.study import StudyRow

GROUPS = groups(shown=True)
UNSAID = ("_target_", "name")  # settings that only repeat the chosen option
AS_USUAL = {"server": "honest", "guard": "off", "inference": "none"}  # options not worth mentioning, by group
DIFFERENCES_SHOWN = 6
_BATCH_NORM = {
    "eval": "evaluation mode (by the running statistics that were sent, as published attacks assume)",
    "train": "training mode (by the statistics of the attacked batch, which hides much of a small one)",
}


def chosen(run: Run, group: str) -> str:
    """Return the name of the option chosen in config group ``group``, or of the user's own function or class."""
    return chosen_option(run.identity, group)[0]


def overview(run: Run) -> list[tuple[str, str]]:
    """List (name, chosen option and its settings) of each config group that differs from its default, and the seed."""
    without = run.of_kind("attack") and not run.summary.batch_norm
    unused = ("plan.batch_norm", "plan.probe_batch_norm") if without else ()
    rows = []
    for group in GROUPS:
        section = run.identity.config.get(group)
        settings = dict(flat_settings(section)) if isinstance(section, Mapping) else {}
        shown = [f"{k} {v}" for k, v in settings.items() if k not in (*UNSAID, *unused) and v is not None]
        if chosen(run, group) == AS_USUAL.get(group):
            continue
        if words := ": ".join(filter(None, [chosen(run, group), ", ".join(shown)])):
            rows.append((group.capitalize(), words))
    return [*rows, ("Seed", str(run.identity.config.get("seed", "")))]


def batch_norm_in_words(summaries: Iterable[Summary]) -> str:
    """Describe the mode of batch norm in the attacked uploads; empty for models without batch norm."""
    modes = sorted({mode for summary in summaries for mode in summary.batch_norm})
    ran = " or ".join(_BATCH_NORM[mode] for mode in modes)
    return f"In the attacked uploads, batch norm ran in {ran}." if modes else ""


def differences(runs: Sequence[Run]) -> list[list[str]]:
    """Return for each run the ``key=value`` of settings that differ between ``runs``, at most ``DIFFERENCES_SHOWN``."""
    flat = [telling_settings(run) for run in runs]
    values = {key: {settings.get(key) for settings in flat} for key in dict.fromkeys(k for s in flat for k in s)}
    keys = sorted((k for k, found in values.items() if len(found) > 1), key=lambda k: len(values[k] - {None}) == 1)
    found = []
    for settings in flat:
        words = [f"{k}={settings[k]}" for k in keys if k in settings]
        left = len(words) - DIFFERENCES_SHOWN
        found.append([*words[:DIFFERENCES_SHOWN], f"and {left} more"] if left > 0 else words)
    return found


def telling_settings(run: Run) -> dict[str, str]:
    """Return dotted key -> value of the settings that can affect a run's results."""
    return {
        key: str(value)
        for key, value in flat_settings(run.identity.config)
        if not is_within(key, RUNTIME) and not key.startswith("choices.") and key.rpartition(".")[2] not in UNSAID
    }


def names(runs: Sequence[Run]) -> tuple[list[str], str]:
    """Name each run by the options in which runs differ, or by its label; also return the options that all share."""
    options = {group: [chosen(run, group) for run in runs] for group in GROUPS}
    varying = [group for group, taken in options.items() if len(set(taken)) > 1]
    same = {group: taken[0] for group, taken in options.items() if group not in varying}
    shared = " · ".join(option for group, option in same.items() if option and option != AS_USUAL.get(group))
    own = [" · ".join(f"{g}={options[g][k]}" for g in varying if options[g][k]) for k in range(len(runs))]
    return [name or run.identity.label for name, run in zip(own, runs, strict=True)], shared


def flat_settings(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of each setting in the nested ``section``; keys begin with ``prefix``."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from flat_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


HasCost = Summary | StudyRow


@dataclass(frozen=True)
class Figure:
    """How to show one figure, such as time: as a row of a run's table, or a column of comparisons."""

    section: Literal["update_distortion", "upload"]
    name: str
    title: str
    show: Callable[[float | None], str]
    meaning: str

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


_FORMATS: Mapping[str, Callable[[float | None], str]] = {
    **{"percent": percent, "ratio": ratio, "seconds": seconds, "size": size},
    "cosine": lambda value: MISSING if value is None else f"{value:.3f}",
    "joules": lambda value: MISSING if value is None else f"{value:.3g} J",
    "yes or no": lambda value: MISSING if value is None else "yes" if value else "no",
}

FIGURES = tuple(
    Figure(name=name, **fields | {"show": _FORMATS[fields["show"]]})
    for name, fields in shipped(__file__, "figures.yaml").items()
)


def figures_of(*costs: HasCost) -> list[Figure]:
    """Return the columns of cost, such as time or traffic, for which any of the runs recorded a value."""
    return [figure for figure in FIGURES if any(figure.statistic(cost) for cost in costs)]
