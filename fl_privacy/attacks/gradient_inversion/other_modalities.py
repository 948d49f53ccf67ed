"""The parts of gradient inversion that differ between images, texts and rows."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.attacks.gradient_inversion.embeddings import WordEmbeddings, longest_text
from fl_privacy.attacks.gradient_inversion.settings import Settings, Space, scaled_to_range
from fl_privacy.attacks.gradient_inversion.table_rows import TableRows, pool
from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError
from fl_privacy.models import TextModel
from fl_privacy.types import Observation
from fl_privacy.types.film import Snapshot
from fl_privacy.types.modality import IMAGES, ROWS, TEXTS, Modality, modality_of
from fl_privacy.types.schema import Schema, schema_of

_PROXIES, _CONTRAST = 64, 0.25
"""Inputs of each kind that stand for an unknown client's, and the standard deviation of their pixels."""


@dataclass(frozen=True, eq=False)
class Restarted:
    """Result of one attempt at a victim's examples: ``images`` (B, ...) and ``labels`` (B,) or (B, K)."""

    restart: int
    loss: float
    accepted: bool
    images: Tensor
    labels: Tensor
    history: tuple[float, ...]
    film: tuple[Snapshot, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Search:
    """The search for examples of one kind.

    Attributes:
        adapted: (settings, observation) -> settings for such examples.
        variables_of_one: (observation, all of its group) -> shape of one example's variables.
        input_of_one: (observation) -> shape of one example at the model's input.
        trial: random numbers (..., *input) -> inputs.
        matched: (names, model) -> names of the tensors to compare.
        proxies: (model, shape, rng) -> inputs that stand for an unknown client's.
        corrects: ``True`` draws the model's mean answer to proxies to equal shares.
        read: (settings, result) -> examples to report.
        answer: (settings, attempts, the chosen one) -> examples, and their cells' certainty or ``None``.
        elementwise_parts: ``True`` compares weights of linear layers a few victims at a time.
        completed: ``True`` infers what is undisclosed of a client first.
        varies: reason why nothing can be compiled, or empty.
    """

    adapted: Callable[[Settings, Observation], Settings] = lambda settings, observation: settings
    variables_of_one: Callable[[Observation, Sequence[Observation]], tuple[int, ...]] = lambda o, _: o.input_shape
    input_of_one: Callable[[Observation], tuple[int, ...]] = lambda observation: observation.input_shape
    trial: Callable[[Tensor], Tensor] = lambda drawn: drawn
    matched: Callable[[Sequence[str], nn.Module], list[str]] = lambda names, _: list(names)
    proxies: Callable[[nn.Module, tuple[int, ...], torch.Generator], Tensor]
    corrects: bool = True
    read: Callable[[Settings, Tensor], Tensor]
    answer: Callable[[Settings, Sequence[Restarted], Restarted], tuple[Tensor, Tensor | None]] = (
        lambda settings, attempts, chosen: (chosen.images, None)
    )
    elementwise_parts: bool = False
    completed: bool = True
    filmed: bool = True
    varies: str = ""


def search_of(model: object) -> Search:
    """Return the search for the kind of examples that ``model`` takes."""
    return SEARCHES[modality_of(model)]


def as_wide(labels: Tensor | None, longest: int) -> Tensor | None:
    """Pad labels that are next tokens (B, L) to ``longest`` tokens; others stay."""
    if labels is None or labels.dim() != 2 or labels.is_floating_point():
        return labels
    return F.pad(labels, (0, longest - labels.shape[1]), value=-100)


def _proxy_images(model: nn.Module, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    if len(shape) != 3:
        raise NotAttackableError(
            f"Images (C, H, W) are expected, but the model takes inputs of shape {shape}; give the columns of rows by"
            " a schema, or reshape other inputs to images of one channel in front of the model."
        )
    return torch.cat([torch.rand((_PROXIES, *shape), generator=rng), _natural_noise(shape, rng)])


def _natural_noise(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Draw images (N, C, H, W), mostly gray, with amplitudes by frequency as in photographs."""
    height, width = shape[-2:]
    rows, columns = torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None]
    amplitude = (rows.square() + columns.square()).clamp_min(1 / max(height, width) ** 2).rsqrt()
    gray = torch.randn((_PROXIES, 1, height, width), generator=rng)
    colored = gray + 0.3 * torch.randn((_PROXIES, *shape), generator=rng)
    waves: Tensor = torch.fft.irfft2(torch.fft.rfft2(colored) * amplitude, s=(height, width))
    return torch.clamp(0.5 + _CONTRAST * waves / waves.flatten(1).std(1)[:, None, None, None], 0, 1)


def _seeking_words(settings: Settings, observation: Observation) -> Settings:
    values = observation.assumed().parameters[_text_model(observation.model).word_weight]
    dtype = torch.float64 if settings.dtype == "float64" else torch.float32
    table = values.to(settings.device or values.device, dtype)
    source = WordEmbeddings(table=table, first=settings.start, reading=settings.reading, norm=settings.embedding_norm)
    return replace(settings, source=source, priors=(), projection="none", space=Space())


def _text_model(model: nn.Module) -> TextModel:
    assert isinstance(model, TextModel)
    return model


def _schema(model: nn.Module) -> Schema:
    schema = schema_of(model)
    assert schema is not None
    return schema


def _seeking_rows(settings: Settings, observation: Observation) -> Settings:
    rows = TableRows(schema=_schema(observation.model), bounded=settings.bounded, counted=settings.counted)
    return replace(settings, source=rows, priors=(), projection="none", space=Space())


def _answer_of_rows(
    settings: Settings, attempts: Sequence[Restarted], chosen: Restarted
) -> tuple[Tensor, Tensor | None]:
    """Return rows (B, F) and the certainty (B, C) of cells, of the accepted attempt or of all."""
    assert isinstance(settings.source, TableRows)
    schema, finite = settings.source.schema, [a for a in attempts if math.isfinite(a.loss)]
    columns = zip(*((a.images, torch.tensor(a.loss), a.labels) for a in finite), strict=True)
    pooled = pool(schema, *map(torch.stack, columns))
    if settings.pooled and not chosen.accepted:
        return pooled.rows, pooled.certainty
    return schema.nearest(chosen.images), pooled.certainty_of(chosen.images, schema)


SEARCHES: Mapping[Modality, Search] = {
    IMAGES: Search(
        proxies=_proxy_images,
        read=lambda settings, found: (
            found if settings.as_they_come else scaled_to_range(found, settings.into_range)
        ).float(),
    ),
    TEXTS: Search(
        adapted=_seeking_words,
        variables_of_one=lambda first, others: (longest_text(others), _text_model(first.model).words.embedding_dim),
        input_of_one=lambda first: (*first.input_shape, _text_model(first.model).words.embedding_dim + 1),
        trial=lambda drawn: torch.cat([drawn[..., :-1], torch.ones_like(drawn[..., :1])], -1),
        # the variables are no sum of the rows of the embeddings
        matched=lambda names, model: [name for name in names if name != _text_model(model).word_weight],
        proxies=lambda model, shape, rng: torch.randint(
            _text_model(model).words.num_embeddings, (_PROXIES, *shape), generator=rng
        ),
        corrects=False,
        read=lambda settings, found: cast(WordEmbeddings, settings.source).read(found),
        elementwise_parts=True,
        completed=False,
        varies="texts are of different lengths",
    ),
    ROWS: Search(
        adapted=_seeking_rows,
        proxies=lambda model, shape, rng: _schema(model).drawn(2 * _PROXIES, rng),
        read=lambda settings, found: found.float(),
        answer=_answer_of_rows,
        filmed=False,
    ),
}
