"""Modalities (images, texts, table rows), and inference of the modality of a model or batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Modality:
    """Kind of examples (images, texts or table rows): words for it, metric, loader and properties."""

    one: str
    data: str
    models: str
    metric: str  # metric by which an example counts as recognizable
    loader: str  # name of the function of ``fl_privacy.data`` that loads such examples
    facts: frozenset[str]  # constructor arguments by which a model class is recognized as one for such examples
    remedy: str  # advice if the model does not take such examples
    pixels: bool = False  # ``True`` for pictures: inputs in [0, 1] with neighbors
    continuous: bool = True  # ``True`` for numeric inputs, ``False`` for tokens

    def __repr__(self) -> str:
        return f"Modality({self.data})"


IMAGES = Modality(
    one="image",
    data="images",
    models="images",
    metric="psnr",
    loader="load_data",
    facts=frozenset({"in_channels", "image_size"}),
    remedy="take model=lenet or another of images",
    pixels=True,
)
TEXTS = Modality(
    one="text",
    data="text",
    models="text",
    metric="token_f1",
    loader="load_text",
    facts=frozenset({"vocabulary_size"}),
    remedy="take model=bert_tiny or another of text",
    continuous=False,
)
ROWS = Modality(
    one="row",
    data="a table",
    models="tables",
    metric="cells_right",
    loader="load_table",
    facts=frozenset({"schema"}),
    remedy="take model=table_mlp or another of tables",
)

MODALITIES = (TEXTS, ROWS, IMAGES)  # all modalities, with the default, images, last


def modality_of(model: object) -> Modality:
    """Return the modality of ``model``: its attribute ``modality``, else rows if it has a schema, else images."""
    from fl_privacy.types.schema import schema_of  # noqa: PLC0415  (of PyTorch, which names alone do not need)

    said = getattr(model, "modality", None)
    if isinstance(said, Modality):
        return said
    return IMAGES if schema_of(model) is None else ROWS


def modality_of_inputs(inputs: Tensor) -> Modality:
    """Return the modality of ``inputs``: whole numbers are texts, floats (B, F) rows, other floats images."""
    if not inputs.is_floating_point():
        return TEXTS
    return ROWS if inputs.dim() == 2 else IMAGES


def modality_judged_by(metric: str) -> Modality:
    """Return the modality whose metric is ``metric``, else images."""
    return next((modality for modality in MODALITIES if modality.metric == metric), IMAGES)


BEGINNINGS = ("\u0120", "\u2581")
"""Characters that mark the space before a word in byte-level and SentencePiece tokenizers."""

_SPACES = str.maketrans({"\u0120": " ", "\u2581": " ", "\u010a": "\n"})


def as_shown(piece: str) -> tuple[str, bool]:
    """Return a token's text for display, and ``True`` if it is marked as the continuation of a word."""
    if piece.startswith("##"):
        return piece[2:], True
    readable = piece.translate(_SPACES)
    return readable.strip(" ") or readable, False
