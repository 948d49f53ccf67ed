"""Write pages of run folders, and copies to share."""

from __future__ import annotations

import math
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fl_privacy.errors import UserError
from fl_privacy.files import make_private_folder, write_private, write_whole
from fl_privacy.files.foreign import expect_file_name
from fl_privacy.measure import METRICS
from fl_privacy.measure.registry import IMAGE_METRIC
from fl_privacy.report import ppc
from fl_privacy.report.advice import answer, goal_in_words, kind_in_words, read_of, withheld
from fl_privacy.report.charts import EXACT, INK, SERIES, ChartPoint, draw_bound, draw_svg, reach, top_of, widen
from fl_privacy.report.comparison import render_comparison
from fl_privacy.report.gallery import caption, grid_picture, rank_by
from fl_privacy.report.inferred import AXES
from fl_privacy.report.page import link_to, render, writable
from fl_privacy.report.ppc import Sample, ppc_view_of, samples_of_rows, samples_of_runs
from fl_privacy.report.run_page import ShownVictims, render_run, said_together, uploads_of
from fl_privacy.report.settings import batch_norm_in_words, figures_of
from fl_privacy.report.words import metric, papers_bound, percent
from fl_privacy.runs.folder import Attacker, Candidate, Run, read_run
from fl_privacy.runs.folder.defense_choice import asked_of, best_unread, strongest, unread_undefended
from fl_privacy.runs.folder.leakage import COMPARED, main_of, worst_by
from fl_privacy.runs.folder.read import copy_run
from fl_privacy.runs.folder.records import dump_json
from fl_privacy.runs.folder.study import StudyEntry, StudyRow, Versus, read_study

PICTURED = 16  # pairs in ``pictures/reconstructions.png``, evenly spread from best to worst


def write_report(
    run_dirs: Sequence[Path], out: Path | None = None, *, psnr_below: float | None = None, cap: bool = False
) -> Path:
    """Write and return one HTML page on one or many runs; a page with images is readable only by its owner.

    A single run gets ``<run>/report.html`` and ``<run>/pictures/reconstructions.png``, several get ``comparison.html``
    next to the first one. ``UserError`` without runs, if ``out`` is not writable, or if no run can be used for ``cap``.

    Args:
        out: other path of the page; its folder is created.
        psnr_below: PSNR in dB that no image reconstructed under a recommended defense may reach.
        cap: ``True`` adds curves of accuracy and leakage against a defense's strength (Fan et al. 2020), and saves
            their means in ``<page>_cap.json``; it needs runs that defended, trained and were attacked.
    """
    if not run_dirs:
        raise UserError("The folders of one or more runs are expected, but got none; name what `fl-privacy run` wrote.")
    if out is not None:
        expect_file_name(out)
    runs = [read_run(Path(path)) for path in dict.fromkeys(Path(p).resolve() for p in run_dirs)]
    single = runs[0] if len(runs) == 1 and not cap else None
    samples = samples_of_runs(runs) if cap else []
    if cap and not samples:
        raise UserError(
            "CAP is expected to be of runs that defended, trained and were attacked, but none of these did all three;"
            " name runs with defense=... and attack=... that `fl-privacy run` wrote."
        )
    page = out or (single.path / "report.html" if single else runs[0].path.parent / "comparison.html")
    with writable(page):
        if single:
            write = write_whole if single.shared == "figures" else write_private
            _write_picture(single)
            write(page, page_of_run(single))
        else:
            write_whole(page, render_comparison(runs, page, psnr_below=psnr_below, ppc=ppc_view_of(samples)))
        _write_caps(page, samples)
    return page


def write_trade_off(entries: Sequence[StudyEntry], page: Path, *, psnr_below: float | None = None) -> Path:
    """Write and return a page that compares a sweep's defenses; next to it, save its figures as JSON."""
    rows = read_study(entries)
    with writable(page, "another place with out=FOLDER"):
        write_whole(page, render_trade_off(rows, page, psnr_below=psnr_below))
        write_whole(page.with_suffix(".json"), dump_json([row_as_plain(row) for row in rows], indent=1))
        _write_caps(page, samples_of_rows(rows))
    return page


