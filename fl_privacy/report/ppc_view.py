"""PPC curves and CAP, ready for a page."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fl_privacy.report.ppc import DISTANCES, Cap, Sample, caps
from fl_privacy.report.ppc_chart import cap_chart, ppc_chart
from fl_privacy.report.trade_off import Versus
from fl_privacy.results import Attacker


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


def ppc_view(samples: Sequence[Sample]) -> PpcView | None:
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
