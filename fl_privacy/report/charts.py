"""Charts as inline SVG with the page's colors and fonts."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, cycle, groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape

from fl_privacy.report.page import part_of_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID, LEAK = "#000001", "#000002", "#000003", "#000004"
SERIES = tuple(f"#0000{number}" for number in range(10, 20))
_VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--line)", LEAK: "var(--leak)"} | {
    color: f"var(--series-{number})" for number, color in enumerate(SERIES)
}
"""Placeholder colors for matplotlib -> the page's colors, which differ in dark mode."""

_STYLE = Path(__file__).with_name("charts.mplstyle")
_INKS: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "legend.labelcolor"), INK),
    **dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), GRID),
}
_COLORS = tuple(_VARIABLES[color] for color in SERIES)
_DASHES = ("", "7 3", "2 3", "7 3 2 3")
_FEW_DECADES = 1.5  # decades below which a logarithmic axis also labels 2 and 5
EXACT = "(exact)"  # label of a point with infinite PSNR
_LABEL_SIZE = (0.03, 0.055)  # width and height of a label, in shares of the axes
_numbers = count()
LEAST_POINTS, LEAST_SHARE = 10.0, 0.25  # least span of x in percentage points, and of y as a share of its largest value


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line ``y`` over ``x``."""

    x: Sequence[float]
    y: Sequence[float]
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class ChartPoint:
    """Point for a run, or for a defense at one strength, with error bars (low, high) if known."""

    x: float
    y: float
    label: str = ""
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None


def line_chart(
    curves: Sequence[Curve],
    *,
    x: str,
    y: str,
    alt: str,
    percent: bool = False,
    log: bool = False,
    faint: bool = False,
    marks: Sequence[Sequence[tuple[float, float]]] = (),
) -> Markup:
    """Draw curves over a common axis; ``x``, ``y``: titles of the axes; ``alt``: description of the chart.

    ``percent``: ``True`` if the values of y are shares, which are shown in percent from 0. ``log`` makes the y axis
    logarithmic; ``faint`` draws thin lines in one color. ``marks``: for each curve, a point (x, y) for each frame of an
    animation; the point of frame N has an SVG id that ends in ``-moment-N``.
    """

    def place(x: float, y: float | None) -> tuple[float, float]:
        known = y is not None and abs(y) < _HIGHEST and (y > 0 or not log)
        return float(x), math.nan if not known or y is None else math.log10(y) if log else float(y)

    looks = product(_DASHES[: 1 if faint else 4], _COLORS[: 1 if faint else len(SERIES)])
    lines = [
        ([place(x, y) for x, y in zip(curve.x, curve.y, strict=True)], curve.label, color, dash)
        for curve, (dash, color) in zip(curves, cycle(looks), strict=False)
    ]
    moments = [
        [(place(*own[moment]), color) for color, own in zip(_COLORS, marks, strict=False) if moment < len(own)]
        for moment in range(max(map(len, marks), default=0))
    ]
    across = _span(x for line, *_ in lines for x, _ in line)
    low, high = _span((y for line, *_ in lines for _, y in line), 0.5 if log else 0.05)
    spans = across, (0.0, max(high, LEAST_POINTS / 100)) if percent else (low, high)
    legend = [of_line[1:] for of_line in lines] if 1 < len(curves) <= _MOST_NAMED and not faint else []
    drawn = {"lines": lines, "moments": moments, "faint": faint}
    return _svg(spans, (x, y), alt, legend, log=log, percent=percent, **drawn)


def scatter_chart(
    points: Sequence[ChartPoint], *, x: str, y: str, alt: str, bound: float | None = None, bound_label: str = ""
) -> Markup:
    """Draw labelled points with error bars, and a dashed line at ``bound``; infinite points are triangles on top."""
    top = top_of([point.y for point in points], bound)

    def draw(axes: Axes) -> None:
        for number, point in enumerate(points):
            height, exact = min(point.y, top), math.isinf(point.y)
            style: dict[str, Any] = {"markersize": 6, "elinewidth": 1.2, "capsize": 2.5}
            style |= {"xerr": reach(point.x, point.x_range), "yerr": reach(height, point.y_range)}
            color, mark = SERIES[number % len(SERIES)], "^" if exact else "o"
            axes.errorbar([point.x], [height], fmt=mark, color=color, **style)
        axes.margins(0.15)
        if bound is not None:
            draw_bound(axes, bound, bound_label)
        widen(axes)
        axes.set(xlabel=x, ylabel=y)
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        near = _LABEL_SIZE[0] * (right - left), _LABEL_SIZE[1] * (high - low)
        labels: dict[tuple[float, float], list[str]] = {}
        for point in points:
            place = point.x, min(point.y, top)
            at = next(
                (p for p in labels if all(abs(a - b) <= c for a, b, c in zip(place, p, near, strict=True))), place
            )
            labels.setdefault(at, []).append(f"{point.label} {EXACT}" if math.isinf(point.y) else point.label)
        for place, names in labels.items():
            axes.annotate(", ".join(names), place, xytext=(6, 5), textcoords="offset points", fontweight="bold")

    return draw_svg(draw, alt)


def partition_chart(counts: Sequence[Sequence[int]], class_names: Sequence[str]) -> Markup:
    """Draw a bar for each client, stacked from the client's examples of each class, ``counts[client][class]``."""
    alt = f"Examples of each class on each of {len(counts)} clients; the table below has the numbers"
    many = len(class_names) > len(SERIES)  # from purple over blue and green to yellow
    mixes = np.linspace(0, 100, len(class_names)) if many else ()
    colors = [f"color-mix(in oklch longer hue, #fde725 {share:.0f}%, #440154)" for share in mixes] or _COLORS
    bars = [
        (client - 0.41, 0.82, top - held, top, color)
        for client, row in enumerate(counts)
        for held, top, color in zip(row, accumulate(row), colors, strict=False)
        if held
    ]
    spans = (-0.6, len(counts) - 0.4), (0.0, 1.05 * max([1, *map(sum, counts)]))
    legend = [] if many else [(name, color, "") for name, color in zip(class_names, colors, strict=False)]
    return _svg(spans, ("Client", "Examples"), alt, legend, bars=bars)


