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
