"""The kinds of examples that clients hold: a row for each, and the one place that tells them apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Modality:
    """A kind of examples. What a layer does otherwise for one of them is a table of its own with these rows as keys.

    Attributes:
        one: what a page calls an example.
        data: what a sentence calls the data.
        metric: by which an example counts as recognizable.
        models: what a sentence says that a model of them is of.
        facts: arguments by which a model's class shows that it is made for such examples.
        remedy: what to choose where the model is of others.
        pixels: whether an example is a picture: inputs in [0, 1] that have neighbors.
        continuous: whether inputs are numbers that can be solved for; else tokens, of which embeddings enter.
    """

    one: str
    data: str
    models: str
    metric: str
    facts: frozenset[str]
    remedy: str
    pixels: bool = False
    continuous: bool = True

    def __repr__(self) -> str:
        """Name the modality."""
        return f"Modality({self.data})"


IMAGES = Modality(
    one="image",
    data="images",
    models="images",
    metric="psnr",
    facts=frozenset({"in_channels", "image_size"}),
    remedy="take model=lenet or another of images",
    pixels=True,
)
TEXTS = Modality(
    one="text",
    data="text",
    models="text",
    metric="token_f1",
    facts=frozenset({"vocabulary_size"}),
    remedy="take model=bert_tiny or another of text",
    continuous=False,
)
ROWS = Modality(
    one="row",
    data="a table",
    models="tables",
    metric="cells_right",
    facts=frozenset({"schema"}),
    remedy="take model=table_mlp or another of tables",
)

MODALITIES = (TEXTS, ROWS, IMAGES)
"""All of them; images last, which examples are that nothing tells apart."""


def modality_of(model: object) -> Modality:
    """Return what ``model`` takes: what it says, rows where it knows their schema, else images."""
    from fl_privacy.types.schema import schema_of  # noqa: PLC0415  (of PyTorch, which names alone do not need)

    said = getattr(model, "modality", None)
    if isinstance(said, Modality):
        return said
    return IMAGES if schema_of(model) is None else ROWS


def modality_of_inputs(inputs: Tensor) -> Modality:
    """Return what a batch of inputs holds: whole numbers (B, L) of tokens, rows (B, F), or images (B, C, H, W)."""
    if not inputs.is_floating_point():
        return TEXTS
    return ROWS if inputs.dim() == 2 else IMAGES


def modality_judged_by(metric: str) -> Modality:
    """Return the kind of examples that counts as recognizable by ``metric``; images for any other."""
    return next((modality for modality in MODALITIES if modality.metric == metric), IMAGES)


BEGINNINGS = ("\u0120", "\u2581")
"""How byte-level and SentencePiece tokenizers write the space before a word."""

_SPACES = str.maketrans({"\u0120": " ", "\u2581": " ", "\u010a": "\n"})


def as_shown(piece: str) -> tuple[str, bool]:
    """Return a token for display, and whether it continues the word before it, where it says so itself."""
    if piece.startswith("##"):
        return piece[2:], True
    readable = piece.translate(_SPACES)
    return readable.strip(" ") or readable, False
