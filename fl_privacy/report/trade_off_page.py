"""The page of a sweep over defenses."""

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from fl_privacy.metrics import METRICS
from fl_privacy.report.cost import figures_of
from fl_privacy.report.numbers import metric
from fl_privacy.report.page import link_to, render
from fl_privacy.report.ppc import samples_of_rows
from fl_privacy.report.ppc_view import ppc_view
from fl_privacy.report.readings import worst_by
from fl_privacy.report.recommendation import answer, best_below
from fl_privacy.report.settings import batch_norm_in_words
from fl_privacy.report.trade_off import SHOWN, Row, Versus
from fl_privacy.report.trade_off_chart import CurvePoint, FamilyCurve, trade_off_chart
from fl_privacy.results import Attacker


def render_trade_off(rows: Sequence[Row], out: Path, *, psnr_below: float) -> str:
    """The HTML over ``rows``, with links relative to the file ``out``."""
    candidates = [candidate for row in rows if (candidate := row.candidate())]
    best = best_below(candidates, psnr_below)
    versus = list(dict.fromkeys(v for row in rows for v in row.leakage))
    attacks = list(dict.fromkeys(v.attack for v in versus))
    chosen = next((row for row in rows if best and row.name == best.name), None)
    return render(
        "trade_off.html.j2",
        rows=rows,
        best=chosen,
        bound=psnr_below,
        answer=answer(candidates, psnr_below),
        batch_norm=batch_norm_in_words(found for row in rows for found in row.attacks.values()),
        versus=versus,
        figures=figures_of(*(row.cost for row in rows)),
        series=_series(rows),
        charts={attack: _charts(rows, attack, chosen) for attack in attacks},
        has_adaptive=any(v.attacker is Attacker.ADAPTIVE for v in versus),
        ppc=ppc_view(samples_of_rows(rows)),
        missing=[row.name for row in rows if not row.complete],
        links={row.outcome.training: link_to(row.outcome.training, out) for row in rows},
        attack_links={path: link_to(path, out) for row in rows for path in row.outcome.attacks.values()},
    )


def _series(rows: Sequence[Row]) -> dict[str, int]:
    """Family -> number of its color."""
    families = dict.fromkeys(row.outcome.family for row in rows if row.outcome.strength)
    return {family: number for number, family in enumerate(families)}


def _charts(rows: Sequence[Row], attack: str, best: Row | None) -> dict[str, Markup]:
    """A chart for each metric of the attack called ``attack``; the choice is ringed in that of PSNR."""
    return {METRICS[name].title: chart for name in SHOWN if (chart := _chart(rows, attack, name, best)) is not None}


def _chart(rows: Sequence[Row], attack: str, name: str, best: Row | None) -> Markup | None:
    use_pmm = all(row.pmm is not None for row in rows if row.accuracy is not None)
    curves = []
    for attacker in Attacker:
        versus = Versus(attack, attacker)
        points: dict[str, list[CurvePoint]] = {}
        for row in rows:
            if (point := _point(row, versus, name, use_pmm=use_pmm)) is not None:
                points.setdefault(row.outcome.family, []).append(point)
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
        x="PMM, percent of the undefended accuracy" if use_pmm else "Test accuracy, percent",
        y=shown.axis,
        alt=f"{shown.title} under {attack} over utility: " + _in_words(rows, attack, name),
        bound=shown.bound,
        bound_label=f"recognizable {shown.recognizable}",
        ring=(ringed.x, ringed.y) if ringed else None,
    )


def _point(row: Row, versus: Versus, name: str, *, use_pmm: bool) -> CurvePoint | None:
    statistic = row.statistic(versus, name)
    utility = row.pmm if use_pmm else None if row.accuracy is None else 100 * row.accuracy
    if statistic is None or utility is None:
        return None
    return CurvePoint(x=utility, y=statistic.mean, y_range=statistic.ci95)


def _in_words(rows: Sequence[Row], attack: str, name: str) -> str:
    """Each row by the attacker that read most."""
    shown = []
    for row in rows:
        found = [reading for reading in row.readings if reading.attack == attack]
        worst = worst_by(name, found)
        statistic = worst and worst.statistic(name)
        if worst and statistic:
            by = worst.among(found)
            shown.append(f"{row.name} {metric(statistic.mean, name)}{f' ({by})' if by else ''}")
    return "; ".join(shown)
