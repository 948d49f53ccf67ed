"""Reconstructions in a notebook."""

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.types import Reconstruction

SHOWN_HEIGHT = 128
"""Pixels to which small images are enlarged at least."""


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
    pixels = (torch.cat(padded, 1) * 255).round().byte()
    shown = pixels[:3].permute(1, 2, 0) if pixels.shape[0] >= 3 else pixels.float().mean(0).round().byte()
    picture = Image.fromarray(shown.contiguous().numpy())
    larger = max(1, SHOWN_HEIGHT * len(rows) // picture.height)
    return picture.resize((picture.width * larger, picture.height * larger), Image.Resampling.NEAREST)
