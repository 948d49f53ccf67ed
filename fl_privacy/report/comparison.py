"""Render the page that compares many runs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from string import ascii_uppercase

from markupsafe import Markup

from fl_privacy.measure import METRICS, Statistic, aggregate, pmm
from fl_privacy.report.advice import answer
from fl_privacy.report.charts import ChartPoint, Curve, line_chart, scatter_chart
from fl_privacy.report.headline import read_in_words
from fl_privacy.report.inferred import AXES
from fl_privacy.report.page import link_to, render
from fl_privacy.report.ppc import PpcView
from fl_privacy.report.run_page import said_together, uploads_of
from fl_privacy.report.settings import batch_norm_in_words, differences, figures_of, names
from fl_privacy.report.words import metric, papers_bound, percent
from fl_privacy.runs.folder import Attacker, Candidate, LeakageResult, Recognized, Run, Summary, Verdict, verdict_of
from fl_privacy.runs.folder.defense_choice import asked_of, candidate_of, strongest
from fl_privacy.runs.folder.identity import attacked_hash
from fl_privacy.runs.folder.leakage import COMPARED, Extent, extent_of, main_of, most_exposed, worst_by
from fl_privacy.runs.folder.verdict import BOUNDED, LEAK


@dataclass(frozen=True, kw_only=True, eq=False)
class RunRow:
    """One run in the comparison's table; ``pmm``: accuracy in percent of the undefended run's, if known."""

    letter: str
    run: Run
    name: str
    differences: list[str]
    readings: Sequence[LeakageResult]
    pmm: float | None
    link: str | None

    @property
    def summary(self) -> Summary:
        return self.run.summary

    @property
    def epsilon(self) -> float | None:
        return self.run.summary.privacy.epsilon if self.run.summary.privacy else None

    @cached_property
    def verdict(self) -> Verdict:
        return verdict_of(self.run)

    @property
    def most(self) -> LeakageResult | None:
        return self.verdict.most

    @property
    def extent(self) -> Extent:
        return extent_of(self.readings, inferred=len(self.verdict.inferred))

    @property
    def exposed(self) -> Recognized | None:
        exposed = most_exposed(self.readings)
        return exposed if exposed and self.most and exposed.recognizable > self.most.counts.read else None

    def worst(self, name: str) -> LeakageResult | None:
        return worst_by(name, self.readings)

    def mean(self, name: str) -> float | None:
        worst = self.worst(name)
        statistic = worst and worst.statistic(name)
        return statistic.mean if statistic else None


def pmm_of(run: Run, runs: Sequence[Run]) -> float | None:
    """Return a run's accuracy in percent of the accuracy without a defense; ``None`` if the latter is unknown."""
    summary = run.summary
    if summary.pmm is not None or summary.final_accuracy is None or run.identity.undefended:
        return summary.pmm
    plain = (r for r in runs if r.finished and r.identity.undefended and r.identity.training == run.identity.training)
    accuracy = next((found for other in plain if (found := other.summary.final_accuracy)), None)
    return pmm(summary.final_accuracy, accuracy) if accuracy else None