def trade_off_in_words(entries: Sequence[StudyEntry], *, psnr_below: float | None = None) -> str:
    """Recommend one of a sweep's defenses; ``psnr_below``: PSNR in dB that reconstructions under it must not reach."""
    _, candidates = _asked_and_candidates(read_study(entries))
    headline = _headline(candidates, best_unread(candidates, psnr_below), psnr_below)
    return f"{headline}. {answer(candidates, psnr_below)}".strip()


def _write_caps(page: Path, samples: Sequence[Sample]) -> None:
    if samples:
        found = [
            {"mechanism": c.mechanism, "distance": c.distance, **vars(c.versus), "cap": c.value, "points": c.points}
            for c in ppc.caps(samples)
        ]
        write_whole(page.with_name(f"{page.stem}_cap.json"), dump_json(found, indent=1))


def page_of_run(run: Run, *, live: bool = False) -> str:
    """Render the HTML of a single run without writing it; a ``live`` page refreshes itself."""
    problems = [] if live and not run.finished else run.problems  # an incomplete last line is no damage
    return render_run(run, ShownVictims.of(run), problems=problems, live=live)


def _write_picture(run: Run) -> None:
    pairs, _ = run.read_pairs() if run.shared != "figures" else ({}, [])
    ranked = [v for v in rank_by(run, IMAGE_METRIC) if (v["id"], v["image"]) in pairs]
    if len(ranked) > PICTURED:
        ranked = [ranked[k * (len(ranked) - 1) // (PICTURED - 1)] for k in range(PICTURED)]
    if not ranked:
        return
    shown = [pairs[v["id"], v["image"]] for v in ranked]
    grid_picture(
        [pair.original for pair in shown],
        [pair.guess for pair in shown],
        [caption(v) for v in ranked],
        run.path / "pictures" / "reconstructions.png",
        adaptive=[pair.adaptive for pair in shown] if run.summary.adaptive else None,
        transformed=[pair.transformed for pair in shown] if any(p.transformed is not None for p in shown) else None,
    )


def share_report(
    run_dirs: Sequence[Path],
    destination: Path,
    *,
    with_originals: bool = False,
    psnr_below: float | None = None,
    cap: bool = False,
) -> Path:
    """Copy runs into the new folder ``destination``, each with its page, and return the main page.

    ``with_originals`` includes images, readable only by the owner. ``psnr_below`` limits the recommended defenses, and
    ``cap`` adds curves, as in :func:`write_report`. ``UserError`` if a folder is not a run's, or ``destination`` is a
    file, is not empty, or is not writable.
    """
    sources = list(dict.fromkeys(Path(path).resolve() for path in run_dirs))
    for source in sources:
        read_run(source)
    destination = destination.absolute()
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise UserError(f"--share is expected to be a new folder, but {destination} exists; choose another one.")
    part = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.part")
    with writable(destination, "another folder"), ExitStack() as at_end:
        at_end.callback(shutil.rmtree, part, ignore_errors=True)
        if with_originals:
            make_private_folder(part, part)
        copies: list[Path] = []
        for source in sources:
            names = (source.name, *(f"{source.name}-{number + 2}" for number in range(len(copies))))
            copies.append(next(part / name for name in names if part / name not in copies))
            copy_run(source, copies[-1], with_originals=with_originals)
        page, *_ = [write_report([copy]) for copy in copies]
        if len(copies) > 1 or cap:
            page = write_report(copies, part / "comparison.html", psnr_below=psnr_below, cap=cap)
        part.rename(destination)
    return destination / page.relative_to(part)


if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True)
class FamilyCurve:
    """One attacker's results over a defense's strengths; ``series``: color index, ``None`` for undefended trainings."""

    points: Sequence[ChartPoint]
    series: int | None
    adaptive: bool


def render_trade_off(rows: Sequence[StudyRow], out: Path, *, psnr_below: float | None) -> str:
    """Render the HTML of a sweep's ``rows``; links are relative to ``out``; ``psnr_below``: see ``write_report``."""
    asked, candidates = _asked_and_candidates(rows)
    best = best_unread(candidates, psnr_below)
    versus = list(dict.fromkeys(v for row in rows for v in row.leakage))
    chosen = next((row for row in rows if best and row.name == best.name), None)
    shown = [name for names in COMPARED.values() for name in names]
    return render(
        "trade_off.html.j2",
        rows=rows,
        best=chosen,
        few=bool(best and best.rests_on_few),
        headline=_headline(candidates, best, psnr_below),
        compared=COMPARED.get(main_of([r for row in rows for r in row.all_readings]), COMPARED[IMAGE_METRIC]),
        answer=answer(candidates, psnr_below),
        uploads=said_together((c.title, uploads_of(run)) for row in rows for c, run in row.attacks.items()),
        batch_norm=batch_norm_in_words(run.summary for row in rows for run in row.attacks.values()),
        versus=versus,
        figures=figures_of(*rows),
        series=_series(rows),
        charts={
            attack: {METRICS[name].title: chart for name in shown if (chart := _chart(rows, attack, name, chosen))}
            for attack in dict.fromkeys(v.attack for v in versus)
        },
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


def _asked_and_candidates(rows: Sequence[StudyRow]) -> tuple[Any, list[Candidate]]:
    asked = asked_of([finding for row in rows for finding in row.findings])
    whole = [row for row in rows if row.complete]
    return asked, [candidate for row in whole if (candidate := row.candidate(asked=asked))]


def _headline(candidates: Sequence[Candidate], best: Candidate | None, psnr_below: float | None) -> str:
    if not candidates:
        return "Nothing was both trained and attacked yet"
    if best is not None:
        kind = kind_in_words(best)
        none = f"none of {best.images} {kind}s was" if best.images > 1 else f"the one {kind} was not"
        left = "the attack may have failed" if withheld(best) else f"up to {100 * best.at_most:.0f} % may leak"
        return f"With {best.name}, {none} reconstructed; {left}"
    if (plain := unread_undefended(candidates)) is not None:
        return f"The attacks reconstructed nothing undefended either: {read_of(plain)}"
    defended = [candidate for candidate in candidates if not candidate.undefended]
    if defended and all(candidate.read for candidate in defended):
        tried = "the one defense that was" if len(defended) == 1 else f"each of the {len(defended)} defenses that were"
        return f"Clients' {kind_in_words(candidates[0])}s were reconstructed with {tried} tried"
    return f"No defense meets the goal: {goal_in_words(candidates, psnr_below)}"


def _series(rows: Sequence[StudyRow]) -> dict[str, int]:
    families = dict.fromkeys(row.entry.family for row in rows if not row.entry.undefended)
    return {family: number for number, family in enumerate(families)}


def inferred_charts(rows: Sequence[StudyRow], best: StudyRow | None) -> dict[str, Markup]:
    """Return axis title -> chart, one for membership and one for attribute inference, as far as they were attacked.

    A point is one defense setting: accuracy, and success of the best attack on it. A line shows what guessing reaches,
    and a ring marks ``best``.
    """
    (utility_of, x), series, charts = _utility(rows), _series(rows), {}
    for about, axis in AXES.items():
        points: dict[str, list[ChartPoint]] = {}
        ring, chances, sentences = None, [], []
        for row in rows:
            found, utility = strongest(row.findings, about), utility_of(row)
            if found is None or utility is None:
                continue
            method, measure = found
            point = ChartPoint(x=utility, y=100 * measure.value, y_range=(100 * measure.low, 100 * measure.high))
            points.setdefault(row.entry.family, []).append(point)
            chances.append(100 * measure.chance)
            sentences.append(f"{row.name} {percent(measure.value)} by {method.title}")
            ring = (point.x, point.y) if row is best else ring
        if points:
            charts[axis] = trade_off_chart(
                [FamilyCurve(points=p, series=series.get(family), adaptive=False) for family, p in points.items()],
                x=x,
                y=f"{axis.rpartition(', ')[2]}, percent (high leaks)",
                alt=f"{axis} over utility: " + "; ".join(sentences),
                bound=max(chances),
                bound_label="by guessing",
                ring=ring,
            )
    return charts


def _chart(rows: Sequence[StudyRow], attack: str, name: str, best: StudyRow | None) -> Markup | None:
    (utility_of, x), series, curves = _utility(rows), _series(rows), []
    for attacker in Attacker:
        points: dict[str, list[ChartPoint]] = {}
        for row in rows:
            if (point := _point(row, Versus(attack, attacker), name, utility_of)) is not None:
                points.setdefault(row.entry.family, []).append(point)
        adaptive = attacker is Attacker.ADAPTIVE
        curves += [FamilyCurve(points=p, series=series.get(f), adaptive=adaptive) for f, p in points.items()]
    if not curves:
        return None
    shown = METRICS[name]
    ringed = best and max(
        (p for v in best.leakage if v.attack == attack and (p := _point(best, v, name, utility_of))),
        key=lambda p: p.y if shown.leaks == "high" else -p.y,
        default=None,
    )
    return trade_off_chart(
        curves,
        x=x,
        y=shown.axis,
        alt=f"{shown.title} under {attack} over utility: " + _in_words(rows, attack, name),
        bound=shown.bound,
        bound_label=papers_bound(name),
        ring=(ringed.x, ringed.y) if ringed else None,
    )


Utility = Callable[[StudyRow], float | None]


def _point(row: StudyRow, versus: Versus, name: str, utility_of: Utility) -> ChartPoint | None:
    statistic, utility = row.statistic(versus, name), utility_of(row)
    if statistic is None or utility is None:
        return None
    return ChartPoint(x=utility, y=statistic.mean, y_range=statistic.ci95)


def _utility(rows: Sequence[StudyRow]) -> tuple[Utility, str]:
    if all(row.pmm is not None for row in rows if row.accuracy is not None):
        return (lambda row: row.pmm), "Accuracy kept, percent of the undefended"
    return (lambda row: None if row.accuracy is None else 100 * row.accuracy), "Test accuracy, percent"


def _in_words(rows: Sequence[StudyRow], attack: str, name: str) -> str:
    shown = []
    for row in rows:
        found = [reading for reading in row.all_readings if reading.attack == attack]
        if (worst := worst_by(name, found)) and (statistic := worst.statistic(name)):
            by = f" ({worst.among(found)})" if worst.among(found) else ""
            shown.append(f"{row.name} {metric(statistic.mean, name)}{by}")
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
    """Draw curves with error bars, a line at ``bound``, and a circle at ``ring``; infinite values are on top."""
    top = top_of([p.y for curve in curves for p in curve.points], bound)

    def draw(axes: Axes) -> None:
        for curve in curves:
            color = INK if curve.series is None else SERIES[curve.series % len(SERIES)]
            # half-lengths (2, n) of the error bars, zero without one
            ends = [reach(p.y, p.y_range) or [[0.0], [0.0]] for p in curve.points]
            bars = [[low[0] for low, _ in ends], [high[0] for _, high in ends]]
            mark, size, order = ("*", 10.0, 4) if curve.series is None else ("--o" if curve.adaptive else "-o", 4.5, 3)
            style: dict[str, Any] = {"color": color, "linewidth": 1.4, "elinewidth": 0.8, "capsize": 1.5}
            style |= {"markersize": size, "markerfacecolor": "none" if curve.adaptive else color, "zorder": order}
            axes.errorbar([p.x for p in curve.points], [min(p.y, top) for p in curve.points], bars, fmt=mark, **style)
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
    """Return the row as plain values for ``trade_off.json``, without durations."""
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
