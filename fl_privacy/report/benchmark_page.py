"""Render a benchmark's leaderboard, and its results as JSON (``benchmark.schema.json``)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fl_privacy.measure import METRICS
from fl_privacy.measure.registry import IMAGE_METRIC, TABLE_METRIC, TEXT_METRIC
from fl_privacy.report.advice import read_of
from fl_privacy.report.charts import SERIES, draw_svg
from fl_privacy.report.page import render
from fl_privacy.report.words import below, metric, title, title_within
from fl_privacy.runs.folder import Candidate, LeakageResult
from fl_privacy.runs.folder.defense_choice import ROUNDING
from fl_privacy.runs.folder.leakage import COMPARED, WORST, Extent, leaks_most, main_of
from fl_privacy.runs.folder.study import THREATS, StudyRow, Threat, threats_of
from fl_privacy.runs.folder.verdict import tone_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fl_privacy.runs.config.study import Track

SCRIPT = "benchmark.js"  # script that sorts and filters; without it the page shows its first board
FARTHEST = 60.0  # largest PSNR in dB in the picture

IN_WORDS: Mapping[Threat, str] = {
    "honest": "Honest but curious",
    "adaptive": "Also those that know the defense",
    "malicious": "Also malicious servers",
}

KINDS = {TABLE_METRIC: "row", TEXT_METRIC: "text"}  # main metric -> attacked examples other than images


def benchmark_in_words(measured: MeasuredBenchmark) -> str:
    """Return sentences on the defense that leaks least, and on jobs that are not finished."""
    board = _chosen(measured)
    open_end = f" Not finished: {measured.jobs_done} of {measured.jobs} jobs are done; the same command resumes."
    said = f"{_headline(measured, board)}.{open_end * (measured.jobs_done < measured.jobs)}"
    return f"{said} {' '.join(_found(measured, board))}".strip()


def _chosen(measured: MeasuredBenchmark) -> Board:
    losses = measured.track.accuracy_loss
    middle = losses[len(losses) // 2]
    return next(b for b in measured.boards if b.threat == measured.threats[-1] and b.accuracy_loss == middle)


def _within(value: float, name: str) -> float:
    return min(value, METRICS[name].range[1])


def render_benchmark(measured: MeasuredBenchmark) -> str:
    """Render the HTML of a benchmark."""
    track, standings, chosen = measured.track, measured.standings, _chosen(measured)
    return render(
        "benchmark.html.j2",
        script=SCRIPT,
        measured=measured,
        headline=_headline(measured, chosen),
        lede=" ".join([*_found(measured, chosen), measured.track.about]),
        missing=[(s.entry.name, why) for s in standings if (why := why_incomplete(s))],
        judged_by=measured.metric,
        kind=KINDS.get(measured.metric, "image"),
        defenses=len({s.entry.family for s in standings}) - 1,
        chosen=chosen,
        rows=[row for board in measured.boards for row in _rows(board, list(track.uploads))],
        threat_words=IN_WORDS,
        picture=_picture(measured, chosen),
        finite=_finite,
        lost=lambda points: f"{round(points, 1) + 0.0:.1f}",  # without a negative zero
    )


def why_incomplete(standing: StudyRow) -> str:
    """Name the missing jobs of a defense and the reasons, if any are missing; ``standing``: its row in the ranking."""
    entry = standing.entry
    folders = [path for name, path in entry.trainings.items() if name not in standing.trainings]
    folders += [entry.attacks[cell] for cell in standing.missing("malicious")]
    if not folders:
        return ""
    reasons = dict.fromkeys(entry.problems[path.name] for path in folders if path.name in entry.problems)
    cells = [cell.title for cell in standing.missing("malicious")]
    where = "; ".join([*(["training"] if len(folders) > len(cells) else []), *cells])
    return f"{where} ({'; '.join(reasons) or 'not finished, or the attack failed on all victims'})"


def _rows(board: Board, uploads: Sequence[str]) -> list[dict[str, Any]]:
    rows, rank = list[dict[str, Any]](), 0
    for order, standing in enumerate([*board.ranked, *board.beyond]):
        ranked, defended = order < len(board.ranked), not standing.entry.undefended
        rank += ranked and defended
        heard, found = standing.heard(board.threat), standing.candidate(board.threat) if ranked else None
        upper, own = "exact", "own entered" if standing.entry.own else ""
        if found is not None and not math.isinf(found.psnr):
            name, known = found.judged_by, math.isfinite(found.upper)
            upper = metric(_within(found.upper, name), name) if known else "unknown"
        rows.append(
            {
                "threat": board.threat,
                "loss": board.accuracy_loss,
                "order": order,
                "rank": rank if ranked and defended else "",
                "standing": standing,
                "words": f"{standing.entry.name} {' '.join(standing.entry.overrides)} {own}".lower(),
                "found": found,
                "upper": upper,
                "why": "not measured" if standing.loss is None or not heard else "costs more",
                "most": leaks_most(heard),
                "tone": tone_of(heard),
                "missing": Counter(cell.uploads for cell in standing.missing(board.threat)),
                "by_uploads": {name: standing.candidate(board.threat, name) if ranked else None for name in uploads},
            }
        )
    return rows


def _headline(measured: MeasuredBenchmark, board: Board) -> str:
    loss, so_far = f"{board.accuracy_loss:g} points of accuracy", measured.jobs_done < measured.jobs
    if board.best is None or board.best.missing(board.threat):
        return f"No defense was measured to the end that costs at most {loss}"
    found = board.best.candidate(board.threat)
    still = f"; {read_of(found)} with it" if found is not None and found.read else ""
    return f"{'So far ' * so_far}{board.best.entry.name} leaks least of those that cost at most {loss}{still}"


def _found(measured: MeasuredBenchmark, board: Board) -> list[str]:
    sentences, best = list[str](), board.best
    if best is not None and not best.missing(board.threat) and (found := best.candidate(board.threat)) is not None:
        name = found.judged_by
        sentences.append(
            f"With {best.entry.name}: {read_of(found)} by the worst attacker{f' ({found.by})' if found.by else ''},"
            f" mean {title_within(name)} {metric(found.psnr, name)}"
            f"{below(_within(found.upper, name), found.psnr, name)}."
        )
    whole = [standing for standing in board.defended if not standing.missing(board.threat)]
    found_by = [found for s in whole if (found := s.candidate(board.threat)) is not None]
    if not found_by:
        return sentences
    hide = sum(found.unread() for found in found_by)
    kind, several = KINDS.get(measured.metric, "image"), len(found_by) > 1
    tried = f"{len(found_by)} defenses that were" if several else "the one defense that was"
    none = f"With {f'{hide} of ' * several}{tried} measured to the end, no attacked {kind} was reconstructed."
    behind = f"{'each of the ' * several}{tried} measured to the end"
    return [*sentences, none if hide else f"At least one attacked {kind} was reconstructed with {behind}."]


def _picture(measured: MeasuredBenchmark, board: Board) -> Markup | None:
    shown, threats, name = [s for s in board.ranked if s.candidate(board.threat)], measured.threats, measured.metric
    farthest = FARTHEST if name == IMAGE_METRIC else METRICS[name].range[1]
    if not shown:
        return None

    def draw(axes: Axes) -> None:
        for number, threat in enumerate(threats):
            for place, standing in enumerate(shown):
                if (found := standing.candidate(threat)) is not None:
                    x, end = min(found.psnr, farthest), min(found.upper, farthest)
                    style: dict[str, Any] = {"markersize": 4.5, "elinewidth": 1.2, "capsize": 2}
                    style |= {"fmt": "os^"[number], "color": SERIES[number], "xerr": [[0.0], [max(end - x, 0.0)]]}
                    axes.errorbar([x], [place + 0.22 * (number - 1)], **style)
        axes.set_yticks(range(len(shown)), [standing.entry.name for standing in shown], fontsize=8)
        unit = f" in {METRICS[name].unit}" if METRICS[name].unit else ""
        axes.set(xlabel=f"{title(name)}{unit}", xlim=(0.0, farthest * 61 / 60), ylim=(len(shown) - 0.5, -0.5))
        axes.grid(visible=False, axis="y")

    sentences = []
    for standing in shown:
        figures = [f"{t} {metric(f.psnr, name)}" for t in threats if (f := standing.candidate(t))]
        sentences.append(f"{standing.entry.name}: {', '.join(figures)}")
    alt = f"What attackers reconstruct with each defense. {'; '.join(sentences)}"
    return draw_svg(draw, alt, height=max(1.6, 0.7 + 0.27 * len(shown)))


FORMAT = 3
SCHEMA = Path(__file__).resolve().parent / "benchmark.schema.json"


def benchmark_as_plain(measured: MeasuredBenchmark) -> dict[str, Any]:
    """Return a benchmark's figures as plain values; those that change if it is repeated are in ``clock``."""
    track = measured.track
    return {
        "format": FORMAT,
        "track": {
            "name": track.name,
            "version": track.version,
            "about": track.about,
            "sha256": track.sha256,
            "cells": [
                {"title": c.title, "uploads": c.uploads, "state": c.state, "server": c.server or None}
                for c in track.cells
            ],
            "accuracy_loss": list(track.accuracy_loss),
            "left_out": dict(track.left_out),
        },
        "code": list(measured.code),
        "data": dict(measured.data),
        "jobs": {"planned": measured.jobs, "finished": measured.jobs_done},
        "settings": [_setting(standing, measured.threats) for standing in measured.standings],
        "boards": [
            {
                "threat": board.threat,
                "accuracy_loss": board.accuracy_loss,
                **{
                    name: [{"defense": row.entry.family, "strength": row.entry.strength} for row in rows]
                    for name, rows in (("ranked", board.ranked), ("beyond", board.beyond))
                },
            }
            for board in measured.boards
        ],
        "clock": {
            "seconds": round(measured.seconds, 1),
            "hardware": measured.hardware,
            "defense_seconds": {s.entry.name: _finite(s.seconds) for s in measured.standings},
        },
    }


