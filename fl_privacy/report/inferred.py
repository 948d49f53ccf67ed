"""Show results of inference attacks, and checked claims of privacy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from fl_privacy.files import shipped, write_whole
from fl_privacy.files.foreign import expect_file_name
from fl_privacy.measure.roc import tpr_bound
from fl_privacy.report.charts import INK, MUTED, SERIES, draw_svg
from fl_privacy.report.page import render, writable
from fl_privacy.report.words import MISSING, percent
from fl_privacy.runs.folder import Finding, Measure
from fl_privacy.runs.folder.claims import ClaimRecord
from fl_privacy.runs.folder.defense_choice import HEADLINE, LOW_LEAKS, is_above_chance, number_of_measures, strongest
from fl_privacy.runs.folder.verdict import CHANCE_TONES, Tone

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN_FROM = 1e-3  # smallest FPR on a ROC curve's axis, unless there are more negatives


@dataclass(frozen=True)
class MeasureTitle:
    """A report's words for a measure: title and meaning of its column, and a sentence about the largest leakage."""

    title: str
    meaning: str
    decimal: bool = False  # ``False`` if values are shown in percent
    plainly: str = "{title} is {value} ({interval})"

    def show(self, value: float | None) -> str:
        if self.decimal:
            return MISSING if value is None else f"{value:z.3f}"
        return percent(value)


_TABLES = shipped(__file__, "inferred.yaml")
MEASURES: dict[str, MeasureTitle] = {name: MeasureTitle(**fields) for name, fields in _TABLES["measures"].items()}

HEADINGS = {question: (entry["heading"], entry["text"]) for question, entry in _TABLES["questions"].items()}
"""Question -> heading and text."""

AXES = {question: entry["axis"] for question, entry in _TABLES["questions"].items() if "axis" in entry}
"""Question -> axis of its chart, shown next to PSNR in comparisons."""


@dataclass(frozen=True, kw_only=True)
class InferredView:
    """Results of attacks that infer one kind of fact, such as membership, strongest first."""

    heading: str
    question: str
    result: str
    columns: Mapping[str, MeasureTitle]
    findings: Sequence[Finding]
    chart: Markup | None
    notes: Sequence[str]
    seconds: float | None
    among: int  # number of all measures, which are tested together (Bonferroni)

    def tone(self, name: str, measure: Measure) -> Tone:
        return CHANCE_TONES[is_above_chance(name, measure, among=self.among)]


def views_of(findings: Sequence[Finding]) -> list[InferredView]:
    """Return the page's data on each kind of fact that attacks inferred, such as membership."""
    return [_view(about, findings) for about in dict.fromkeys(f.about for f in findings)]


def sentence(findings: Sequence[Finding], about: str) -> str:
    """Describe the strongest result about ``about``, such as membership, or why attacks failed; may be empty."""
    own, among = [f for f in findings if f.about == about], number_of_measures(findings)
    best = strongest(own, about)
    if best is None:
        if reasons := dict.fromkeys(f.failure for f in own if f.failure):
            return f"The attack failed: {'; '.join(map(str, reasons))}."
        best = max(((f, f.measures["auc"]) for f in own if "auc" in f.measures), key=lambda p: p[1].value, default=None)
        if best is None:
            return ""
        return _in_words(best[0], "auc", best[1], among=among) + " There are too few examples for a rate at 1 % FPR."
    return _in_words(best[0], HEADLINE[about], best[1], among=among)


def _in_words(finding: Finding, name: str, measure: Measure, *, among: int) -> str:
    shown = MEASURES[name]
    value, chance = shown.show(measure.value), shown.show(measure.chance)
    interval = f"95 % interval {shown.show(measure.low)} to {shown.show(measure.high)}"
    bound = f", and its epsilon allows {shown.show(measure.bound)}" if measure.bound is not None else ""
    clear = "" if is_above_chance(name, measure, among=among) else " It is no better than chance."
    said = shown.plainly.format(title=shown.title, value=value, interval=interval)
    return f"{finding.title}: {said}; guessing gets {chance}{bound}.{clear}"


def _view(about: str, every: Sequence[Finding]) -> InferredView:
    findings = [f for f in every if f.about == about]
    heading, question = HEADINGS.get(about, (about.capitalize(), ""))
    name = HEADLINE.get(about, "")
    sign = -1 if name in LOW_LEAKS else 1
    ordered = sorted(findings, key=lambda f: -sign * f.measures[name].value if name in f.measures else math.inf)
    curves = [f for f in ordered if f.fpr]
    return InferredView(
        heading=heading,
        question=question,
        result=sentence(every, about),
        columns={n: measure for n, measure in MEASURES.items() if any(n in f.measures for f in ordered)},
        findings=ordered,
        chart=roc_chart(curves) if curves else None,
        notes=list(dict.fromkeys(note for f in findings for note in f.notes)),
        seconds=max((f.seconds for f in findings if f.seconds is not None), default=None),
        among=number_of_measures(every),
    )


def roc_chart(findings: Sequence[Finding]) -> Markup:
    """Draw ROC curves on logarithmic axes, with lines for chance and, if any, differential privacy's bound."""
    first = findings[0]
    smallest = min(SHOWN_FROM, 1 / max(1, first.negatives))

    def draw(axes: Axes) -> None:
        x = np.geomspace(smallest, 1.0, 200)
        axes.plot(x, x, "--", color=MUTED, linewidth=1.0, label="chance")
        if first.epsilon is not None and first.delta is not None and math.isfinite(first.epsilon):
            allowed = tpr_bound(x, epsilon=first.epsilon, delta=first.delta)
            axes.plot(x, allowed, ":", color=INK, linewidth=1.4, label=f"allowed by epsilon {first.epsilon:.3g}")
        for number, finding in enumerate(findings):
            points = [(max(f, smallest), t) for f, t in zip(finding.fpr, finding.tpr, strict=True) if t > 0]
            steps: dict[str, Any] = {"drawstyle": "steps-post", "color": SERIES[number % len(SERIES)], "linewidth": 1.6}
            axes.plot([f for f, _ in points], [t for _, t in points], label=finding.title, **steps)
        axes.set(xscale="log", yscale="log", xlim=(smallest, 1), ylim=(smallest, 1.1))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
            axis.set_minor_formatter("")
        axes.set(xlabel="False positive rate", ylabel="True positive rate")
        axes.legend(fontsize=8.5, loc="lower right")

    alt = "ROC curves on logarithmic axes: " + "; ".join(
        f"{f.title} with AUC {f.measures['auc'].value:.3f}" for f in findings if "auc" in f.measures
    )
    return draw_svg(draw, alt)


def render_claims(records: Sequence[ClaimRecord], *, title: str) -> str:
    """Render the page on checked privacy claims."""
    return render("claims.html.j2", claims=records, title=title, first=records[0])


def write_claims_page(records: Sequence[ClaimRecord], page: Path, *, title: str) -> Path:
    """Write the page on checked privacy claims; ``UserError`` if ``page`` is not writable."""
    expect_file_name(page)
    with writable(page):
        write_whole(page, render_claims(records, title=title))
    return page
