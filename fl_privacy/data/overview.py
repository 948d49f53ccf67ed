"""A table and a picture of who has what."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fl_privacy.data.examples import Examples
from fl_privacy.data.source import require

_NAMED_CLIENTS = 30
_NAMED_CLASSES = 20


def partition_table(examples: Examples, parts: Sequence[Tensor]) -> Tensor:
    """How many examples of each class each client has.

    Args:
        examples: the set that was shared out.
        parts: for each client (N_i,) indices.

    Returns:
        (clients, K) int64.
    """
    return torch.stack([examples.labels[part].bincount(minlength=examples.num_classes) for part in parts])


def partition_picture(table: Tensor, class_names: Sequence[str], path: str | Path) -> None:
    """Draw ``table`` as a stacked bar for each client into a PNG.

    Args:
        table: (clients, K) from ``partition_table``.
        class_names: K names.
        path: of the picture; its format follows the suffix.
    """
    figure_module, ticker = require("matplotlib.figure"), require("matplotlib.ticker")
    clients, classes = table.shape
    height = 1.4 + max(1.2, min(clients, _NAMED_CLIENTS) * 0.26 + max(0, clients - _NAMED_CLIENTS) * 0.06)
    figure = figure_module.Figure(figsize=(9, height), dpi=120, layout="constrained")
    axes = figure.subplots()
    colors = _colors(classes)
    left = torch.zeros(clients, dtype=table.dtype)
    rows = range(clients)
    for label, counts in enumerate(table.unbind(1)):
        axes.barh(rows, counts.tolist(), left=left.tolist(), height=0.82, color=colors[label], label=class_names[label])
        left = left + counts
    axes.set_ylim(clients - 0.5, -0.5)
    axes.yaxis.set_major_locator(ticker.MaxNLocator(nbins=_NAMED_CLIENTS, integer=True, steps=[1, 5, 10]))
    axes.set(xlabel="examples", ylabel="client")
    axes.margins(x=0.02)
    axes.grid(axis="x", color="0.85", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if classes <= _NAMED_CLASSES:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize="small")
    else:
        axes.set_title(
            f"{classes} classes, {class_names[0]} to {class_names[-1]}, from dark to light", fontsize="small"
        )
    figure.savefig(path)


def _colors(classes: int) -> list[tuple[float, ...]]:
    maps = require("matplotlib").colormaps
    if classes <= 10:
        return [maps["tab10"](label) for label in range(classes)]
    if classes <= _NAMED_CLASSES:
        return [maps["tab20"](label) for label in range(classes)]
    return [maps["viridis"](label / (classes - 1)) for label in range(classes)]
