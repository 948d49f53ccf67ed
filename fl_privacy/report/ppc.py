"""Draw SPN's privacy-preserving characteristics (PPC) and CAP of defenses, and a paper's table next to ours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fl_privacy.measure import Statistic
from fl_privacy.measure.intervals import GREEN_BELOW, RED_ABOVE, PpcPoint, cap
from fl_privacy.report.charts import INK, LEAK, MUTED, SERIES, draw_svg
from fl_privacy.report.gallery import data_uri
from fl_privacy.report.settings import GROUPS, UNSAID, chosen, flat_settings, telling_settings
from fl_privacy.runs.config.settings import Role, is_within, keys_of
from fl_privacy.runs.folder import Attacker, LeakageResult, Run, read_run
from fl_privacy.runs.folder.ongoing import IDENTITY
from fl_privacy.runs.folder.records import read_paper
from fl_privacy.runs.folder.study import StudyRow, Versus

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DISTANCES: Mapping[str, str] = {
    "reconstruction": "Reconstruction: rMSE",
    "label": "Label: share wrong",
    "tracing": "Tracing: share wrong",
}
"""SPN's attack -> title of its distance; ``label`` is called membership in the paper."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Accuracy, and distances of reconstructions from originals, under a defense (``mechanism``) at one strength."""

    mechanism: str
    strength: str
    versus: Versus
    accuracy: float  # accuracy of the training, in [0, 1]
    ratio: float  # ||B|| / ||E||, mean over the attacked updates; infinite if the defense changed nothing
    distances: Mapping[str, float]  # measured distances by name in ``DISTANCES``
    training: str

    def point(self, distance: str) -> PpcPoint | None:
        if distance not in self.distances:
            return None
        return PpcPoint(accuracy=self.accuracy, distance=self.distances[distance], signal_to_distortion=self.ratio)


@dataclass(frozen=True)
class Cap:
    """A defense's mean, over ``points`` strengths, of accuracy times distance from originals (CAP, Fan et al. 2020)."""

    mechanism: str
    distance: str
    versus: Versus
    value: float
    points: int


def samples_of_rows(rows: Sequence[StudyRow]) -> list[Sample]:
    """Return the accuracy and leakage of each row of a study: one sample per attacker, and one of the strongest."""
    found = []
    for row in rows:
        attacks = {cell.title: run for cell, run in row.attacks.items()}
        for versus in () if row.entry.undefended else row.leakage:
            sample = sample_of(
                [r for r in row.all_readings if (r.attack, r.attacker) == (versus.attack, versus.attacker)],
                mechanism=row.entry.family,
                strength=row.entry.strength,
                versus=versus,
                accuracy=row.accuracy,
                update_distortion=attacks[versus.attack].summary.update_distortion,
                training=row.entry.training.as_posix(),
            )
            found += [sample] if sample else []
    return with_worst(found)


def sample_of(
    leakages: Sequence[LeakageResult], accuracy: float | None, update_distortion: Mapping[str, Statistic], **named: Any
) -> Sample | None:
    """Build a :class:`Sample` from one attacker's results and the fields ``named``; ``None`` if a figure is missing."""
    ratio, distances = update_distortion.get("signal_to_distortion"), distances_of(leakages)
    if accuracy is None or ratio is None or not distances:
        return None
    return Sample(accuracy=accuracy, ratio=ratio.mean, distances=distances, **named)


def distances_of(leakages: Iterable[LeakageResult]) -> dict[str, float]:
    """Return name in ``DISTANCES`` -> smallest measured distance between a reconstruction and its original."""
    measured: list[dict[str, float]] = []
    for leakage in leakages:
        found = {}
        if (rmse := leakage.metrics.get("rmse")) and not math.isinf(rmse.mean):
            found["reconstruction"] = rmse.mean
        if labels := leakage.metrics.get("label_correct"):
            found["label"] = 1 - labels.mean
        if leakage.tracing:
            found["tracing"] = leakage.tracing.mean
        measured.append(found)
    return _least(measured)


def with_worst(samples: Sequence[Sample]) -> list[Sample]:
    """Add, for each training with several attackers, a sample of the strongest: the one with the smallest distances."""
    met: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        met.setdefault((sample.training, sample.versus.attack), []).append(sample)
    found = []
    for (_, attack), of_training in met.items():
        found += of_training
        if len({sample.versus.attacker for sample in of_training}) > 1:
            distances = _least([sample.distances for sample in of_training])
            found.append(replace(of_training[0], versus=Versus(attack, "worst"), distances=distances))
    return found


def _least(distances: Sequence[Mapping[str, float]]) -> dict[str, float]:
    known = {kind: [d[kind] for d in distances if kind in d] for kind in DISTANCES}
    return {kind: min(values) for kind, values in known.items() if values}


