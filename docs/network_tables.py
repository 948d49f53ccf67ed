"""Table of what is reconstructed behind residual networks, from experiments/rows/trained_resnet: means over victims."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kept_rows import NOT_RUN, ROWS, markdown, read_rows

Row = Mapping[str, Any]
HEADS = [
    *("network", "batch norm", "batch", "budget", "victims", "PSNR, dB", "identified among 1,000"),
    *("another client's update, dB", "identified by it", "own mean color, dB", "CPU seconds a victim"),
]
NETWORKS = {
    "trained": "ResNet-20, trained, 91.6 %",
    "resnet32": "ResNet-32, trained, 92.8 %",
    "resnet56": "ResNet-56, trained, 92.7 %",
    "efficientnet": "EfficientNet-Lite0, trained, 224x224",
    "untrained": "ResNet-20, untrained",
    "resnet18": "ResNet-18, untrained",
}


def networks_table(name: str, folder: Path = ROWS) -> str:
    """Render one line for each network, mode of batch norm, batch and budget; "Not run." without rows."""
    kinds: dict[tuple[Any, ...], list[Row]] = {}
    for row in read_rows(name, folder):
        kinds.setdefault((row["network"], row["mode"], row["batch"], row["budget"]), []).append(row)
    lines = [_line(kind, rows) for kind, rows in kinds.items()]
    return markdown(HEADS, lines) if lines else f"{NOT_RUN.capitalize()}."


def _line(kind: tuple[Any, ...], rows: Sequence[Row]) -> list[str]:
    network, mode, batch, budget = kind
    images = sum(row["of"] for row in rows)

    def average(field: str) -> float:
        return float(sum(row[field] for row in rows) / len(rows))

    return [
        NETWORKS[network],
        {"eval": "evaluation", "train": "training"}[mode],
        str(batch),
        budget,
        str(len(rows)),
        f"{average('psnr'):.1f} (least {min(row['psnr'] for row in rows):.1f})",
        f"{sum(row['identified'] for row in rows)} of {images}",
        f"{average('control_psnr'):.1f}",
        f"{sum(row['control_identified'] for row in rows)} of {images}",
        f"{average('mean_color_psnr'):.1f}",
        f"{average('cpu_seconds'):.0f}",
    ]


SHADES = {"none": "#ccd", "some": "#e9b44c", "all": "#c44"}
"""Colors of cells by images identified: none, some, at least half; cells that were not run have none."""

MAPPED = (
    *("MLP", "LeNet", "quickstart's Net", "ViT, 6 blocks", "ResNet-20", "ResNet-18, group norm", "ResNet-18", "VGG-16"),
    *("MobileNetV3", "EfficientNet-B0", "ConvNeXt-tiny", "DenseNet-121"),
)
"""Networks of the map, also those that were not run."""


def map_picture(name: str, folder: Path = ROWS) -> str:
    """Draw a grid of networks by training, each cell with its figure; "Not run." without rows."""
    rows = read_rows(name, folder)
    if not rows:
        return f"{NOT_RUN.capitalize()}."
    kinds = sorted({(r["steps"], r["trained"], r["batch"], r["mode"]) for r in rows})
    heads = [
        f"{'trained' if trained else 'untrained'}, batch {batch}, {steps} step{'s' * (steps > 1)}, norm {mode}"
        for steps, trained, batch, mode in kinds
    ]
    found = {(r["network"], r["steps"], r["trained"], r["batch"], r["mode"]): r for r in rows}
    lines = ["<table>", "<tr><th></th>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    for network in MAPPED:
        cells = "".join(_cell(found.get((network, *kind))) for kind in kinds)
        lines.append(f"<tr><th>{network}</th>{cells}</tr>")
    legend = " ".join(f'<span style="background:{color}">&emsp;</span> {what}' for what, color in SHADES.items())
    return "\n".join(
        [
            *lines,
            "</table>",
            "",
            f"Images identified among 1,000: {legend} (at least half); other cells were {NOT_RUN}.",
        ]
    )


def _cell(row: Row | None) -> str:
    if row is None:
        return f"<td>{NOT_RUN}</td>"
    above = max(0, row["identified"] - row["control_identified"])
    shade = SHADES["none" if not above else "all" if 2 * above >= row["of"] else "some"]
    said = f"{row['identified']} of {row['of']}, control {row['control_identified']}"
    return f'<td style="background:{shade}" title="predicted: {row["predicted"]}">{said}</td>'


def agreement_table(name: str, folder: Path = ROWS) -> str:
    """Compare what was predicted with what was reconstructed; "Not run." without rows."""
    rows = read_rows(name, folder)
    lines = []
    for held_out in (False, True):
        own = [row for row in rows if row["held_out"] is held_out]
        decided = [row for row in own if row["agrees"] is not None]
        wrong = sum(row["predicted"] == "not by these attacks" and row["found"] > 0 for row in own)
        if own:
            right = sum(row["agrees"] for row in decided)
            share = f"{right} of {len(decided)} ({100 * right / max(1, len(decided)):.0f} %)"
            kind = "held out" if held_out else "that the rules were built on"
            lines.append([kind, str(len(own)), str(len(own) - len(decided)), share, str(wrong)])
    heads = ["networks", "cells", "unknown", "of the others, agree", '"not", but reconstructed']
    return markdown(heads, lines) if lines else f"{NOT_RUN.capitalize()}."
