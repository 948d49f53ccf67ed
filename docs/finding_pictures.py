"""``make results`` draws the charts of the findings with it, from the figures that stand in the tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kept_rows import Kept, Measured
from paper_tables import Paper

FOLDER = Path(__file__).resolve().parent / "assets" / "findings"
Figures = Mapping[str, Sequence[Measured | None]]
COLORS = ("#9ab", "#c44")


@dataclass(frozen=True)
class Chart:
    """Bars for some columns of a table; ``names`` are what the legend calls them."""

    name: str
    table: str
    columns: Sequence[str]
    names: Sequence[str]
    axis: str = "PSNR, dB"
    """What the bars are of."""
    lines: Sequence[str] = ()
    """Of the table, in this order; all if empty."""


CHARTS = (
    Chart(
        "knows_the_defense", "refiner/curves", ("ig", "ig_adaptive"), ("the published attacker", "knows the defense")
    ),
    Chart(
        "policies", "ats/policies", ("psnr", "noise"), ("what the paper's attack read", "noise, which has read nothing")
    ),
    Chart(
        "refiner_apart",
        "refiner/robust_settings",
        ("mse_part", "apart_part"),
        ("squared error to the image", "share of noise beyond the image"),
        axis="in parts of the published figure (Appendix K)",
    ),
    Chart(
        "refiner_solved",
        "refiner/search_of_solved",
        ("psnr",),
        ("read by the attacker of Appendix M",),
        lines=("10 steps from gray", "20 steps from gray", "40 steps from gray", "100 steps from gray"),
    ),
    Chart(
        "refiner_noise",
        "refiner/smoothness",
        ("noise_ratio",),
        ("noise in what is read",),
        axis="share of noise, over the attack's weight of total variation",
    ),
    Chart(
        "refiner_seconds",
        "refiner/seconds_by_batch",
        ("refiner", "soteria"),
        ("Refiner", "Soteria"),
        axis="a client's step, in steps of quantization, by the size of the batch",
    ),
    Chart(
        "refiner_training",
        "refiner/along_training",
        ("low", "high"),
        ("alpha 0.1", "alpha 0.9"),
        axis="Refiner's error, in parts of the gradient, along a training",
    ),
    Chart(
        "refiner_attribute",
        "refiner/inference",
        ("asr", "linear_adaptive"),
        ("learned from plain gradients", "knows the defense"),
        axis="attribute told, %",
        lines=("none", "Refiner, 0.1", "Refiner, 1", "Refiner, 10", "Soteria"),
    ),
    Chart("spn", "spn/read", ("plain_psnr", "adaptive_psnr"), ("the paper's attacker", "knows of the private head")),
)


def drawable(papers: Sequence[Paper], kept: Kept) -> dict[str, Figures]:
    """Name of each chart that has a figure -> its figures by line."""
    tables = {f"{paper.name}/{table.name}": table for paper in papers for table in paper.tables}
    found = {
        chart.name: {
            line: [tables[chart.table].read(kept, line, c) for c in chart.columns]
            for line in chart.lines or tables[chart.table].lines
        }
        for chart in CHARTS
    }
    measured = {name: {line: ours for line, ours in figures.items() if any(ours)} for name, figures in found.items()}
    return {name: figures for name, figures in measured.items() if figures}


def draw_all(papers: Sequence[Paper], kept: Kept, folder: Path = FOLDER) -> None:
    """Write the charts that have a figure, and take away the others."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = drawable(papers, kept)
    for chart in CHARTS:
        path = folder / f"{chart.name}.png"
        path.unlink(missing_ok=True)
        if chart.name in drawn:
            figure = draw(drawn[chart.name], chart.names, chart.axis)
            figure.savefig(path, metadata={"Software": None}, pil_kwargs={"optimize": True})


def draw(found: Figures, names: Sequence[str], axis: str = "PSNR, dB") -> Any:
    """Draw bars with 95 % intervals of the measured figures, one for each line."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7.2, 0.32 * len(found) + 0.9), dpi=110, layout="constrained", facecolor="white")
    axes = figure.subplots()
    for place, (column, color) in enumerate(zip(names, COLORS, strict=False)):
        there = [(row, ours[place]) for row, ours in enumerate(found.values()) if ours[place] is not None]
        axes.barh(
            [row + 0.36 * (place - 0.5) for row, _ in there],
            [one.mean for _, one in there],
            0.36,
            xerr=list(zip(*(_reach(one) for _, one in there), strict=True)),
            color=color,
            ecolor="#555",
            label=column,
        )
    axes.set_yticks(range(len(found)), list(found), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(axis, fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return figure


def _reach(one: Measured) -> tuple[float, float]:
    """Return how far the interval extends below and above the mean."""
    return (0.0, 0.0) if one.low is None or one.high is None else (one.mean - one.low, one.high - one.mean)