def caps(samples: Sequence[Sample]) -> list[Cap]:
    """Compute the calibrated averaged performance (CAP) of every defense under every attack."""
    curves: dict[tuple[str, str, Versus], list[PpcPoint]] = {}
    for distance in DISTANCES:
        for sample in samples:
            if (point := sample.point(distance)) is not None:
                curves.setdefault((sample.mechanism, distance, sample.versus), []).append(point)
    return [Cap(*curve, value=cap(points), points=len(points)) for curve, points in curves.items()]


@dataclass(frozen=True, kw_only=True, eq=False)
class PpcView:
    """Tables and charts that show how accuracy and leakage change with a defense's strength."""

    mechanisms: Sequence[str]
    columns: Sequence[tuple[str, Versus]]
    values: dict[tuple[str, str, Versus], Cap]
    bars: dict[str, Markup]
    curves: dict[str, dict[str, Markup]]


def ppc_view_of(samples: Sequence[Sample]) -> PpcView | None:
    """Build tables and charts that compare accuracy with leakage; ``None`` if ``samples`` is empty."""
    if not samples:
        return None
    found = caps(samples)
    attacks = list(dict.fromkeys(sample.versus.attack for sample in samples))
    return PpcView(
        mechanisms=list(dict.fromkeys(entry.mechanism for entry in found)),
        columns=list(dict.fromkeys((entry.distance, entry.versus) for entry in found)),
        values={(entry.mechanism, entry.distance, entry.versus): entry for entry in found},
        bars={attack: _bars(found, attack) for attack in attacks},
        curves={attack: _curves(samples, attack) for attack in attacks},
    )


def _bars(found: Sequence[Cap], attack: str) -> Markup:
    worst = {(e.mechanism, e.distance): e.value for e in found if e.versus == Versus(attack, "worst")}
    values: dict[str, dict[str, tuple[float, float | None]]] = {}
    words = []
    for entry in found:
        if entry.versus == Versus(attack, Attacker.PLAIN):
            value = worst.get((entry.mechanism, entry.distance))
            shown = (entry.value, None) if value is None else (value, entry.value)
            values.setdefault(entry.mechanism, {})[entry.distance] = shown
            words.append(f"{entry.mechanism}, {entry.distance} {shown[0]:.2f}")
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

    return draw_svg(draw, f"CAP under {attack}, of the attacker that came nearest: {'; '.join(words)}")


def _curves(samples: Sequence[Sample], attack: str) -> dict[str, Markup]:
    charts = {}
    of_attack = [sample for sample in samples if sample.versus.attack == attack]
    mechanisms = list(dict.fromkeys(sample.mechanism for sample in of_attack))
    for distance, title in DISTANCES.items():
        for mechanism in mechanisms:
            own = [(s.versus.attacker, s.point(distance)) for s in of_attack if s.mechanism == mechanism]
            plain, adaptive = ([p for by, p in own if by == one and p] for one in (Attacker.PLAIN, Attacker.ADAPTIVE))
            if plain:
                words = "; ".join(f"accuracy {p.accuracy:.2f}, distance {p.distance:.2f}" for p in plain)
                alt = f"{mechanism}{f' under {attack}' if attack else ''}: {words}"
                chart = ppc_chart(plain, adaptive, distance=title, alt=alt)
                charts[f"{mechanism} · {title.partition(':')[0]}"] = chart
    return charts


def ppc_chart(plain: Sequence[PpcPoint], adaptive: Sequence[PpcPoint], *, distance: str, alt: str) -> Markup:
    """Draw accuracy, distance, and accuracy times distance against log10(1 + ||B|| / ||E||).

    B is the undefended update and E the change that the defense makes (Figure 5 of SPN, Fan et al. 2020). ``plain``,
    ``adaptive``: results of attacks without and with knowledge of the defense. ``distance``: axis label.
    """
    blue, orange, *_ = SERIES

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
                axes.plot(x, [point.accuracy for point in ordered], line, color=orange, **style)
            right.plot(x, [point.distance for point in ordered], line, color=blue, **style)
            right.plot(x, [point.calibrated for point in ordered], line[:-1], color=INK, linewidth=1.0)
        axes.set(xlabel="log10(‖B‖/‖E‖ + 1)", ylabel="Accuracy", xlim=(0, end), ylim=(0, 1))
        right.set(ylabel=distance, ylim=(0, max([1.0, *(point.distance * 1.05 for point in everything)])))
        axes.yaxis.label.set_color(orange)
        right.yaxis.label.set_color(blue)
        right.grid(visible=False)

    return draw_svg(draw, alt)


NO_CIRCUMSTANCES = ("seed", "threat_model.knows_defense", *keys_of(Role.DEFENSE))
"""Dotted keys of settings that do not distinguish attacks in charts."""