_WIDTH, _HEIGHT, _LETTER, _ROW = 388.8, 237.6, 5.5, 14.0  # sizes of a chart, a letter, and a row of the legend
_MOST_NAMED = 12  # most curves in a legend
_HIGHEST = 1e100  # values beyond are left out, like infinite ones


def _svg(
    spans: tuple[tuple[float, float], tuple[float, float]],
    titles: tuple[str, str],
    alt: str,
    names: Sequence[tuple[str, str, str]],
    *,
    log: bool = False,
    percent: bool = False,
    **drawn: Any,
) -> Markup:
    # spans of x and of y, or its logarithm; names: name, color and dashes of each entry of the legend
    (first, last), (low, high) = spans
    up = [(y, f"{100 * y:.0f} %" if percent else f"{10**y if log else y:g}") for y in _ticks(low, high, log=log)]
    left, right, bottom = round(31 + _LETTER * max(len(word) for _, word in [(0, ""), *up])), _WIDTH - 10, _HEIGHT - 36
    legend, end, top = [], left, 8.0
    for name, color, dash in names:
        wide = round(30 + 0.9 * _LETTER * len(name))
        end, top = (left, top + _ROW) if end + wide > right and end > left else (end, top)
        legend.append((end, top, name, color, dash))
        end += wide
    top += 8 * bool(legend)

    def at(x: float, y: float) -> tuple[float, float]:
        across, high_up = (x - first) / (last - first), (y - low) / (high - low)
        return round(left + across * (right - left), 1), round(bottom - high_up * (bottom - top), 1)

    places = {"left": left, "right": right, "top": top, "bottom": bottom, "width": _WIDTH, "height": _HEIGHT, "at": at}
    ticks = {"up": up, "across": _ticks(first, last, whole=True), "titles": titles, "legend": legend, "alt": alt}
    drawn = {"bars": (), "lines": (), "moments": (), "faint": False, **drawn, "number": next(_numbers), "path": _path}
    return part_of_page("chart.svg.j2", **places, **ticks, **drawn).replace("\n", "")


def _span(values: Iterable[float], least: float = 0.05) -> tuple[float, float]:
    known = [value for value in values if math.isfinite(value)] or [0.0]
    margin = 0.05 * (max(known) - min(known)) or least * max(1.0, abs(known[0]))
    return min(known) - margin, max(known) + margin


