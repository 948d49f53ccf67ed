"""PPC curves and CAP as charts and tables of a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fl_privacy.metrics.trade_off import GREEN_BELOW, RED_ABOVE, PpcPoint
from fl_privacy.report.charts import INK, LEAK, MUTED, SERIES, draw_svg
from fl_privacy.report.ppc import DISTANCES, Cap, Sample, caps
from fl_privacy.report.trade_off import Versus
from fl_privacy.results import Attacker

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True, eq=False)
class PpcView:
    """What the section shows.

    Attributes:
        mechanisms: rows of the table.
        columns: distance and attacker of each column.
        values: CAP by row and column.
        bars: a chart for each attack.
        curves: attack -> title -> chart.
    """

    mechanisms: Sequence[str]
    columns: Sequence[tuple[str, Versus]]
    values: dict[tuple[str, str, Versus], Cap]
    bars: dict[str, Markup]
    curves: dict[str, dict[str, Markup]]


def ppc_view_of(samples: Sequence[Sample]) -> PpcView | None:
    """The section over ``samples``; ``None`` where there are none."""
    if not samples:
        return None
    found = caps(samples)
    attacks = list(dict.fromkeys(sample.versus.attack for sample in samples))
    values = {(entry.mechanism, entry.distance, entry.versus): entry for entry in found}
    return PpcView(
        mechanisms=list(dict.fromkeys(entry.mechanism for entry in found)),
        columns=list(dict.fromkeys((entry.distance, entry.versus) for entry in found)),
        values=values,
        bars={attack: _bars(found, attack) for attack in attacks},
        curves={attack: _curves(samples, attack) for attack in attacks},
    )


def _bars(found: Sequence[Cap], attack: str) -> Markup:
    """CAP under the attacker that came nearest, and a line for the plain one where that is another."""
    worst = {(e.mechanism, e.distance): e.value for e in found if e.versus == Versus(attack, "worst")}
    values: dict[str, dict[str, tuple[float, float | None]]] = {}
    words = []
    for entry in found:
        if entry.versus == Versus(attack, Attacker.PLAIN):
            value = worst.get((entry.mechanism, entry.distance))
            shown = (entry.value, None) if value is None else (value, entry.value)
            values.setdefault(entry.mechanism, {})[entry.distance] = shown
            words.append(f"{entry.mechanism}, {entry.distance} {shown[0]:.2f}")
    return cap_chart(values, alt=f"CAP under {attack}, of the attacker that came nearest: {'; '.join(words)}")


def _curves(samples: Sequence[Sample], attack: str) -> dict[str, Markup]:
    """Distance by distance, a chart for each mechanism."""
    charts = {}
    of_attack = [sample for sample in samples if sample.versus.attack == attack]
    mechanisms = list(dict.fromkeys(sample.mechanism for sample in of_attack))
    for distance, title in DISTANCES.items():
        for mechanism in mechanisms:
            points = {
                attacker: [
                    point
                    for sample in of_attack
                    if (sample.mechanism, sample.versus.attacker) == (mechanism, attacker)
                    and (point := sample.point(distance)) is not None
                ]
                for attacker in Attacker
            }
            if points[Attacker.PLAIN]:
                words = "; ".join(
                    f"accuracy {p.accuracy:.2f}, distance {p.distance:.2f}" for p in points[Attacker.PLAIN]
                )
                charts[f"{mechanism} · {title.partition(':')[0]}"] = ppc_chart(
                    points[Attacker.PLAIN],
                    points[Attacker.ADAPTIVE],
                    distance=title,
                    alt=f"{mechanism} under {attack}: {words}",
                )
    return charts


_BLUE, _ORANGE = SERIES[0], SERIES[1]


def ppc_chart(plain: Sequence[PpcPoint], adaptive: Sequence[PpcPoint], *, distance: str, alt: str) -> Markup:
    """Accuracy (orange), distance (blue) and their product over log10(||B|| / ||E|| + 1), as in SPN's Figure 5.

    Args:
        plain: under the plain attacker, in any order; points without distortion have no place on the axis.
        adaptive: under the one that knows the mechanism, dashed.
        distance: what the right axis shows.
        alt: the chart in words.
    """

    def draw(axes: Axes) -> None:
        right = axes.twinx()
        shown = [[p for p in points if math.isfinite(p.abscissa)] for points in (plain, adaptive)]
        everything = [*shown[0], *shown[1]]
        end = max([point.abscissa for point in everything] + [math.log10(RED_ABOVE + 1)]) * 1.05
        axes.axvspan(0, math.log10(GREEN_BELOW + 1), color=MUTED, alpha=0.12, linewidth=0)
        axes.axvspan(math.log10(RED_ABOVE + 1), end, color=LEAK, alpha=0.12, linewidth=0)
        for points, line, face in ((shown[0], "-o", None), (shown[1], "--o", "none")):
            ordered = sorted(points, key=lambda point: point.abscissa)
            x = [point.abscissa for point in ordered]
            style: dict[str, Any] = {"markersize": 4.5, "linewidth": 1.4, "markerfacecolor": face}
            if not face:
                axes.plot(x, [point.accuracy for point in ordered], line, color=_ORANGE, **style)
            right.plot(x, [point.distance for point in ordered], line, color=_BLUE, **style)
            right.plot(x, [point.calibrated for point in ordered], line[:-1], color=INK, linewidth=1.0)
        axes.set(xlabel="log10(‖B‖/‖E‖ + 1)", ylabel="Accuracy", xlim=(0, end), ylim=(0, 1))
        right.set(ylabel=distance, ylim=(0, max([1.0, *(point.distance * 1.05 for point in everything)])))
        axes.yaxis.label.set_color(_ORANGE)
        right.yaxis.label.set_color(_BLUE)
        right.grid(visible=False)

    return draw_svg(draw, alt)


def cap_chart(values: Mapping[str, Mapping[str, tuple[float, float | None]]], *, alt: str) -> Markup:
    """Bars of CAP, as in SPN's Figure 25.

    Args:
        values: mechanism -> distance -> CAP under the attacker that came nearest, and under the plain one, which is a
            line, where that is another.
        alt: the chart in words.
    """
    kinds = list(dict.fromkeys(kind for of_mechanism in values.values() for kind in of_mechanism))

    def draw(axes: Axes) -> None:
        width = 0.8 / max(1, len(values))
        for number, (mechanism, of_kind) in enumerate(values.items()):
            color = SERIES[number % len(SERIES)]
            places = [kinds.index(kind) - 0.4 + width * (number + 0.5) for kind in of_kind]
            axes.bar(places, [worst for worst, _ in of_kind.values()], width * 0.92, color=color, label=mechanism)
            for place, (_, plain) in zip(places, of_kind.values(), strict=True):
                if plain is not None:
                    axes.hlines(plain, place - width / 2, place + width / 2, color=INK, linewidth=2.0)
        axes.set_xticks(range(len(kinds)), [kind.capitalize() for kind in kinds])
        axes.set(ylabel="CAP, higher is better")
        axes.grid(visible=False, axis="x")
        axes.legend(fontsize=9, ncols=3, loc="lower left", bbox_to_anchor=(0.0, 1.0))

    return draw_svg(draw, alt)
