"""The page of many runs."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from markupsafe import Markup

from fl_privacy.metrics import METRICS, THRESHOLDS, aggregate, pmm
from fl_privacy.report.answer import Candidate, answer
from fl_privacy.report.charts import Curve, Point, line_chart, scatter_chart
from fl_privacy.report.cost import figures_of
from fl_privacy.report.numbers import metric, percent
from fl_privacy.report.page import render
from fl_privacy.report.ppc_view import PpcView
from fl_privacy.report.settings import batch_norm_in_words, differences, names
from fl_privacy.results import Run
from fl_privacy.results.identity import attacked_hash

TRADE_OFFS = ("psnr", "ssim", "lpips")


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """A run in the table.

    Attributes:
        letter: stands for it in the charts.
        run: all that it recorded.
        name: the options that tell it from the others.
        differences: ``key=value`` of the settings that the runs don't share.
        bound: how many images are recognizable by PSNR.
        pmm: in percent.
        link: to its own page.
    """

    letter: str
    run: Run
    name: str
    differences: list[str]
    bound: Mapping[str, Any] | None
    pmm: float | None
    link: str | None

    @property
    def summary(self) -> Mapping[str, Any]:
        """Of the run."""
        return self.run.summary

    @property
    def privacy(self) -> Mapping[str, Any]:
        """The part of the summary on the epsilon spent, ``None`` where there is no guarantee."""
        found: Mapping[str, Any] | None = self.run.summary.get("privacy")
        return found or {"epsilon": None}

    @property
    def adaptive(self) -> Mapping[str, Any] | None:
        """The part of the summary on the adaptive attacker; ``None`` if there was none."""
        found: Mapping[str, Any] | None = self.run.summary.get("adaptive")
        return found


def render_comparison(runs: Sequence[Run], out: Path, *, psnr_below: float, ppc: PpcView | None = None) -> str:
    """The HTML that compares ``runs``, with links to their own pages relative to the file ``out``.

    It names the most accurate training whose mean PSNR is below ``psnr_below`` dB, and shows ``ppc`` if given.
    """
    own, shared = names(runs)
    rows = [
        Row(
            letter=letter,
            run=run,
            name=name,
            differences=difference,
            bound=next((t for t in run.summary["thresholds"] if t["metric"] == "psnr"), None),
            pmm=pmm_of(run, runs),
            link=_link(run, out),
        )
        for run, letter, name, difference in zip(runs, _letters(len(runs)), own, differences(runs), strict=True)
    ]
    shown = [name for name in METRICS if any(name in run.summary["metrics"] for run in runs)]
    return render(
        "comparison.html.j2",
        rows=rows,
        main_metrics=[name for name in shown if name in TRADE_OFFS],
        other_metrics=[name for name in shown if name not in TRADE_OFFS],
        lede=_lede(rows, psnr_below),
        batch_norm=batch_norm_in_words(run.summary for run in runs),
        shared=shared,
        figures=figures_of(*(run.summary for run in runs)),
        charts=_charts(rows),
        ppc=ppc,
        unfinished=[row.letter for row in rows if not row.run.finished],
        has_epsilon=any(row.privacy["epsilon"] is not None for row in rows),
        has_bound=any(row.bound for row in rows),
        has_adaptive=any(row.adaptive for row in rows),
    )


def pmm_of(run: Run, runs: Sequence[Run]) -> float | None:
    """PMM of ``run``, if need be against an undefended run among ``runs`` that trained alike."""
    summary = run.summary
    if summary["pmm"] is not None or summary["final_accuracy"] is None or run.identity.undefended:
        return float(summary["pmm"]) if summary["pmm"] is not None else None
    for twin in runs:
        accuracy = twin.summary["final_accuracy"]
        if twin.finished and twin.identity.undefended and twin.identity.training == run.identity.training and accuracy:
            return pmm(summary["final_accuracy"], accuracy)
    return None


def _charts(rows: Sequence[Row]) -> dict[str, Markup]:
    charts = {}
    tested = [row for row in rows if row.summary["rounds"]]
    if tested:
        curves = [
            Curve(
                x=[r["round"] for r in row.summary["rounds"]],
                y=[r["accuracy"] for r in row.summary["rounds"]],
                label=row.letter,
            )
            for row in tested
        ]
        alt = "Test accuracy over rounds: " + ", ".join(
            f"{row.letter} ends at {percent(row.summary['final_accuracy'])}" for row in tested
        )
        charts["Test accuracy"] = line_chart(curves, x="Round", y="Test accuracy", percent=True, alt=alt)
    use_pmm = bool(tested) and all(row.pmm is not None or row.run.identity.undefended for row in tested)
    for name in TRADE_OFFS:
        points = _points(tested, name, use_pmm=use_pmm)
        if not points:
            continue
        title, bound = METRICS[name].title, next(t for t in THRESHOLDS if t.metric == name)
        unit = f", {METRICS[name].unit}" if METRICS[name].unit else ""
        charts[f"{title} beside accuracy"] = scatter_chart(
            points,
            x="PMM, percent" if use_pmm else "Test accuracy, percent",
            y=f"{title}{unit} ({METRICS[name].leaks} leaks)",
            bound=bound.value,
            bound_label=f"recognizable {bound.leaks}",
            alt=f"{title} against accuracy: "
            + ", ".join(f"{p.label} at {p.x:.1f} %, {metric(p.y, name)}" for p in points),
        )
    return charts


def _points(rows: Sequence[Row], name: str, *, use_pmm: bool) -> list[Point]:
    """A point for each run; runs that differ in the seed alone make one, with the intervals over the seeds."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if name in row.summary["metrics"]:
            groups.setdefault(row.run.identity.repeat, []).append(row)
    points = []
    for group in groups.values():
        x = aggregate([_utility(row, use_pmm=use_pmm) for row in group])
        y = aggregate([row.summary["metrics"][name]["mean"] for row in group])
        own = group[0].run.summary["metrics"][name]["ci95"]
        if x is not None and y is not None and y.max < float("inf"):
            points.append(
                Point(
                    x=x.mean,
                    y=y.mean,
                    label=", ".join(row.letter for row in group),
                    x_range=x.ci95,
                    y_range=y.ci95 if len(group) > 1 else tuple(own) if own else None,
                )
            )
    return points


