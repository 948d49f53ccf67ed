"""What an attack does otherwise where the clients' examples are texts or rows of a table."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy.attacks.gradient_inversion.embeddings import WordEmbeddings, longest_text
from fl_privacy.attacks.gradient_inversion.settings import Settings
from fl_privacy.attacks.gradient_inversion.starts import Space
from fl_privacy.attacks.gradient_inversion.table_rows import TableRows
from fl_privacy.models import TextModel
from fl_privacy.schema import schema_of
from fl_privacy.types import Observation


def of_modality(settings: Settings, observation: Observation) -> Settings:
    """Adapt ``settings`` to what the model of ``observation`` takes.

    Of texts the embeddings of words are optimized, of tables the shares of categories and numbers, without what is
    known of images.
    """
    if (schema := schema_of(observation.model)) is not None:
        rows = TableRows(schema=schema, bounded=settings.bounded, counted=settings.counted)
        return replace(settings, source=rows, priors=(), projection="none", space=Space())
    if not isinstance(observation.model, TextModel):
        return settings
    values = observation.assumed().parameters[observation.model.word_weight]
    dtype = torch.float64 if settings.dtype == "float64" else torch.float32
    table = values.to(settings.device or values.device, dtype)
    source = WordEmbeddings(table=table, first=settings.start, reading=settings.reading, norm=settings.embedding_norm)
    return replace(settings, source=source, priors=(), projection="none", space=Space())


def as_wide(labels: Tensor | None, longest: int) -> Tensor | None:
    """Pad labels that are next tokens (B, L) to ``longest`` tokens; leave others as they are."""
    if labels is None or labels.dim() != 2 or labels.is_floating_point():
        return labels
    return F.pad(labels, (0, longest - labels.shape[1]), value=-100)


def variables_of_one(first: Observation, others: Sequence[Observation]) -> tuple[int, ...]:
    """Return the shape of one image (C, H, W), or of a text (L, d) as long as the longest of ``others``."""
    if not isinstance(first.model, TextModel):
        return first.input_shape
    return longest_text(others), first.model.words.embedding_dim