def _ticks(low: float, high: float, *, log: bool = False, whole: bool = False) -> list[float]:
    if log and high - low >= 1:
        few = (0.0, math.log10(2), math.log10(5)) if high - low < _FEW_DECADES else (0.0,)
        decades = range(math.floor(low), math.ceil(high) + 1)
        every = [k + part for k in decades if k % math.ceil((high - low) / 7) == 0 for part in few]
        return [tick for tick in every if low <= tick <= high]
    bottom, top = (10**low, 10**high) if log else (low, high)
    power = 10.0 ** math.floor(math.log10((top - bottom) / 6))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= 0.999 * (top - bottom) / 6)
    step = max(step, 1.0) if whole else step
    found = [k * step for k in range(math.ceil(bottom / step), math.floor(top / step) + 1)]
    return [math.log10(tick) for tick in found] if log else found


def _path(line: Iterable[tuple[float, float]], at: Callable[[float, float], tuple[float, float]]) -> str:
    found, pen = [], "M"  # at most four places within half a pixel, and gaps at NaN
    places = (at(*place) for place in line)
    for column, near in groupby(places, key=lambda place: None if math.isnan(place[1]) else round(2 * place[0])):
        few = list(near)
        heights = [y for _, y in few]
        kept = {0, heights.index(min(heights)), heights.index(max(heights)), len(few) - 1} if column is not None else ()
        found += [f"{'L' if number else pen}{few[k][0]} {few[k][1]}" for number, k in enumerate(sorted(kept))]
        pen = "M" if column is None else "L"
    parts = "".join(found).split("M")
    return "M".join(part if "L" in part or not part else f"{part}h0" for part in parts)  # a dot if alone


def top_of(values: Sequence[float], bound: float | None) -> float:
    """Return the height at which infinite ``values`` are drawn: above the finite values and ``bound``."""
    return 1.25 * max([value for value in values if math.isfinite(value)] + [bound or 1.0])


def draw_bound(axes: Axes, bound: float, label: str) -> None:
    """Draw a labelled line at the height ``bound``."""
    axes.axhline(bound, color=MUTED, linestyle="--", linewidth=1.0)
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    lines = (line for line in axes.get_lines() if line.get_transform() == axes.transData)
    marks = (mark for line in lines for mark in np.asarray(line.get_xydata(), float))
    close = [(x - left) / (right - left) for x, y in marks if -0.02 < (y - bound) / (high - low) < 0.09]
    side = int(min(close, default=1.0) < min((1 - x for x in close), default=1.0))  # 1: right, the freer one
    axes.annotate(
        label, (side, bound), xycoords=("axes fraction", "data"), xytext=(2 - 4 * side, 3),
        textcoords="offset points", ha="right" if side else "left", color=MUTED, fontsize=9,
    )  # fmt: skip


def widen(axes: Axes) -> None:
    """Make the x range at least ten percentage points, and the y range at least a quarter of the largest y."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    if (missing := LEAST_POINTS - (right - left)) > 0:
        beyond = max(0.0, right + missing / 2 - max(100.0, right))
        axes.set_xlim(left - missing / 2 - beyond, right + missing / 2 - beyond)
    if (missing := LEAST_SHARE * max(abs(low), abs(high)) - (high - low)) > 0:
        axes.set_ylim(low - missing / 2, high + missing / 2)


def reach(value: float, interval: tuple[float, float] | None) -> list[list[float]] | None:
    """Return an error bar's lengths from ``value`` to both ends of ``interval``; ``None`` if there is none."""
    return None if interval is None else [[value - interval[0]], [interval[1] - value]]


def draw_svg(draw: Callable[[Axes], None], alt: str, *, height: float = 3.3) -> Markup:
    """Return the drawing by ``draw`` as an SVG element of 5.4 by ``height`` inches, which scales with the page."""
    import matplotlib  # noqa: PLC0415  (takes half a second, and a wrong folder needs no chart)
    from matplotlib.figure import Figure  # noqa: PLC0415

    number = next(_numbers)
    file = io.StringIO()
    with matplotlib.rc_context({**_INKS, "svg.hashsalt": f"chart {number}"}, fname=_STYLE):
        figure = Figure(figsize=(5.4, height), layout="constrained")
        draw(figure.add_subplot())
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    for reference in ('id="', "url(#", 'href="#'):
        svg = svg.replace(reference, f"{reference}c{number}-")
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    # matplotlib escapes its texts
    return Markup(svg.replace("<svg", Markup('<svg role="img" aria-label="{}"').format(escape(alt)), 1))
