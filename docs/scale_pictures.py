"""``make results`` draws with it how figures that are not reproduced move with scale, beside the published ones.

A panel for each: what was measured after so much training, or of so many images, from the figures that stand in the
tables; dashed is what the paper has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kept_rows import Kept, Measured
from paper_tables import Paper

NAME = "scales"
COLORS = ("#2b63d9", "#c44", "#2a9d6f", "#a6761d", "#777")


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves over a scale: of each, the lines of a table by their place on it.

    Attributes:
        title: of the panel.
        table: ``paper/table``.
        scale: what grows, with its unit.
        column: of the table.
        curves: name -> place on the scale -> line.
        published: name -> the paper's figure.
        columns: place on the scale -> column, where that is another than ``column``.
    """

    title: str
    table: str
    scale: str
    column: str
    curves: Mapping[str, Mapping[float, str]]
    published: Mapping[str, float] = field(default_factory=dict)
    columns: Mapping[float, str] = field(default_factory=dict)


LAYERS = ("first", "second", "third", "fourth")
PANELS: tuple[Panel, ...] = (
    Panel(
        title="SPN, Figure 4: cosine of both gradients",
        table="spn/cosine",
        scale="steps of training",
        column="cosine",
        curves={f"{each} convolution": dict.fromkeys((0, 100, 300), f"{each} convolution") for each in LAYERS},
        columns={0: "cosine", 100: "trained", 300: "longer"},
        published={
            "first convolution": -0.0033,
            "second convolution": 0.176,
            "third convolution": 0.0243,
            "fourth convolution": 0.1861,
        },
    ),
    *(
        Panel(
            title=f"SPN, Table 11: accuracy, {title}, %",
            table="spn/accuracies",
            scale="turns of each client (the paper: 300)",
            column=data,
            curves={name: {1: f"{name}, 1 turn", 3: f"{name}, 3 turns", 30: name} for name in ("SPN, 0.1", "DP, 0.1")},
            published=published,
        )
        for title, data, published in (
            ("digits", "mnist", {"SPN, 0.1": 99.27, "DP, 0.1": 97.57}),
            ("CIFAR-10", "cifar10", {"SPN, 0.1": 68.97, "DP, 0.1": 58.08}),
        )
    ),
    Panel(
        title="SAPAG, Table III: words read, token F1, %",
        table="sapag/text",
        scale="iterations",
        column="mean",
        curves={
            "SAPAG": {n: f"SAPAG, {n:,} iterations" for n in (30, 100, 1000)},
            "DLG with AdamW": {n: f"DLG with AdamW, {n:,} iterations" for n in (30, 100, 1000)},
        },
        published={"SAPAG": 77.4, "DLG with AdamW": 32.0},
    ),
    Panel(
        title="ATS, Table 4: Adam with the cosine, PSNR, dB",
        table="ats/course",
        scale="epochs of a LeNet (the paper: 200 of a ResNet-20)",
        column="psnr",
        curves={
            name: dict.fromkeys((2, 8, 30), name)
            for name in ("standard", "Gaussian noise, 1e-2", "pruning, 0.7", "pruning, 0.99")
        },
        columns={2: "two", 8: "psnr", 30: "thirty"},
        published={"standard": 12.11, "Gaussian noise, 1e-2": 10.09, "pruning, 0.7": 10.21, "pruning, 0.99": 9.59},
    ),
    Panel(
        title="ATS, Table 2: plain images, PSNR, dB",
        table="ats/widths",
        scale="width of a ResNet-20, untrained (the paper: 64, trained)",
        column="psnr",
        curves={"standard": {width: f"width {width}" for width in (16, 32, 64)}},
        published={"standard": 12.11},
    ),
    Panel(
        title="Refiner, Table 13: distance to the gradient, in its lengths",
        table="refiner/text_course",
        scale="steps of training (the paper: fine-tuned to 91 %)",
        column="error",
        curves={
            name: {0: f"{name}, untrained", 1000: f"{name}, 1,000 steps", 3000: f"{name}, 3,000 steps"}
            for name in ("Refiner, 0.05", "pruning, 0.2")
        },
    ),
    *(
        Panel(
            title=f"FDL-PP, Table 1, CIFAR-10: {title}",
            table="fdl_pp/bpmse_cifar10_started",
            scale="rounds on 5,000 images (the paper: 200 on 50,000)",
            column=column,
            curves={
                "FDL-PP": {n: f"FDL-PP, round {n}" for n in (1, 8, 16)},
                "SplitFed": {n: f"SplitFed, round {n}" for n in (1, 8)},
            },
            published=published,
        )
        for title, column, published in (
            ("accuracy, %", "accuracy", {"FDL-PP": 87.6, "SplitFed": 87.9}),
            ("BPMSE under inversion", "mi", {"FDL-PP": 0.093, "SplitFed": 0.018}),
        )
    ),
)


Found = Mapping[str, Mapping[float, Measured]]


def found_of(panel: Panel, papers: Sequence[Paper], kept: Kept) -> Found:
    """Look up the measured figures of a panel's curves."""
    table = next(t for paper in papers for t in paper.tables if f"{paper.name}/{t.name}" == panel.table)
    read = {
        name: {place: table.read(kept, line, panel.columns.get(place, panel.column)) for place, line in curve.items()}
        for name, curve in panel.curves.items()
    }
    return {name: {place: one for place, one in curve.items() if one} for name, curve in read.items()}


def there(papers: Sequence[Paper], kept: Kept) -> list[tuple[Panel, Found]]:
    """List the panels that have three measured places on a curve, with their figures."""
    every = [(panel, found_of(panel, papers, kept)) for panel in PANELS]
    return [(panel, found) for panel, found in every if any(len(curve) > 2 for curve in found.values())]


def draw_scales(papers: Sequence[Paper], kept: Kept, folder: Path) -> None:
    """Write the picture of all panels that are there; take it away where none is."""
    path = folder / f"{NAME}.png"
    path.unlink(missing_ok=True)
    if panels := there(papers, kept):
        draw(panels).savefig(path, metadata={"Software": None}, pil_kwargs={"optimize": True})


def draw(panels: Sequence[tuple[Panel, Found]]) -> Any:
    """Draw two panels in a row."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    rows = (len(panels) + 1) // 2
    figure = Figure(figsize=(7.6, 2.7 * rows), dpi=110, layout="constrained", facecolor="white")
    places = figure.subplots(rows, 2, squeeze=False).flatten()
    for axes, (panel, found) in zip(places, panels, strict=False):
        _draw_panel(axes, panel, found)
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    return figure


def _draw_panel(axes: Any, panel: Panel, found: Found) -> None:
    every = sorted({place for curve in panel.curves.values() for place in curve})
    for (name, curve), color in zip(found.items(), COLORS, strict=False):
        places = [every.index(place) for place in curve]
        means = [one.mean for one in curve.values()]
        axes.plot(places, means, "-o", color=color, label=name, markersize=4, linewidth=1.4)
        for place, one in zip(places, curve.values(), strict=True):
            if one.low is not None and one.high is not None:
                axes.plot([place, place], [one.low, one.high], color=color, linewidth=0.8)
        if name in panel.published:
            axes.axhline(panel.published[name], color=color, linestyle="--", linewidth=0.9)
    axes.set_xticks(range(len(every)), [f"{place:,g}" for place in every], fontsize=7)
    axes.set_xlabel(panel.scale, fontsize=7)
    axes.set_title(panel.title, fontsize=8, loc="left")
    axes.tick_params(axis="y", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=6.5)