def _setting(standing: StudyRow, threats: Sequence[Threat]) -> dict[str, Any]:
    entry = standing.entry
    accuracies = {name: summary.final_accuracy for name, summary in standing.trainings.items()}
    candidates = {threat: standing.candidate(threat) if threat in threats else None for threat in THREATS}
    return {
        "defense": entry.family,
        "strength": entry.strength,
        "overrides": list(entry.overrides),
        "entered": entry.own,
        "accuracy": accuracies,
        "accuracy_loss": _finite(standing.loss),
        "epsilon": _finite(standing.epsilon),
        "upload_bytes": _finite(standing.upload_bytes),
        "worst": {threat: found and _worst(found) for threat, found in candidates.items()},
        "readings": [_reading(cell.title, r) for cell, found in standing.readings.items() for r in found],
        "incomplete": why_incomplete(standing) or None,
    }


def _worst(found: Candidate) -> dict[str, Any]:
    first = {"metric": found.judged_by, "mean": found.psnr, "mean_at_most": found.upper, "largest": found.largest}
    counted = {"read": found.read, "exact": found.exact, "identified": found.identified, "read_at_most": found.at_most}
    of = {"images": found.images, "unjudged": found.unjudged, "victims": found.groups, "failures": found.failures}
    return {**first, **counted, **of, "by": found.by}


