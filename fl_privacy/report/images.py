"""Images in a page, and a picture of many."""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from fl_privacy.files import make_private_folder, write_private
from fl_privacy.results.pictures import Pixels

PAIRS_IN_A_ROW = 4
_LETTERS_IN_AN_INCH = 17.5


def data_uri(image: Pixels) -> str:
    """``image`` as a PNG that fits into a page."""
    file = io.BytesIO()
    Image.fromarray(_rows(image)).save(file, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def grid_picture(
    originals: Sequence[Pixels | None],
    reconstructions: Sequence[Pixels | None],
    captions: Sequence[str],
    path: Path,
    *,
    adaptive: Sequence[Pixels | None] | None = None,
    transformed: Sequence[Pixels | None] | None = None,
) -> None:
    """Write a PNG with original and reconstruction side by side, a caption over each pair, for its owner alone.

    Args:
        originals: what was attacked; ``None`` leaves the place empty.
        reconstructions: of each; likewise.
        captions: one for each pair.
        path: of the PNG.
        adaptive: reconstructions by the adaptive attacker, put beside the others.
        transformed: what the model saw instead of the originals, put between these and the reconstructions.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  (slow to import)

    columns = min(PAIRS_IN_A_ROW, len(originals))
    rows = -(-len(originals) // columns)
    beside = [images for images in (transformed, reconstructions, adaptive) if images is not None]
    width = 1.3 * (1 + len(beside))
    figure = Figure(figsize=(width * columns, 1.6 * rows), layout="constrained", dpi=150)
    cells = figure.subplots(rows, columns, squeeze=False).flatten()
    for cell in cells:
        cell.axis("off")
    for cell, original, others, caption in zip(cells, originals, zip(*beside, strict=True), captions, strict=False):
        like = next((image for image in (original, *others) if image is not None), None)
        if like is None:
            continue
        empty = np.full_like(like, 255)
        gap = np.full_like(like[:, :, : max(1, like.shape[2] // 16)], 255)
        shown = [part for other in others for part in (gap, empty if other is None else other)]
        first = empty if original is None else original
        cell.imshow(_rows(np.concatenate([first, *shown], axis=2)), cmap="gray", vmin=0, vmax=255)
        title = textwrap.fill(caption, round(_LETTERS_IN_AN_INCH * width))
        cell.set_title(title, fontsize=8, parse_math=False)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    make_private_folder(path.parent, path.parent)
    write_private(path, file.getvalue())


def _rows(image: Pixels) -> Pixels:
    """(H, W) or (H, W, 3); channels beyond the third are left out, two are shown as their mean."""
    if image.shape[0] >= 3:
        return np.ascontiguousarray(image[:3].transpose(1, 2, 0))
    return image.astype(np.float32).mean(0).round().astype(np.uint8)