def samples_of_runs(runs: Sequence[Run]) -> list[Sample]:
    """Return the accuracy and leakage of each defended run: one sample per attacker, and one of the strongest.

    The strength of a defense is its setting with the most different values in ``runs``. Runs that differ elsewhere
    count as different defenses or attacks.
    """
    defended = [run for run in runs if not run.identity.undefended]
    found = []
    for run in defended:
        mechanism, strength = _mechanism_of(run, defended)
        for attacker in Attacker:
            sample = sample_of(
                [reading for reading in run.summary.attacked if reading.attacker == attacker],
                mechanism=mechanism,
                strength=strength,
                versus=Versus(_attack_of(run, defended), attacker),
                accuracy=run.summary.final_accuracy,
                update_distortion=run.summary.update_distortion,
                training=run.path.as_posix(),
            )
            found += [sample] if sample else []
    return with_worst(found)


def _mechanism_of(run: Run, runs: Sequence[Run]) -> tuple[str, str]:
    defense, own, declared = chosen(run, "defense"), _defense_settings(run), [*run.strengths]
    alike = [_defense_settings(other) for other in runs if chosen(other, "defense") == defense]
    values = {key: {settings.get(key) for settings in alike} for key in own}
    varying = sorted(
        (key for key, taken in values.items() if len(taken) > 1),
        key=lambda key: (-len(values[key]), declared.index(key) if key in declared else len(declared)),
    )
    rest = ", ".join(f"{key} {own[key]}" for key in varying[1:])
    return f"{defense} ({rest})" if rest else defense, f"{varying[0]} {own[varying[0]]}" if varying else ""


def _defense_settings(run: Run) -> dict[str, str]:
    section = run.identity.config.get("defense")
    found = flat_settings(section) if isinstance(section, Mapping) else ()
    return {key: str(value) for key, value in found if key not in UNSAID}


def _attack_of(run: Run, runs: Sequence[Run]) -> str:
    groups = [group for group in GROUPS if group != "defense"]
    options = {group: {chosen(other, group) for other in runs} for group in groups}
    words = [chosen(run, "attack")]
    words += [chosen(run, group) for group in groups if group != "attack" and len(options[group]) > 1]
    alike = [other for other in runs if all(chosen(other, group) == chosen(run, group) for group in groups)]
    settings, others = _circumstances(run), [_circumstances(other) for other in alike]
    for key in dict.fromkeys(key for found in others for key in found):
        if len({found.get(key) for found in others}) > 1:
            words.append(f"{'batch' if key == 'batch_size' else key} {settings.get(key)}")
    return " · ".join(words)


def _circumstances(run: Run) -> dict[str, str]:
    return {k: v for k, v in telling_settings(run).items() if not is_within(k, NO_CIRCUMSTANCES)}


PICTURED_OF_PAPER = 6  # most images in a row of a paper's picture


def paper_view_of(run: Run) -> dict[str, Any] | None:
    """Return the page's data on a published table that a study repeated; ``None`` if the run's folder holds none."""
    if (record := read_paper(run.path)) is None:
        return None
    samples, pairs = [], {}
    for line in record["lines"]:
        places = [[run.path if name == run.name else run.path.parent / name for name in of] for of in line["folders"]]
        there = [[read_run(place) for place in of] for of in places if all((p / IDENTITY).is_file() for p in of)]
        pictured = there and run.shared != "figures"
        pairs[line["name"]] = list(there[0][-1].read_pairs()[0].values())[:PICTURED_OF_PAPER] if pictured else []
        for training, *_, attacked in [(of[0], *of) for of in there if len(line["folders"]) > 1]:
            sample = sample_of(
                [attacked.summary.plain],
                mechanism=line["name"],
                strength=attacked.name,
                versus=Versus("", Attacker.PLAIN),
                accuracy=training.summary.final_accuracy,
                update_distortion=attacked.summary.update_distortion,
                training=training.name,
            )
            samples += [sample] if sample else []
    strips = [
        (
            title,
            ["" if (image := getattr(pair, kind, None)) is None else data_uri(image) for pair in pairs.get(line, ())],
        )
        for title, line, kind in record["strips"]
    ]
    curves, columns = ppc_view_of(samples), zip(*(line["figures"] for line in record["lines"]), strict=True)
    printed, orders = [], {}
    for name, column in zip(record["columns"], columns, strict=True):
        printed.append(any(figure[0] is not None for figure in column))
        ends = [(-math.inf, math.inf) if None in figure else figure[2:4] for figure in column]
        both = sorted((f[0], *at) for f, at in zip(column, ends, strict=True) if None not in f[:2])
        steps = [(a[2] < b[1], b[2] < a[1]) for a, b in pairwise(both) if a[0] < b[0]]
        if steps:
            said = "order" if all(more for more, _ in steps) else "are too few to order"
            orders[name] = "do not order" if any(less for _, less in steps) else said
    return {
        "record": record,
        "printed": printed,
        "orders": orders,
        "strips": [strip for strip in strips if any(strip[1])],
        "charts": {name: chart for of in (curves.curves.values() if curves else ()) for name, chart in of.items()},
    }
