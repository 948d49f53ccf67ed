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


def mean_of(rows: Sequence[Row], field: str) -> float:
    """Average a field over rows."""
    return float(sum(row[field] for row in rows) / len(rows))


def _psnr(rows: Sequence[Row]) -> str:
    return f"{mean_of(rows, 'psnr'):.1f} (least {min(row['psnr'] for row in rows):.1f})"


def _line(kind: tuple[Any, ...], rows: Sequence[Row]) -> list[str]:
    network, mode, batch, budget = kind
    images = sum(row["of"] for row in rows)
    return [
        NETWORKS[network],
        {"eval": "evaluation", "train": "training"}[mode],
        str(batch),
        budget,
        str(len(rows)),
        _psnr(rows),
        f"{sum(row['identified'] for row in rows)} of {images}",
        f"{mean_of(rows, 'control_psnr'):.1f}",
        f"{sum(row['control_identified'] for row in rows)} of {images}",
        f"{mean_of(rows, 'mean_color_psnr'):.1f}",
        f"{mean_of(rows, 'cpu_seconds'):.0f}",
    ]


def leakpro_table(name: str, folder: Path = ROWS) -> str:
    """Render a line for each attack and budget on updates in training mode; "Not run." without rows."""
    kinds: dict[tuple[Any, ...], list[Row]] = {}
    for row in read_rows(name, folder):
        kinds.setdefault((row["network"], row["batch"], f"{row['attack']}, {row['budget']}"), []).append(row)
    found = [(kind, rows, mean_of(rows, "cpu_seconds")) for kind, rows in kinds.items()]
    lines = [
        [
            *(kind[0], str(kind[1]), kind[2], str(len(rows)), _psnr(rows)),
            f"{sum(row['identified'] for row in rows)} of {sum(row['of'] for row in rows)}",
            *(f"{mean_of(rows, field):.1f}" for field in ("control_psnr", "mean_color_psnr")),
            f"{seconds:.0f}",
        ]
        for kind, rows, seconds in sorted(found, key=lambda each: (*each[0][:2], each[2]))
    ]
    heads = ["network", "batch", "attack", *HEADS[4:8], *HEADS[9:]]
    return markdown(heads, lines) if lines else f"{NOT_RUN.capitalize()}."


SHADES = {"none": "#ccd", "some": "#e9b44c", "at least half": "#c44"}
"""Colors of cells by images identified above the control; cells that were not run have none."""

MARKS = {"reconstructible": "R", "not by these attacks": "N", "unknown": "?"}
"""Letters of what was predicted."""

MAPPED = (
    *("logistic regression", "MLP", "MLP, tanh", "LeNet", "LeNet-5, sigmoid", "quickstart's Net", "FedAvg's CNN"),
    *("VGG-11, group norm", "VGG-16", "ResNet-20", "wide ResNet-10", "pre-activation ResNet-14"),
    *("ResNet-18, group norm", "ResNet-18", "DenseNet-121", "MobileNetV3", "EfficientNet-B0"),
    *("ViT, 6 blocks", "Swin, 4 blocks", "MLP-Mixer, 3 blocks", "ConvNeXt, 6 blocks", "ConvNeXt-tiny"),
    *("LSTM over rows", "MLP of four layers, GELU", "MLP, ReLU, two layers", "CNN, one layer", "CNN, two strides"),
    *("CNN, two strides, ELU", "CNN, three strides, tanh", "CNN, leaky ReLU", "CNN, batch norm"),
    *("MNIST example's CNN", "TensorFlow tutorial's CNN", "AlexNet", "ResNet-18, torchvision"),
    *("ResNet-34, torchvision", "MobileNetV2", "RegNetY-400MF"),
)
"""Networks of the map, also those that were not run."""

_FIELDS = ("trained", "mode", "steps", "batch")


def map_picture(name: str, folder: Path = ROWS) -> str:
    """Draw a grid of networks by training, each cell with its figure; "Not run." without rows."""
    rows = read_rows(name, folder)
    if not rows:
        return f"{NOT_RUN.capitalize()}."
    before = {_place(row): row["predicted"] for row in read_rows("predicted_before", folder)}
    kinds = sorted({_place(row)[1:] for row in rows})
    found = {_place(row): row for row in rows}
    said = {place: before.get(place) or row.get("predicted", "unknown") for place, row in found.items()}
    heads = "".join(f"<th>{_head(kind)}</th>" for kind in kinds)
    lines = ['<table class="map">', f"<tr><th></th>{heads}</tr>"]
    for network in MAPPED:
        if any(place[0] == network for place in found):
            places = [(network, *kind) for kind in kinds]
            cells = "".join(_cell(found.get(place), said.get(place, "")) for place in places)
            held = " *" * any(place in before for place in places)
            lines.append(f"<tr><th>{network}{held}</th>{cells}</tr>")
    legend = " ".join(f'<span style="background:{color}">&emsp;</span> {what}' for what, color in SHADES.items())
    letters = ", ".join(f"{mark} {outcome}" for outcome, mark in MARKS.items())
    left_out = [network for network in MAPPED if all(place[0] != network for place in found)]
    return "\n".join(
        [
            *lines,
            "</table>",
            "",
            f"Images identified among 1,000, of all attacked: {legend}. Predicted: {letters}; of networks with a star,"
            f" before the attack. Empty cells were {NOT_RUN}{_also(left_out)}.",
        ]
    )


def _also(networks: Sequence[str]) -> str:
    return f", nor were {'; '.join(networks)}" if networks else ""


def _place(row: Row) -> tuple[Any, ...]:
    return (row["network"], *(row[field] for field in _FIELDS))


def _head(kind: tuple[Any, ...]) -> str:
    trained, mode, steps, batch = kind
    values = "trained" if trained else "untrained"
    return f"batch {batch}<br>{steps} step{'s' * (steps > 1)}<br>norm {mode}<br>{values}"


def _cell(row: Row | None, predicted: str) -> str:
    if row is None:
        return "<td></td>"
    above = max(0, row["identified"] - row["control_identified"])
    shade = SHADES["none" if not above else "at least half" if 2 * above >= row["of"] else "some"]
    control = f", control {row['control_identified']}" * bool(row["control_identified"])
    title = f"predicted: {predicted}; {row['psnr']:.1f} dB, control {row['control_psnr']:.1f} dB"
    words = f"{row['identified']} of {row['of']}{control} {MARKS[predicted]}"
    return f'<td style="background:{shade};color:#111" title="{title}">{words}</td>'


def agreement_table(name: str, folder: Path = ROWS) -> str:
    """Compare what was predicted with what was reconstructed; "Not run." without rows."""
    rows = read_rows(name, folder)
    lines = []
    for version in dict.fromkeys(row.get("version", "") for row in rows):
        own = [row for row in rows if row.get("version", "") == version]
        decided = [row for row in own if row["agrees"] is not None]
        wrong = sum(row["predicted"] == "not by these attacks" and row["found"] > 0 for row in own)
        if own:
            right = sum(row["agrees"] for row in decided)
            share = f"{right} of {len(decided)} ({100 * right / max(1, len(decided)):.0f} %)"
            kind = f"held out of the {version} rules" if version else "that the rules were built on"
            lines.append([kind, str(len(own)), str(len(own) - len(decided)), share, str(wrong)])
    heads = ["networks", "cells", "unknown", "of the others, agree", '"not", but reconstructed']
    return markdown(heads, lines) if lines else f"{NOT_RUN.capitalize()}."
