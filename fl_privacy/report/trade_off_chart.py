"""Leakage over utility as curves, one color for each family of defenses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.axes import Axes

from fl_privacy.report.charts import EXACT, INK, MUTED, SERIES, draw_svg, reach, top_of


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """A defense at one strength: utility, leakage and its 95 % interval."""

    x: float
    y: float
    y_range: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class FamilyCurve:
    """The points of one family and attacker, by strength.

    Attributes:
        points: joined in order.
        series: number of the family's color; ``None`` for the undefended point.
        adaptive: drawn dashed with open marks.
    """

    points: Sequence[CurvePoint]
    series: int | None
    adaptive: bool


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
    """Curves with error bars; infinite values stand above all others, and are named.

    Args:
        curves: drawn in order.
        x: what the horizontal axis shows.
        y: what the vertical axis shows.
        alt: the chart in words.
        bound: a dashed line across.
        bound_label: what it means.
        ring: around which point of the plane a circle is drawn.
    """

    top = top_of([p.y for curve in curves for p in curve.points], bound)

    def draw(axes: Axes) -> None:
        for curve in curves:
            color = INK if curve.series is None else SERIES[curve.series % len(SERIES)]
            axes.errorbar(
                [p.x for p in curve.points],
                [min(p.y, top) for p in curve.points],
                yerr=_reaches(curve.points),
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
            axes.plot(
                ring[0],
                min(ring[1], top),
                "o",
                markersize=13,
                markerfacecolor="none",
                markeredgecolor=INK,
                markeredgewidth=1.3,
            )
        axes.margins(0.06)
        if bound is not None:
            axes.axhline(bound, color=MUTED, linestyle=":", linewidth=1.2)
            axes.annotate(
                bound_label, (0.0, bound), xycoords=("axes fraction", "data"), xytext=(2, 3),
                textcoords="offset points", color=MUTED, fontsize=9,
            )  # fmt: skip
        axes.set(xlabel=x, ylabel=y)

    return draw_svg(draw, alt)


def _reaches(points: Sequence[CurvePoint]) -> list[list[float]]:
    """(2, n) half-lengths of the error bars, zero where there is none."""
    ends = [reach(p.y, p.y_range) or [[0.0], [0.0]] for p in points]
    return [[low[0] for low, _ in ends], [high[0] for _, high in ends]]
