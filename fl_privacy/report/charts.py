"""Charts as inline SVG with the page's colors and fonts."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID, LEAK = "#000001", "#000002", "#000003", "#000004"
SERIES = tuple(f"#0000{number}" for number in range(10, 20))
_VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--line)", LEAK: "var(--leak)"} | {
    color: f"var(--series-{number})" for number, color in enumerate(SERIES)
}
"""Placeholder colors for matplotlib -> the page's colors, which differ in dark mode."""

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.8,
}
_FEW_DECADES = 1.5  # decades below which a logarithmic axis also labels 2 and 5
EXACT = "(exact)"  # label of a point with infinite PSNR
_LABEL_SIZE = (0.03, 0.055)  # width and height of a label, in shares of the axes
_LINES = ("-", "--", ":", "-.")
_numbers = itertools.count()
LEAST_POINTS, LEAST_SHARE = 10.0, 0.25  # least span of percents, share of others: small differences look small


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line ``y`` over ``x``."""

    x: Sequence[float]
    y: Sequence[float]
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class ChartPoint:
    """A run, or a defense at one strength, in a plane, with error bars (low, high) if known."""

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
    """Draw curves over a common axis.

    Args:
        percent: ``True`` to show the share ``y`` in percent, from 0.
        faint: ``True`` for thin lines in one color.
        marks: points (x, y) of each curve over time; those of one moment have an element id ending in ``-moment-N``.
    """

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import LogLocator  # noqa: PLC0415

        for number, curve in enumerate(curves):
            color = SERIES[0] if faint else SERIES[number % len(SERIES)]
            dash = "-" if faint else _LINES[number // len(SERIES) % len(_LINES)]
            mark = "o" if len(curve.x) == 1 else None
            width, alpha = (1.0, 0.5) if faint else (1.8, 1.0)
            axes.plot(curve.x, curve.y, dash, color=color, label=curve.label, linewidth=width, alpha=alpha, marker=mark)
        for moment in range(max(map(len, marks), default=0)):
            points = [(number, *own[moment]) for number, own in enumerate(marks) if moment < len(own)]
            colors = [SERIES[number % len(SERIES)] for number, _, _ in points]
            axes.scatter(
                [x for _, x, _ in points], [y for _, _, y in points], s=42, c=colors, zorder=3, gid=f"-moment-{moment}"
            )
        if percent:
            axes.set_ylim(0, max(axes.get_ylim()[1], LEAST_POINTS / 100))
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        if log:
            axes.set_yscale("log")
            known = [math.log10(value) for curve in curves for value in curve.y if 0 < value < math.inf]
            if (max(known) - min(known) if known else 0.0) < _FEW_DECADES:
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.minorticks_off()  # like major ticks, which have no marks either
        axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
        axes.grid(visible=False, axis="x")
        axes.set(xlabel=x, ylabel=y)
        if 1 < len(curves) <= 12 and not faint:
            axes.legend(fontsize=9, ncols=2 if len(curves) > 6 else 1)

    return draw_svg(draw, alt)


def scatter_chart(
    points: Sequence[ChartPoint], *, x: str, y: str, alt: str, bound: float | None = None, bound_label: str = ""
) -> Markup:
    """Draw labelled points with error bars, infinite ones as triangles on top; ``bound`` is a dashed line."""
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


def partition_chart(counts: Sequence[Sequence[int]], class_names: Sequence[str], *, alt: str) -> Markup:
    """Draw a stacked bar for each client, a color for each class."""

    def draw(axes: Axes) -> None:
        clients, bottom = range(len(counts)), [0] * len(counts)
        import matplotlib  # noqa: PLC0415

        spectrum = matplotlib.colormaps["viridis"].resampled(max(2, len(class_names)))
        for k, name in enumerate(class_names):
            height = [row[k] for row in counts]
            color = SERIES[k] if len(class_names) <= len(SERIES) else spectrum(k)
            axes.bar(clients, height, bottom=bottom, width=0.82, color=color, label=name)
            bottom = [b + h for b, h in zip(bottom, height, strict=True)]
        axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
        axes.grid(visible=False, axis="x")
        axes.set(xlabel="Client", ylabel="Examples", xlim=(-0.6, len(counts) - 0.4))
        if len(class_names) <= len(SERIES):
            axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.02), handlelength=1.0, reverse=True)

    return draw_svg(draw, alt)


def top_of(values: Sequence[float], bound: float | None) -> float:
    """Return the height for infinite ``values``: above finite ones and ``bound``."""
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
    """Widen axes to at least ten points across, in percent, and a quarter of the top; draw everything before."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    if (missing := LEAST_POINTS - (right - left)) > 0:
        beyond = max(0.0, right + missing / 2 - max(100.0, right))
        axes.set_xlim(left - missing / 2 - beyond, right + missing / 2 - beyond)
    if (missing := LEAST_SHARE * max(abs(low), abs(high)) - (high - low)) > 0:
        axes.set_ylim(low - missing / 2, high + missing / 2)


def reach(value: float, interval: tuple[float, float] | None) -> list[list[float]] | None:
    """Return the lengths of an error bar below and above ``value`` for matplotlib."""
    return None if interval is None else [[value - interval[0]], [interval[1] - value]]


def draw_svg(draw: Callable[[Axes], None], alt: str, *, height: float = 3.3) -> Markup:
    """Draw an SVG element that scales with the page; ``height`` is in inches, for 5.4 of width."""
    import matplotlib  # noqa: PLC0415  (takes half a second, and a wrong folder needs no chart)
    from matplotlib.figure import Figure  # noqa: PLC0415

    number = next(_numbers)
    file = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": f"chart {number}"}):
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
