"""Run a paper's preset with its baselines, and record published next to measured figures (``conf/papers.yaml``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_privacy.errors import UserError
from fl_privacy.files import CONFIG_DIR
from fl_privacy.measure import Statistic, aggregate
from fl_privacy.report.ppc import distances_of
from fl_privacy.runs.config import RunSettings, compose_run
from fl_privacy.runs.config.compose import merge_overrides, override_keys
from fl_privacy.runs.config.parse import select
from fl_privacy.runs.folder import Run, read_run
from fl_privacy.site.gate.plain_yaml import loaded

if TYPE_CHECKING:
    from fl_privacy.runs.run_location import Command

FORM = "paper"  # override that chooses the form: ``short`` (the default) or ``full``, as the paper's settings are
_ALONE = ("captured", "weights", "evaluator")  # settings with which a preset is one run


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """Table of a paper, reproduced by runs of ``command``; ``conf/papers.yaml`` explains the fields."""

    command: Command
    title: str
    about: str
    data: Sequence[Sequence[str]]
    short: Sequence[str]  # overrides of the short form; empty if the user wants the full one
    lines: Mapping[str, Sequence[Sequence[str]]]
    figures: Mapping[str, str]
    published: Sequence[Mapping[str, Any]]
    picture: Mapping[str, Any]
    full: Sequence[str] = ()
    evaluator: Mapping[str, Sequence[str]] | None = None
    # settings of the attack on uploads of an untrained model, a run of its own, if ``command`` only trains
    attack: Mapping[str, Sequence[str]] | None = None
    own: Sequence[str] = ()  # overrides of the user, with the preset

    @property
    def form(self) -> str:
        return "short" if self.short else "full"

    def settings(self, changes: Sequence[str] = ()) -> RunSettings:
        return compose_run(merge_overrides(self.data[0], self.full, self.short, self.own, changes))

    def runs(self) -> dict[str, list[list[tuple[Command, RunSettings]]]]:
        """Return the runs to start: table row -> for each strength of the defense, pairs (command, settings)."""
        planned: dict[str, list[list[tuple[Command, RunSettings]]]] = {name: [] for name in self.lines}
        for name, changes in ((name, changes) for name, runs in self.lines.items() for changes in runs):
            planned[name].append([(self.command, self.settings(changes))])
            if self.attack is not None:
                overrides = merge_overrides(self.attack[self.form], self.data[0], self.own[1:], changes)
                planned[name][-1].append(("attack", compose_run(overrides)))
        return planned

    def with_data(self) -> PaperTable:
        """Return this table with the first of its data sets that is available here; ``UserError`` if none is."""
        from fl_privacy.runs.build import build_dataset  # noqa: PLC0415  (PyTorch: after the settings are checked)

        try:
            build_dataset(self.settings().data)
        except UserError:
            if len(self.data) < 2:
                raise
            return replace(self, data=self.data[1:]).with_data()
        return self


@cache
def _tables() -> Mapping[str, Any]:
    content = loaded((CONFIG_DIR / "papers.yaml").read_bytes(), "papers.yaml")
    assert isinstance(content, dict)
    return content


def paper_table(command: Command, overrides: Sequence[str]) -> PaperTable | None:
    """Return the published table that ``experiment=`` in ``overrides`` reproduces; ``None`` if others change it.

    ``UserError`` if ``paper=`` is invalid, or given without such a preset.
    """
    given = dict(zip(override_keys(overrides), overrides, strict=True))
    form, preset = (given.get(key, "").partition("=")[2] for key in (FORM, "experiment"))
    own = [text for key, text in given.items() if key not in (FORM, "experiment")]
    if (content := _tables().get(preset)) is not None:
        table = PaperTable(**content, own=[f"experiment={preset}", *own])
        lines = [key for runs in table.lines.values() for changes in runs for key in override_keys(changes)]
        fixed, free = {key.partition(".")[0] for key in (*lines, *_ALONE)}, override_keys(table.short)
        if table.command == command and not any(key.partition(".")[0] in fixed for key in given if key not in free):
            if form not in ("", "short", "full"):
                raise UserError(f"{FORM} is expected to be short or full, but got {form!r}; leave it out for short.")
            table = replace(table, data=[[]]) if "data" in given else table
            return replace(table, short=()) if form == "full" else table
    if FORM in given:
        presets = ", ".join(f"`{of['command']} experiment={name}`" for name, of in _tables().items())
        raise UserError(f"{FORM}= is expected with {presets} unchanged, but got {' '.join(overrides)[:99]}; omit it.")
    return None


def record_of(table: PaperTable, folders: Mapping[str, Sequence[Sequence[Path]]]) -> dict[str, Any]:
    """Return the content of ``paper.json``; ``folders``: table row -> for each strength, the folders of its runs."""
    ours, printed = table.settings().plain(), compose_run(merge_overrides(table.full, table.own)).plain()
    fitting = [of for of in table.published if all(select(ours, key) in value for key, value in of["when"].items())]
    published = (fitting or table.published)[0]
    lines = []
    for name in table.lines:
        of_line = [[read_run(folder) for folder in of_strength] for of_strength in folders[name]]
        figures = [_figure(of_line, of, published.get(name, {}).get(title)) for title, of in table.figures.items()]
        lines.append({"name": name, "folders": [[run.name for run in runs] for runs in of_line], "figures": figures})
    changes = [
        f"{key}={select(ours, key)} ({select(printed, key)})"
        for key in ("data.name", *override_keys(table.short))
        if key not in ("films", "data") and select(ours, key) != select(printed, key)
    ]
    notes = ["No figure is published for these data: compare orders at most."] * (not fitting)
    notes += [f"Changed here, with the preset's own value in parentheses: {', '.join(changes)}."] * bool(changes)
    notes += ["This is the short form; paper=full takes as long as the paper's settings do."] * bool(table.short)
    if table.attack is not None:
        named = [text for text in table.attack[table.form] if not text.startswith(("films=", "name=", "data="))]
        notes.append(f"Attack: {', '.join(named)}.")
    return {
        "title": table.title,
        "at": published["at"],
        "ours": f"{ours['data'].get('name')}, {ours['choices']['model']}",
        "about": " ".join(table.about.split()),
        "notes": notes,
        "columns": list(table.figures),
        "lines": lines,
        "picture": table.picture["as"],
        "strips": table.picture["rows"],
    }


def _figure(strengths: Sequence[Sequence[Run]], of: str, published: float | None) -> list[float | None]:
    """Return [published value, our mean, interval's ends (``None`` for several strengths), number of examples]."""
    found = [statistic for runs in strengths if (statistic := _statistic(runs, of)) is not None]
    one = found[0] if len(strengths) == 1 and found else None
    ours = one or aggregate([each.mean for each in found])
    low, high = (one and one.ci95) or (None, None)
    return [published, None if ours is None else ours.mean, low, high, 0 if ours is None else ours.n]


def _statistic(runs: Sequence[Run], of: str) -> Statistic | None:
    """Return the training's accuracy, a metric of the attack, or the product of both (``cap``), as named by ``of``."""
    accuracy, attacked, (kind, _, distance) = runs[0].summary.final_accuracy, runs[-1].summary.plain, of.partition(".")
    if kind not in ("accuracy", "cap"):
        return next((found for name in of.split() if (found := attacked.statistic(name))), None)
    factor = 100.0 if kind == "accuracy" else distances_of([attacked]).get(distance)
    return None if accuracy is None or factor is None else aggregate([accuracy * factor])
