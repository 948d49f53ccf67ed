"""The page of a search for transformation policies."""

from collections.abc import Sequence

from markupsafe import Markup
from matplotlib.axes import Axes

from fl_privacy.policy_search import Scored, Selection
from fl_privacy.report.charts import INK, MUTED, SERIES, draw_svg
from fl_privacy.report.page import render
from fl_privacy.transformations import Policy

SHOWN = 20
"""Accepted policies in the table."""
MARKED = 5
"""Single operations that stand out in the chart, as in the paper."""


def render_search(
    scored: Sequence[Scored],
    chosen: Sequence[Scored],
    singles: Sequence[Scored],
    selection: Selection,
    *,
    data: str,
    model: str,
    seed: int,
) -> str:
    """The HTML over all ``scored`` policies, the set ``chosen`` and the ranking of ``singles``, the best first."""
    accepted = selection.accepted(scored)
    return render(
        "policy_search.html.j2",
        chosen=chosen,
        accepted=accepted[:SHOWN],
        number=len(scored),
        number_accepted=len(accepted),
        threshold=selection.threshold(scored),
        singles=singles,
        scatter=_scatter(scored, chosen, selection.threshold(scored)),
        ranking=_ranking(singles),
        in_words=in_words,
        data=data,
        model=model,
        seed=seed,
    )


def in_words(policy: Policy) -> str:
    """The operations of ``policy``, with their levels."""
    return ", ".join(f"{operation.name.replace('_', ' ')} {operation.level}" for operation in policy.operations)


def _scatter(scored: Sequence[Scored], chosen: Sequence[Scored], threshold: float) -> Markup:
    def draw(axes: Axes) -> None:
        fine = [s for s in scored if s.accuracy >= threshold]
        rest = [s for s in scored if s.accuracy < threshold]
        for some, color in ((rest, MUTED), (fine, SERIES[0])):
            axes.plot([s.privacy for s in some], [s.accuracy for s in some], ".", color=color, markersize=4, alpha=0.6)
        axes.plot(
            [s.privacy for s in chosen], [s.accuracy for s in chosen], "o", color=SERIES[1], markersize=7, zorder=3
        )
        for s in chosen:
            axes.annotate(
                str(s.policy), (s.privacy, s.accuracy), xytext=(6, 5), textcoords="offset points", fontweight="bold"
            )
        axes.axhline(threshold, color=INK, linestyle="--", linewidth=1.0)
        axes.set_yscale("symlog")
        axes.set(xlabel="Privacy score, lower is better", ylabel="Accuracy score, higher is better")

    return draw_svg(draw, f"Accuracy score over privacy score of {len(scored)} policies, {len(chosen)} of them chosen")


def _ranking(singles: Sequence[Scored]) -> Markup:
    def draw(axes: Axes) -> None:
        by_index = sorted(singles, key=lambda s: s.policy.indices)
        lowest = {s.policy for s in singles[:MARKED]}
        colors = [SERIES[1] if s.policy in lowest else SERIES[0] for s in by_index]
        axes.bar([s.policy.indices[0] for s in by_index], [s.privacy for s in by_index], color=colors, width=0.8)
        axes.grid(visible=False, axis="x")
        axes.set(xlabel="Operation", ylabel="Privacy score, lower is better")

    best = ", ".join(str(s.policy) for s in singles[:MARKED])
    return draw_svg(draw, f"Privacy score of each single operation; the lowest are {best}")