def _reading(cell: str, reading: LeakageResult) -> dict[str, Any]:
    return {
        "cell": cell,
        "attacker": str(reading.attacker),
        "images": reading.images,
        "failures": reading.counts.failures,
        "counts": reading.counts.as_plain(),
        "metrics": {
            name: {"mean": s.mean, "ci95": list(s.ci95) if s.ci95 else None}
            | {key: getattr(s, key) for key in ("median", "min", "max", "n", "groups")}
            for name in COMPARED[reading.main]
            if (s := reading.statistic(name)) is not None
        },
        "attacks": dict(reading.members),
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


@dataclass(frozen=True, kw_only=True, eq=False)
class Board:
    """Leaderboard of defenses, each at the strength that leaks least and costs at most ``accuracy_loss`` accuracy."""

    threat: Threat
    accuracy_loss: float  # most percentage points that a strength may cost
    ranked: Sequence[StudyRow]  # least leakage first, including the undefended one
    beyond: Sequence[StudyRow]  # families without a measured strength within that loss, each at the cheapest

    @property
    def defended(self) -> list[StudyRow]:
        return [standing for standing in self.ranked if not standing.entry.undefended]

    @property
    def best(self) -> StudyRow | None:
        return next(iter(self.defended), None)


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredBenchmark:
    """A benchmark's results so far."""

    track: Track
    standings: Sequence[StudyRow]  # all strengths, the undefended one first
    code: Sequence[str]  # SHA-256 of the sources that measured them, ideally one
    data: Mapping[str, str]  # SHA-256 of each data set, by name
    seconds: float
    jobs: int  # number of jobs
    jobs_done: int  # number of finished ones
    hardware: str

    @property
    def threats(self) -> tuple[Threat, ...]:
        return threats_of(self.track.cells)

    @property
    def metric(self) -> str:
        found = (r for s in self.standings for readings in s.readings.values() for r in readings)
        return main_of(list(found)) or IMAGE_METRIC

    @property
    def boards(self) -> list[Board]:
        return [_board(self.standings, *asked) for asked in product(self.threats, self.track.accuracy_loss)]

    @property
    def victims(self) -> str:
        numbers = {
            s.groups for found in self.standings[0].readings.values() for r in found if (s := r.statistic(r.main))
        }
        least, most = min(numbers, default=0), max(numbers, default=0)
        return str(least) if least == most else f"{least} to {most}"


def extent_of(row: StudyRow, threat: Threat) -> Extent:
    """Return the largest leakage to attackers no stronger than ``threat``; ``WORST`` if a result is missing."""
    candidate = row.candidate(threat)
    return WORST if candidate is None or row.missing(threat) else candidate.extent


def _board(standings: Sequence[StudyRow], threat: Threat, loss: float) -> Board:
    ranked, beyond = [], []
    for family in dict.fromkeys(standing.entry.family for standing in standings):
        strengths = [standing for standing in standings if standing.entry.family == family]
        within = [s for s in strengths if s.loss is not None and s.loss <= loss + ROUNDING and s.candidate(threat)]
        if within:
            ranked.append(min(within, key=lambda s: extent_of(s, threat)))
        else:
            beyond.append(min(strengths, key=lambda s: math.inf if s.loss is None else s.loss))
    ranked.sort(key=lambda s: extent_of(s, threat))
    return Board(threat=threat, accuracy_loss=loss, ranked=ranked, beyond=beyond)