def render_comparison(runs: Sequence[Run], out: Path, *, psnr_below: float | None, ppc: PpcView | None = None) -> str:
    """Return the HTML that compares ``runs`` and recommends a defense; ``psnr_below``: see :func:`write_report`."""
    own, shared = names(runs)
    letters = [ascii_uppercase[k % 26] + (str(k // 26) if k >= 26 else "") for k in range(len(runs))]
    rows = [
        RunRow(
            letter=letter,
            run=run,
            name=name,
            differences=difference,
            readings=run.summary.attacked,
            pmm=pmm_of(run, runs),
            link=link_to(run.path, out),
        )
        for run, letter, name, difference in zip(runs, letters, own, differences(runs), strict=True)
    ]
    shown = [name for name in METRICS if any(row.worst(name) for row in rows)]
    compared = [name for names_of_kind in COMPARED.values() for name in names_of_kind]
    return render(
        "comparison.html.j2",
        rows=rows,
        main_metrics=[name for name in shown if name in compared],
        other_metrics=[name for name in shown if name not in compared],
        uploads=said_together((row.letter, uploads_of(row.run)) for row in rows),
        lede=_lede(rows, psnr_below),
        headline=_headline(rows),
        batch_norm=batch_norm_in_words(run.summary for run in runs),
        shared=shared,
        figures=figures_of(*(run.summary for run in runs)),
        charts=_charts(rows),
        ppc=ppc,
        unfinished=[row.letter for row in rows if not row.run.finished],
        has_epsilon=any(row.epsilon is not None for row in rows),
        has_counts=any(row.readings for row in rows),
        inferred=[about for about in AXES if any(strongest(row.summary.inferred, about) for row in rows)],
        strongest=strongest,
        axes=AXES,
        has_adaptive=any(reading.attacker is Attacker.ADAPTIVE for row in rows for reading in row.readings),
        has_rounds=any(len({reading.round for reading in row.readings}) > 1 for row in rows),
        unaware=[
            row.letter
            for row in rows
            if {r.attacker for r in row.readings} == {Attacker.PLAIN} and not row.run.identity.undefended
        ],
    )


def _charts(rows: Sequence[RunRow]) -> dict[str, Markup]:
    charts = {}
    tested = [row for row in rows if row.summary.tested]
    if tested:
        curves = [
            Curve(x=[r.round for r in row.summary.tested], y=[r.accuracy for r in row.summary.tested], label=row.letter)
            for row in tested
        ]
        ends = ", ".join(f"{row.letter} ends at {percent(row.summary.final_accuracy)}" for row in tested)
        alt = f"Test accuracy over rounds: {ends}"
        charts["Test accuracy"] = line_chart(curves, x="Round", y="Test accuracy", percent=True, alt=alt)
    use_pmm = bool(tested) and all(row.pmm is not None or row.run.identity.undefended for row in tested)
    x_axis = "Accuracy kept, percent" if use_pmm else "Test accuracy, percent"
    for name in (name for names_of_kind in COMPARED.values() for name in names_of_kind):
        if points := _points(tested, name, use_pmm=use_pmm):
            shown, label = METRICS[name], papers_bound(name)
            alt = ", ".join(f"{p.label} at {p.x:.1f} %, {metric(p.y, name)}" for p in points)
            alt = f"{shown.title} against accuracy: {alt}"
            chart = scatter_chart(points, x=x_axis, y=shown.axis, bound=shown.bound, bound_label=label, alt=alt)
            charts[f"{shown.title} and accuracy"] = chart
    for about, axis in AXES.items():
        drawn = []
        for row in tested:
            if found := strongest(row.summary.inferred, about):
                measure, x = found[1], _utility(row, use_pmm=use_pmm)
                interval = 100 * measure.low, 100 * measure.high
                drawn.append(ChartPoint(x=x, y=100 * measure.value, label=row.letter, y_range=interval))
        if drawn:
            alt = f"{axis} against accuracy: " + ", ".join(f"{p.label} at {p.x:.1f} %, {p.y:.1f} %" for p in drawn)
            y = f"{axis.rpartition(', ')[2]}, percent (high leaks)"
            charts[f"{axis} and accuracy"] = scatter_chart(drawn, x=x_axis, y=y, alt=alt)
    return charts


def _points(rows: Sequence[RunRow], name: str, *, use_pmm: bool) -> list[ChartPoint]:
    groups: dict[str, list[tuple[RunRow, Statistic]]] = {}
    for row in rows:
        worst = row.worst(name)
        if worst is not None and (statistic := worst.statistic(name)) is not None:
            groups.setdefault(row.run.identity.repeat, []).append((row, statistic))
    points, within = [], METRICS[name].range
    for group in groups.values():
        most = float("inf") if use_pmm else 100.0
        x = aggregate([_utility(row, use_pmm=use_pmm) for row, _ in group], within=(0.0, most))
        y = aggregate([statistic.mean for _, statistic in group], within=within)
        if x is not None and y is not None:
            label, interval = ", ".join(row.letter for row, _ in group), y.ci95 if len(group) > 1 else group[0][1].ci95
            points.append(ChartPoint(x=x.mean, y=y.mean, label=label, x_range=x.ci95, y_range=interval))
    return points


def _utility(row: RunRow, *, use_pmm: bool) -> float:
    kept = 100.0 if row.pmm is None else row.pmm
    return kept if use_pmm else 100 * (row.summary.final_accuracy or 0.0)


def _headline(rows: Sequence[RunRow]) -> str:
    tones = Counter(row.verdict.tone for row in rows if row.readings or row.verdict.inferred)
    if not tones:
        return f"{len(rows)} runs, none of them attacked"
    number = tones.total()
    if (left := number - tones[LEAK] - tones[BOUNDED]) == number:
        return f"The attacks tried reconstructed nothing in {number} attacked runs"
    said = [f"Clients' data were reconstructed in {tones[LEAK]} of {number} attacked runs"]
    said += [f"a guarantee bounds reconstruction in {tones[BOUNDED]}"] * bool(tones[BOUNDED])
    said += [f"in {left} the attacks tried reconstructed nothing"] * bool(left)
    return "; ".join(said)


def _lede(rows: Sequence[RunRow], psnr_below: float | None) -> str:
    main = main_of([reading for row in rows for reading in row.readings])
    attacked = [(row, mean) for row in rows if (mean := row.mean(main)) is not None]
    trained = [row for row in rows if row.summary.final_accuracy is not None]
    sentences = []
    if attacked:
        least, mean = min(attacked, key=lambda pair: pair[0].extent)
        worst, most = least.worst(main), least.most
        by = worst.among(least.readings) if worst else ""
        failed = max(reading.counts.failures for reading in least.readings)
        figures = [f"{read_in_words(most.counts)} reconstructed" if most else "reconstructions unknown"]
        figures += [f"mean {METRICS[main].name_within} {metric(mean, main)}", *([by] if by else [])]
        figures += [f"the attack failed on {failed}"] if failed else []
        sentences.append(f"{least.letter} leaks least ({', '.join(figures)}).")
    if trained:
        best = max(trained, key=lambda row: row.summary.final_accuracy or 0.0)
        sentences.append(f"The most accurate is {best.letter} ({percent(best.summary.final_accuracy)}).")
    return " ".join([*sentences, answer(_candidates(rows), psnr_below)]).strip()


def _candidates(rows: Sequence[RunRow]) -> list[Candidate]:
    groups: dict[str, list[RunRow]] = {}
    asked = asked_of([finding for row in rows for finding in row.summary.inferred])
    for row in rows:
        groups.setdefault(attacked_hash(row.run.identity.config), []).append(row)
    found = []
    for group in groups.values():
        several = len(group) > 1
        first = next((row for row in group if row.summary.final_accuracy is not None), group[0])
        candidate = candidate_of(
            [replace(r, attack=row.letter if several else "") for row in group for r in row.readings],
            name=f"{', '.join(row.letter for row in group)}, {first.name}",
            accuracy=first.summary.final_accuracy,
            pmm=first.pmm,
            findings=[finding for row in group for finding in row.summary.inferred],
            asked=asked,
            undefended=first.run.identity.undefended,
        )
        found += [candidate] if candidate else []
    return found
