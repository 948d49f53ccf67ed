"""A site's own examples, as truth, distractors and controls of an audit of its update."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fl_privacy.data.images import decode_images
from fl_privacy.data.sources import IMAGE_SUFFIXES
from fl_privacy.errors import UserError
from fl_privacy.files.foreign import read_text
from fl_privacy.files.updates import read_arrays
from fl_privacy.types.modality import IMAGES, Modality

_INPUTS, _LABELS = ("inputs", "images", "x", "X", "data", "features"), ("labels", "y", "targets", "label")
MOST_EXAMPLES = 20_000


@dataclass(frozen=True, eq=False)
class OwnExamples:
    """Images (N, C, H, W) in [0, 1], rows (N, F), or texts (N, L) padded with -1, and their classes (N,), if known."""

    inputs: Tensor
    labels: Tensor | None = None


def place_of(data: Path, update: str) -> Path:
    """Return the folder or file of ``data`` named like the update, or ``data`` itself."""
    return next((path for path in (data / update, *data.glob(f"{update}.*")) if path.exists()), data)


def read_examples(place: Path, *, kind: Modality, width: int, shape: tuple[int, ...] | None) -> OwnExamples:
    """Read a folder of images (in folders by class, or not), a table ``.csv``, or a file with ``inputs``, ``labels``.

    A table's last column is the class if it has one column more than the ``width`` that the network takes.

    Raises:
        UserError: there are no examples, or not such as the network takes.
    """
    if place.is_dir():
        found = _images(place, kind, width, shape)
    else:
        found = _table(place, width) if place.suffix.lower() == ".csv" else _arrays(place, kind)
    if shape is not None and tuple(found.inputs.shape[1:]) != shape:
        raise UserError(
            f"{place} is expected to hold examples of shape {shape}, but holds {tuple(found.inputs.shape[1:])}; give"
            " --shape, or the examples as they enter the network."
        )
    labels = found.labels
    if not bool(found.inputs.isfinite().all()) or (labels is not None and len(labels) != len(found.inputs)):
        raise UserError(f"{place} is expected to hold finite numbers and a class for each example; correct it.")
    return OwnExamples(found.inputs[:MOST_EXAMPLES], None if labels is None else labels[:MOST_EXAMPLES])


def _images(place: Path, kind: Modality, channels: int, shape: tuple[int, ...] | None) -> OwnExamples:
    files = sorted(path for path in place.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
    if kind is not IMAGES or not files:
        raise UserError(f"{place} is expected to hold {kind.data}, but holds none that are read; give one file.")
    files, folders = files[:MOST_EXAMPLES], sorted({path.parent for path in files} - {place})
    side = shape[1] if shape is not None and shape[1] == shape[2] else None
    cells = [{"bytes": None, "path": str(path)} for path in files]
    images = decode_images(cells, len(cells), image_size=side, channels=channels, fit="resize", name=place.name)
    labels = torch.tensor([folders.index(path.parent) for path in files]) if len(folders) > 1 else None
    return OwnExamples(images.float() / 255, labels)


def _arrays(place: Path, kind: Modality) -> OwnExamples:
    arrays = read_arrays(place).arrays
    inputs = next((arrays[name] for name in _INPUTS if name in arrays), None)
    if inputs is None or inputs.dim() < 2 or not len(inputs):
        raise UserError(
            f"{place} is expected to hold an array {_INPUTS[0]} (N, ...), but has {', '.join(arrays)[:80]}."
        )
    inputs = inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs
    labels = next((arrays[name].long().flatten() for name in _LABELS if name in arrays), None)
    return OwnExamples(inputs.float() if kind.continuous else inputs.long(), labels)


def _table(place: Path, width: int) -> OwnExamples:
    lines = [line.split(",") for line in read_text(place).splitlines()[1:] if line.strip()]
    try:
        found = torch.tensor([[float(cell) for cell in line] for line in lines])
    except ValueError as error:
        raise UserError(
            f"{place} is expected to hold numbers below a line of names, but {error}; encode it."
        ) from error
    if found.dim() != 2 or found.shape[1] not in (width, width + 1):
        raise UserError(
            f"{place} is expected to have {width} columns of features, and one of classes if they are known, but has"
            f" {len(lines[0]) if lines else 0}; give the columns that enter the network."
        )
    return OwnExamples(found[:, :width], found[:, width].long() if found.shape[1] > width else None)
