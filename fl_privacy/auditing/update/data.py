"""A site's own examples, as truth, distractors and controls of an audit of its update."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fl_privacy.data.images import decode_images
from fl_privacy.data.sources import IMAGE_SUFFIXES
from fl_privacy.errors import UserError
from fl_privacy.files.foreign import expanded, read_text
from fl_privacy.files.updates import read_arrays
from fl_privacy.types.modality import IMAGES, ROWS, Modality

_INPUTS, _LABELS = ("inputs", "images", "x", "X", "data", "features"), ("labels", "y", "targets", "label")
MOST_EXAMPLES = 20_000


@dataclass(frozen=True, eq=False)
class OwnExamples:
    """Images (N, C, H, W) in [0, 1], rows (N, F), or texts (N, L) padded with -1, and their classes (N,), if known."""

    inputs: Tensor
    labels: Tensor | None = None


def read_examples(place: Path, kind: Modality, channels: int, shape: tuple[int, ...] | None) -> OwnExamples:
    """Read a folder of images (in folders by class, or not), a table ``.csv``, or a file with ``inputs``, ``labels``.

    A table's last column is the class if it has one column more than the network takes.

    Raises:
        UserError: there are no examples, or not such as the network takes.
    """
    place = expanded(place)
    if place.is_dir():
        files = sorted(path for path in place.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
        if kind is not IMAGES or not files:
            raise UserError(f"{place} is expected to hold {kind.data}, but holds none that are read; give one file.")
        folders = sorted({path.parent for path in files} - {place})
        labels = [folders.index(path.parent) for path in files] if len(folders) > 1 else None
        side = shape[1] if shape is not None and shape[1] == shape[2] else None
        cells = [{"bytes": None, "path": str(path)} for path in files[:MOST_EXAMPLES]]
        images = decode_images(cells, len(cells), image_size=side, channels=channels, fit="resize", name=place.name)
        return _checked(OwnExamples(images.float() / 255, _numbers(labels)), place, shape)
    if place.suffix.lower() == ".csv":
        return _checked(_table(place, channels), place, shape)
    arrays = read_arrays(place).arrays
    inputs = next((arrays[name] for name in _INPUTS if name in arrays), None)
    if inputs is None or inputs.dim() < 2 or not len(inputs):
        raise UserError(
            f"{place} is expected to hold an array {_INPUTS[0]} (N, ...), but has {', '.join(arrays)[:80]}."
        )
    inputs = inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs
    inputs = inputs.float() if kind is IMAGES or kind is ROWS else inputs.long()
    labels = next((arrays[name].long().flatten() for name in _LABELS if name in arrays), None)
    return _checked(OwnExamples(inputs[:MOST_EXAMPLES], labels), place, shape)


def _table(place: Path, width: int) -> OwnExamples:
    lines = [line.split(",") for line in read_text(place).splitlines() if line.strip()]
    try:
        values = np.array([[float(cell) for cell in line] for line in lines[1:]], dtype=np.float64)
    except ValueError as error:
        raise UserError(
            f"{place} is expected to hold numbers below a line of names, but {error}; encode it."
        ) from error
    found = torch.from_numpy(values).float() if values.ndim == 2 else torch.empty(0, 0)
    if not len(found) or found.shape[1] not in (width, width + 1):
        raise UserError(
            f"{place} is expected to have {width} columns of features, and one of classes if they are known, but has"
            f" {found.shape[1]}; give the columns that enter the network."
        )
    return OwnExamples(found[:, :width], found[:, width].long() if found.shape[1] > width else None)


def _checked(found: OwnExamples, place: Path, shape: tuple[int, ...] | None) -> OwnExamples:
    if shape is not None and tuple(found.inputs.shape[1:]) != shape:
        raise UserError(
            f"{place} is expected to hold examples of shape {shape}, but holds {tuple(found.inputs.shape[1:])}; give"
            " --shape, or the examples as they enter the network."
        )
    if not bool(found.inputs.isfinite().all()):
        raise UserError(f"{place} is expected to hold finite numbers, but holds others; leave such examples out.")
    if found.labels is not None and len(found.labels) != len(found.inputs):
        raise UserError(f"{place} is expected to hold a class for each example, but holds {len(found.labels)}.")
    return found


def _numbers(labels: list[int] | None) -> Tensor | None:
    return None if labels is None else torch.tensor(labels[:MOST_EXAMPLES])
