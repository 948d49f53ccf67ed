"""Images in a page, and a picture of many."""

import base64
import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.files import make_private_folder, write_private
from fl_privacy.types import Reconstruction

PAIRS_IN_A_ROW = 4
SHOWN_HEIGHT = 128
"""Pixels to which small images are enlarged at least, where they are shown in a notebook."""

_LETTERS_IN_AN_INCH = 17.5


def data_uri(image: Tensor) -> str:
    """(C, H, W) uint8, grey or color, as a PNG that fits into a page."""
    file = io.BytesIO()
    Image.fromarray(_pixels(image).numpy()).save(file, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def grid_picture(
    originals: Sequence[Tensor | None],
    reconstructions: Sequence[Tensor | None],
    captions: Sequence[str],
    path: Path,
    *,
    adaptive: Sequence[Tensor | None] | None = None,
    transformed: Sequence[Tensor | None] | None = None,
) -> None:
    """Write a PNG with original and reconstruction side by side, a caption over each pair, for its owner alone.

    Args:
        originals: (C, H, W) uint8 each; ``None`` leaves the place empty.
        reconstructions: likewise; ``None`` leaves the place empty.
        captions: one for each pair.
        path: of the PNG.
        adaptive: reconstructions by the adaptive attacker, put beside the others.
        transformed: what the model saw instead of the originals, put between these and the reconstructions.
    """
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
        empty = torch.full_like(like, 255)
        gap = torch.full_like(like[:, :, : max(1, like.shape[2] // 16)], 255)
        shown = [part for other in others for part in (gap, empty if other is None else other)]
        first = empty if original is None else original
        cell.imshow(_pixels(torch.cat([first, *shown], dim=2)).numpy(), cmap="gray", vmin=0, vmax=255)
        title = textwrap.fill(caption, round(_LETTERS_IN_AN_INCH * width))
        cell.set_title(title, fontsize=8, parse_math=False)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    make_private_folder(path.parent, path.parent)
    write_private(path, file.getvalue())


def show(found: Reconstruction | Sequence[Reconstruction], originals: Tensor | None = None) -> Image.Image:
    """Reconstructions in a row, over their ``originals`` (B, C, H, W) in [0, 1] where given: a picture that notebooks
    show by themselves.

    Raises:
        UserError: an attack failed, with its reason.
    """
    found = [found] if isinstance(found, Reconstruction) else found
    batches = []
    for one in found:
        if one.batch is None:
            raise UserError(f"A reconstruction is expected, but the attack failed: {one.failure}")
        batches.append(one.batch.inputs.detach().cpu().float())
    rows = [torch.cat(batches)] if originals is None else [originals.detach().cpu().float(), torch.cat(batches)]
    lines = [torch.cat(list(torch.nn.functional.pad(row.clamp(0, 1), (1, 1, 1, 1), value=1.0)), 2) for row in rows]
    width = max(line.shape[2] for line in lines)
    padded = [torch.nn.functional.pad(line, (0, width - line.shape[2]), value=1.0) for line in lines]
    picture = Image.fromarray(_pixels((torch.cat(padded, 1) * 255).round().to(torch.uint8)).numpy())
    larger = max(1, SHOWN_HEIGHT * len(rows) // picture.height)
    return picture.resize((picture.width * larger, picture.height * larger), Image.Resampling.NEAREST)


def _pixels(image: Tensor) -> Tensor:
    """(H, W) or (H, W, 3); channels beyond the third are left out, two are shown as their mean."""
    if image.shape[0] >= 3:
        return image[:3].permute(1, 2, 0).contiguous()
    return image.float().mean(0).round().to(torch.uint8)
