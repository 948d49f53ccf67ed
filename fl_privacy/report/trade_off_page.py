"""Render the page of a sweep over defenses: leakage by utility, charts, and the table as plain values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fl_privacy.measure import METRICS
from fl_privacy.measure.registry import IMAGE_METRIC
from fl_privacy.report.charts import EXACT, INK, SERIES, draw_bound, draw_svg, reach, top_of, widen
from fl_privacy.report.cost import figures_of
from fl_privacy.report.inferred import AXES
from fl_privacy.report.page import link_to, render
from fl_privacy.report.ppc import ppc_view_of, samples_of_rows
from fl_privacy.report.recommendation import answer, goal_in_words, kind_in_words, read_of
from fl_privacy.report.run_page import said_together, uploads_of
from fl_privacy.report.settings import batch_norm_in_words
from fl_privacy.report.words import metric, papers_bound, percent
from fl_privacy.runs.folder import Attacker, Candidate, LeakageResult
from fl_privacy.runs.folder.defense_choice import asked_of, best_unread, strongest, unread_undefended
from fl_privacy.runs.folder.leakage import COMPARED, main_of, worst_by
from fl_privacy.runs.folder.study import StudyRow, Versus

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """A defense at one strength: utility, leakage and its 95 % interval."""

    x: float
    y: float
    y_range: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class FamilyCurve:
    """Points of one family and attacker, by strength.

    Attributes:
        series: number of the family's color; ``None`` for the undefended point.
        adaptive: ``True`` for dashed lines with open marks.
    """

    points: Sequence[CurvePoint]
    series: int | None
    adaptive: bool


def render_trade_off(rows: Sequence[StudyRow], out: Path, *, psnr_below: float | None) -> str:
    """Render the HTML of ``rows``, with links relative to the file ``out``."""
    asked, candidates = _asked_and_candidates(rows)
    best = best_unread(candidates, psnr_below)
    versus = list(dict.fromkeys(v for row in rows for v in row.leakage))
    attacks = list(dict.fromkeys(v.attack for v in versus))
    chosen = next((row for row in rows if best and row.name == best.name), None)
    return render(
        "trade_off.html.j2",
        rows=rows,
        best=chosen,
        few=bool(best and best.rests_on_few),
        headline=_headline(candidates, best, psnr_below),
        compared=COMPARED.get(
            main_of([reading for row in rows for reading in row.all_readings]), COMPARED[IMAGE_METRIC]
        ),
        answer=answer(candidates, psnr_below),
        uploads=said_together((c.title, uploads_of(run)) for row in rows for c, run in row.attacks.items()),
        batch_norm=batch_norm_in_words(run.summary for row in rows for run in row.attacks.values()),
        versus=versus,
        figures=figures_of(*rows),
        series=_series(rows),
        charts={attack: _charts(rows, attack, chosen) for attack in attacks},
        inferred_charts=inferred_charts(rows, chosen),
        inferred=[about for about in AXES if about in asked],
        strongest=strongest,
        axes=AXES,
        has_adaptive=any(v.attacker is Attacker.ADAPTIVE for v in versus),
        ppc=ppc_view_of(samples_of_rows(rows)),
        missing=[row.name for row in rows if not row.complete],
        links={row.entry.training: link_to(row.entry.training, out) for row in rows},
        attack_links=[{c.title: link_to(path, out) for c, path in row.entry.attacks.items()} for row in rows],
    )


def trade_off_sentences(rows: Sequence[StudyRow], *, psnr_below: float | None) -> str:
    """Recommend a defense by ``rows``, with the evidence."""
    _, candidates = _asked_and_candidates(rows)
    headline = _headline(candidates, best_unread(candidates, psnr_below), psnr_below)
    return f"{headline}. {answer(candidates, psnr_below)}".strip()


def _asked_and_candidates(rows: Sequence[StudyRow]) -> tuple[Any, list[Candidate]]:
    asked = asked_of([finding for row in rows for finding in row.findings])
    whole = [row for row in rows if row.complete]
    return asked, [candidate for row in whole if (candidate := row.candidate(asked=asked))]


def _headline(candidates: Sequence[Candidate], best: Candidate | None, psnr_below: float | None) -> str:
    if not candidates:
        return "Nothing was both trained and attacked yet"
    if best is not None:
        few = ", which rests on few uploads" if best.rests_on_few else ""
        said = f"Behind {best.name}, the most accurate of its kind, the attacks reconstructed nothing"
        return f"{said}: {read_of(best)}{few}"
    if (plain := unread_undefended(candidates)) is not None:
        return f"The attacks reconstructed nothing undefended either: {read_of(plain)}"
    defended = [candidate for candidate in candidates if not candidate.undefended]
    if defended and all(candidate.read for candidate in defended):
        tried = "the one defense that was" if len(defended) == 1 else f"each of the {len(defended)} defenses that were"
        return f"Clients' {kind_in_words(candidates[0])}s were reconstructed behind {tried} tried"
    return f"No defense has {goal_in_words(candidates, psnr_below)}"


def _series(rows: Sequence[StudyRow]) -> dict[str, int]:
    families = dict.fromkeys(row.entry.family for row in rows if not row.entry.undefended)
    return {family: number for number, family in enumerate(families)}


def _charts(rows: Sequence[StudyRow], attack: str, best: StudyRow | None) -> dict[str, Markup]:
    shown = [name for names in COMPARED.values() for name in names]
    return {METRICS[name].title: chart for name in shown if (chart := _chart(rows, attack, name, best)) is not None}


def inferred_charts(rows: Sequence[StudyRow], best: StudyRow | None) -> dict[str, Markup]:
    """Draw a chart of each attack on membership or an attribute, with a line for guessing."""
    use_pmm, series = all(row.pmm is not None for row in rows if row.accuracy is not None), _series(rows)
    charts = {}
    for about, axis in AXES.items():
        points: dict[str, list[CurvePoint]] = {}
        ring, chances, told = None, [], []
        for row in rows:
            found, utility = strongest(row.findings, about), _utility(row, use_pmm=use_pmm)
            if found is None or utility is None:
                continue
            measure = found[1]
            point = CurvePoint(x=utility, y=100 * measure.value, y_range=(100 * measure.low, 100 * measure.high))
            points.setdefault(row.entry.family, []).append(point)
            chances.append(100 * measure.chance)
            told.append(f"{row.name} {percent(measure.value)} by {found[0].title}")
            ring = (point.x, point.y) if row is best else ring
        if points:
            charts[axis] = trade_off_chart(
                [FamilyCurve(points=p, series=series.get(family), adaptive=False) for family, p in points.items()],
                x=_utility_axis(use_pmm=use_pmm),
                y=f"{axis.rpartition(', ')[2]}, percent (high leaks)",
                alt=f"{axis} over utility: " + "; ".join(told),
                bound=max(chances),
                bound_label="by guessing",
                ring=ring,
            )
    return charts


def _chart(rows: Sequence[StudyRow], attack: str, name: str, best: StudyRow | None) -> Markup | None:
    use_pmm = all(row.pmm is not None for row in rows if row.accuracy is not None)
    curves = []
    for attacker in Attacker:
        versus = Versus(attack, attacker)
        points: dict[str, list[CurvePoint]] = {}
        for row in rows:
            if (point := _point(row, versus, name, use_pmm=use_pmm)) is not None:
                points.setdefault(row.entry.family, []).append(point)
        series = _series(rows)
        curves += [
            FamilyCurve(points=of_family, series=series.get(family), adaptive=attacker is Attacker.ADAPTIVE)
            for family, of_family in points.items()
        ]
    if not curves:
        return None
    shown = METRICS[name]
    ringed = best and max(
        (p for v in best.leakage if v.attack == attack and (p := _point(best, v, name, use_pmm=use_pmm))),
        key=lambda p: p.y if shown.leaks == "high" else -p.y,
        default=None,
    )
    return trade_off_chart(
        curves,
        x=_utility_axis(use_pmm=use_pmm),
        y=shown.axis,
        alt=f"{shown.title} under {attack} over utility: " + _in_words(rows, attack, name),
        bound=shown.bound,
        bound_label=papers_bound(name),
        ring=(ringed.x, ringed.y) if ringed else None,
    )


def _point(row: StudyRow, versus: Versus, name: str, *, use_pmm: bool) -> CurvePoint | None:
    statistic, utility = row.statistic(versus, name), _utility(row, use_pmm=use_pmm)
    if statistic is None or utility is None:
        return None
    return CurvePoint(x=utility, y=statistic.mean, y_range=statistic.ci95)


def _utility(row: StudyRow, *, use_pmm: bool) -> float | None:
    return row.pmm if use_pmm else None if row.accuracy is None else 100 * row.accuracy


def _utility_axis(*, use_pmm: bool) -> str:
    return "Accuracy kept, percent of the undefended" if use_pmm else "Test accuracy, percent"


def _in_words(rows: Sequence[StudyRow], attack: str, name: str) -> str:
    shown = []
    for row in rows:
        found = [reading for reading in row.all_readings if reading.attack == attack]
        worst = worst_by(name, found)
        statistic = worst and worst.statistic(name)
        if worst and statistic:
            by = worst.among(found)
            shown.append(f"{row.name} {metric(statistic.mean, name)}{f' ({by})' if by else ''}")
    return "; ".join(shown)


def trade_off_chart(
    curves: Sequence[FamilyCurve],
    *,
    x: str,
    y: str,
    alt: str,
    bound: float | None,
    bound_label: str,
    ring: tuple[float, float] | None,
) -> Markup:
    """Draw curves with error bars; infinite values are labelled above all others."""

    top = top_of([p.y for curve in curves for p in curve.points], bound)

    def draw(axes: Axes) -> None:
        for curve in curves:
            color = INK if curve.series is None else SERIES[curve.series % len(SERIES)]
            # half-lengths (2, n) of the error bars, zero without one
            ends = [reach(p.y, p.y_range) or [[0.0], [0.0]] for p in curve.points]
            axes.errorbar(
                [p.x for p in curve.points],
                [min(p.y, top) for p in curve.points],
                yerr=[[low[0] for low, _ in ends], [high[0] for _, high in ends]],
                fmt="*" if curve.series is None else "--o" if curve.adaptive else "-o",
                markersize=10 if curve.series is None else 4.5,
                markerfacecolor="none" if curve.adaptive else color,
                color=color,
                linewidth=1.4,
                elinewidth=0.8,
                capsize=1.5,
                zorder=4 if curve.series is None else 3,
            )
            for point in curve.points:
                if math.isinf(point.y):
                    axes.annotate(EXACT, (point.x, top), xytext=(6, 5), textcoords="offset points", fontsize=9)
        if ring is not None:
            circle: dict[str, Any] = {"markersize": 13, "markerfacecolor": "none", "markeredgecolor": INK}
            axes.plot(ring[0], min(ring[1], top), "o", markeredgewidth=1.3, **circle)
        axes.margins(0.06)
        if bound is not None:
            draw_bound(axes, bound, bound_label)
        widen(axes)
        axes.set(xlabel=x, ylabel=y)

    return draw_svg(draw, alt)


def row_as_plain(row: StudyRow) -> dict[str, Any]:
    """Return the row as plain values for ``trade_off.json``, independent of the clock."""
    return {
        "family": row.entry.family,
        "strength": row.entry.strength,
        "accuracy": row.accuracy,
        "pmm": row.pmm,
        "update_distortion": {name: asdict(statistic) for name, statistic in row.update_distortion.items()},
        "bytes_per_upload": row.upload["upload_bytes"].mean if row.training else None,
        "inferred": [finding.as_record() | {"seconds": None, "fpr": [], "tpr": []} for finding in row.findings],
        "leakage": [
            {"attack": v.attack, "attacker": v.attacker}
            | {name: asdict(of)[name] for name in ("images", "failures", "metrics", "thresholds")}
            | {"counts": of.counts.as_plain()}
            for v, of in row.leakage.items()
        ],
    }


def _figures(leakage: LeakageResult) -> dict[str, Any]:
    content = asdict(leakage)
    return {name: content[name] for name in ("images", "failures", "metrics", "thresholds")} | {
        "counts": leakage.counts.as_plain()
    }