def _utility(row: Row, *, use_pmm: bool) -> float:
    """In percent."""
    if use_pmm:
        return 100.0 if row.pmm is None else row.pmm
    return 100 * row.summary["final_accuracy"]


def _lede(rows: Sequence[Row], psnr_below: float) -> str:
    attacked = [row for row in rows if "psnr" in row.summary["metrics"]]
    trained = [row for row in rows if row.summary["final_accuracy"] is not None]
    sentences = []
    if attacked:
        least = min(attacked, key=lambda row: row.summary["metrics"]["psnr"]["mean"])
        shown = metric(least.summary["metrics"]["psnr"]["mean"], "psnr")
        sentences.append(f"Least leaks from {least.letter} (mean PSNR {shown}).")
    if trained:
        best = max(trained, key=lambda row: row.summary["final_accuracy"])
        shown = percent(best.summary["final_accuracy"])
        sentences.append(f"The most accurate is {best.letter} ({shown}).")
    return " ".join([*sentences, answer(_candidates(rows), psnr_below)]).strip()


def _candidates(rows: Sequence[Row]) -> list[Candidate]:
    """Of runs that differ in the attack alone, the one that leaks most counts."""
    groups: dict[str, list[Candidate]] = {}
    for row in rows:
        attackers = (row.summary, row.adaptive or {"metrics": {}})
        found = [s["metrics"]["psnr"]["mean"] for s in attackers if "psnr" in s["metrics"]]
        accuracy = row.summary["final_accuracy"]
        if found and accuracy is not None:
            candidate = Candidate(name=f"{row.letter}, {row.name}", accuracy=accuracy, pmm=row.pmm, psnr=max(found))
            groups.setdefault(attacked_hash(row.run.identity.config), []).append(candidate)
    return [max(group, key=lambda c: c.psnr) for group in groups.values()]


def _letters(count: int) -> list[str]:
    """A to Z, then A1 to Z1 and so on."""
    return [ascii_uppercase[k % 26] + (str(k // 26) if k >= 26 else "") for k in range(count)]


def _link(run: Run, out: Path) -> str | None:
    page = run.path / "report.html"
    return Path(os.path.relpath(page, out.resolve().parent)).as_posix() if page.is_file() else None
