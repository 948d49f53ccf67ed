"""Render the page of a search for transformation policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup

from fl_privacy.data.transformations import Policy
from fl_privacy.defenses.policy_search import Scored
from fl_privacy.report.charts import INK, MUTED, SERIES, draw_svg
from fl_privacy.report.page import render

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 20  # most accepted policies in the table
MARKED = 5  # single operations marked in the chart, as in the paper
_WIDE = 20.0  # least ratio of accuracy scores for a logarithmic axis


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Results of a search for policies: image augmentations that hide training images (defense ATS)."""

    scored: Sequence[Scored]
    untransformed: Scored  # score without a transformation
    accepted: Sequence[Scored]  # policies that meet all requirements, the lowest score first
    chosen: Sequence[Scored]  # policies that clients share
    threshold: float
    without_effect: Sequence[Scored]  # policies that leave too many images unchanged

    @property
    def singles(self) -> list[Scored]:
        idle = {s.policy for s in self.without_effect}
        alone = (s for s in self.scored if len(s.policy.indices) == 1 and s.policy not in idle)
        return sorted(alone, key=lambda s: s.privacy)


def render_search(found: Findings, *, data: str, model: str, seed: int) -> str:
    """Render the HTML page on a search for augmentation policies."""
    return render(
        "policy_search.html.j2",
        found=found,
        accepted=found.accepted[:SHOWN],
        more_private=sum(s.privacy < found.untransformed.privacy for s in found.scored),
        idle=", ".join(str(s.policy) for s in found.without_effect if len(s.policy.indices) == 1),
        scatter=_scatter(found),
        ranking=_ranking(found),
        policy_in_words=policy_in_words,
        data=data,
        model=model,
        seed=seed,
    )


def policy_in_words(policy: Policy) -> str:
    """Name the image operations of ``policy``, with their levels."""
    return ", ".join(f"{operation.name.replace('_', ' ')} {operation.level}" for operation in policy.operations)


def _scatter(found: Findings) -> Markup:
    def draw(axes: Axes) -> None:
        taken, idle = {s.policy for s in found.accepted}, {s.policy for s in found.without_effect}
        fine = [s for s in found.scored if s.policy in taken]
        rest = [s for s in found.scored if s.policy not in taken | idle]
        for some, color, label in ((rest, MUTED, "refused"), (fine, SERIES[0], "accepted")):
            axes.plot(*_places(some), ".", color=color, markersize=4, alpha=0.6, label=label)
        for number, s in enumerate(found.chosen):
            axes.plot(*_places([s]), "o", color=SERIES[1 + number % 9], markersize=7, zorder=3, label=str(s.policy))
        axes.plot(*_places([found.untransformed]), "x", color=INK, markersize=7, zorder=3, label="no transformation")
        axes.axhline(found.threshold, color=INK, linestyle="--", linewidth=1.0)
        axes.axvline(found.untransformed.privacy, color=INK, linestyle="--", linewidth=1.0)
        scores = [s.accuracy for s in [*rest, *fine, found.untransformed]]
        if min(scores) < _WIDE * max(scores):
            axes.set_yscale("symlog", linthresh=1.0)
            axes.yaxis.set_minor_formatter("")  # none
            axes.set_ylim(1.6 * min(scores), max(scores) / 1.6)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}".replace("-", "\N{MINUS SIGN}"))
        axes.set(xlabel="Leakage score, lower is better", ylabel="Accuracy score, higher is better")
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, fontsize=9, handletextpad=0.2)

    kept = f"{len(found.accepted)} are accepted, {len(found.chosen)} of them chosen"
    return draw_svg(draw, f"Accuracy score over leakage score of {len(found.scored)} policies: {kept}")


def _places(some: Sequence[Scored]) -> tuple[list[float], list[float]]:
    return [s.privacy for s in some], [s.accuracy for s in some]


def _ranking(found: Findings) -> Markup:
    lowest = found.singles[:MARKED]

    def draw(axes: Axes) -> None:
        base, marked = found.untransformed.privacy, {s.policy for s in lowest}
        by_index = sorted(found.singles, key=lambda s: s.policy.indices)
        colors = [SERIES[1] if s.policy in marked else SERIES[0] for s in by_index]
        places = [s.policy.indices[0] for s in by_index]
        axes.bar(places, [s.privacy - base for s in by_index], bottom=base, color=colors, width=0.8)
        axes.axhline(base, color=INK, linewidth=1.0)
        for s in lowest:
            axes.annotate(
                str(s.policy), (s.policy.indices[0], s.privacy), xytext=(0, -3), textcoords="offset points",
                ha="center", va="top", rotation=90, fontsize=8,
            )  # fmt: skip
        axes.margins(y=0.12)
        axes.grid(visible=False, axis="x")
        axes.set(xlabel="Operation; the line: no transformation", ylabel="Leakage score, lower is better")

    best = f"{found.untransformed.privacy:.3f} without; the lowest: {', '.join(str(s.policy) for s in lowest)}"
    return draw_svg(draw, f"Leakage score of each operation, compared with {best}")
