"""Show reconstructions in a notebook."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.measure.matching import assign
from fl_privacy.types import Batch, Reconstruction

SHOWN_HEIGHT = 128  # least height in pixels of small images after enlargement
_BEYOND = 0.01  # rounding error of pixels outside [0, 1]


def show(found: Reconstruction | Sequence[Reconstruction], originals: Any = None) -> Image.Image:
    """Return a picture of reconstructions in a row, below their ``originals`` (B, C, H, W) if given.

    Values outside [0, 1] are scaled by their range; volumes (B, C, D, H, W) show their middle slice. ``UserError`` if
    an attack failed, or the inputs are no images.
    """
    found = [found] if isinstance(found, Reconstruction) else found
    batches = []
    for one in found:
        if one.batch is None:
            raise UserError(f"A reconstruction is expected, but the attack failed ({one.failure}); leave it out.")
        batches.append(one.batch.inputs.detach().cpu().float())
    sizes = {tuple(batch.shape[1:]) for batch in batches}
    if len(sizes) > 1:
        raise UserError(f"Images of one shape are expected, but got {sorted(sizes)}; show them one after the other.")
    rows = [torch.cat(batches)]
    if originals is not None:
        given = originals.inputs if isinstance(originals, Batch) else torch.as_tensor(originals)
        rows.insert(0, given.detach().cpu().float())
    rows = [_images(row) for row in rows]
    if originals is not None:
        rows[1] = _matched_guesses(rows[0], rows[1], [len(batch) for batch in batches])
    # scale ``rows`` to [0, 1] together if they clearly are not
    low, high = (float(of(torch.stack([of(row) for row in rows]))) for of in (torch.min, torch.max))
    if not (low >= -_BEYOND and high <= 1 + _BEYOND):
        rows = [(row - low) / max(high - low, _BEYOND) for row in rows]
    lines = [torch.cat(list(torch.nn.functional.pad(row.clamp(0, 1), (1, 1, 1, 1), value=1.0)), 2) for row in rows]
    width = max(line.shape[2] for line in lines)
    padded = [torch.nn.functional.pad(line, (0, width - line.shape[2]), value=1.0) for line in lines]
    pixels = (torch.cat(padded, 1) * 255).round().byte()
    shown = pixels[:3].permute(1, 2, 0) if pixels.shape[0] >= 3 else pixels.float().mean(0).round().byte()
    picture = Image.fromarray(shown.contiguous().numpy())
    larger = max(1, SHOWN_HEIGHT * len(rows) // picture.height)
    return picture.resize((picture.width * larger, picture.height * larger), Image.Resampling.NEAREST)


def _matched_guesses(originals: Tensor, guesses: Tensor, sizes: Sequence[int]) -> Tensor:
    if originals.shape[1:] != guesses.shape[1:]:
        return guesses
    sizes = list(sizes) if sum(sizes) == len(originals) else [len(guesses)]
    made = []
    parts = [originals] if len(sizes) == 1 else originals.split(sizes)
    for own, found in zip(parts, guesses.split(sizes), strict=True):
        order = assign(found, own).tolist()
        made += [found[at] if at >= 0 else torch.ones_like(found[0]) for at in order]
        made += [found[at] for at in range(len(found)) if at not in order]
    return torch.stack(made)


def _images(inputs: Tensor) -> Tensor:
    if inputs.dim() == 3:
        inputs = inputs.unsqueeze(1)
    if inputs.dim() == 5:
        inputs = inputs[:, :, inputs.shape[2] // 2]
    if inputs.dim() != 4:
        raise UserError(
            f"Images (B, C, H, W), gray ones (B, H, W) or volumes (B, C, D, H, W) are expected, but got inputs"
            f" {tuple(inputs.shape)}; look at found.batch.inputs."
        )
    return inputs
