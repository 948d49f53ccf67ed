"""What the row of a word looks like, by the attacker's own simulation with the values sent."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy.models import TextModel

_TEXTS = 24
"""Simulated texts of each class."""
_MOST_CLASSES = 8
_UNUSUAL = 16.0
"""Times the usual energy from which a position is one that is classified."""
_DIRECTIONS = 48
"""Leading directions of a word's row that are looked at one by one."""


@dataclass(frozen=True, eq=False)
class WordModel:
    """Normal distribution of the gradient that a token in a text sends to its row, up to a common factor.

    Attributes:
        mean: (r,) along ``directions``.
        spread: (r,) variance along each of them.
        directions: (d, r) orthonormal columns.
    """

    mean: Tensor
    spread: Tensor
    directions: Tensor


@dataclass(frozen=True, eq=False)
class Expected:
    """What is expected of the rows of words.

    Attributes:
        models: one for each class that a text may have, and one without any direction at the end.
        energy: mean squared length of what one token in one text sends.
        common: mean product of what two tokens of one text send, as a share of ``energy``: 1 where all are alike.
    """

    models: tuple[WordModel, ...]
    energy: float
    common: float


def simulated(
    model: TextModel, *, length: int, public: Tensor | None, labels: Tensor | None, texts: int, rng: torch.Generator
) -> Expected:
    """Expectations from texts of ``length`` tokens, drawn from ``public`` ones where there are some.

    Args:
        model: frozen, with the values sent.
        length: tokens of a text, at least 2.
        public: (N, L) texts of the domain, -1 where there is no token; ``None``: tokens are drawn evenly.
        labels: (B,) classes that are known; ``None``: none is.
        texts: B; of several texts, whose classes differ, one distribution is for all.
        rng: draws.
    """
    classes = _classes(model, labels)
    tokens = _drawn(model, length, public, _TEXTS * len(classes), rng).to(model.words.weight.device)
    slopes = _slopes(model, tokens, classes.repeat_interleave(_TEXTS))
    usual = _usual_positions(slopes)
    slopes = slopes[:, usual]
    energy, number = float(slopes.square().sum(-1).mean()), slopes.shape[1]
    together = float(slopes.sum(1).square().sum(-1).mean()) / number
    common = (together / energy - 1) / (number - 1) if energy and number > 1 else 0.0
    each = slopes.reshape(len(classes), -1, slopes.shape[-1])
    parts = each if texts == 1 else each.reshape(1, -1, slopes.shape[-1])
    return Expected((*map(_fitted, parts), _without_direction(energy, parts)), energy, min(1.0, max(0.0, common)))


def _usual_positions(slopes: Tensor) -> Tensor:
    """Those of a text (n, L, d) whose tokens send back no more than usual: not the one that is classified, whose row is
    far larger and is seen in any case."""
    energy = slopes.square().sum(-1).mean(0)
    return (energy <= _UNUSUAL * energy.median()).nonzero().flatten()


def _classes(model: TextModel, labels: Tensor | None) -> Tensor:
    """That are simulated: those known, else all, or a few of many."""
    if model.next_token:
        return torch.zeros(1, dtype=torch.long)
    if labels is not None and labels.dim() == 1:
        known: Tensor = torch.unique(labels)
        return known.cpu()
    return torch.arange(min(_MOST_CLASSES, model(torch.zeros(1, 1, dtype=torch.long)).shape[1]))


def _drawn(model: TextModel, length: int, public: Tensor | None, number: int, rng: torch.Generator) -> Tensor:
    """(number, length) tokens, all of them there."""
    if public is None:
        return torch.randint(model.words.num_embeddings, (number, length), generator=rng)
    pool = public[public >= 0].cpu().long()
    begins = torch.randint(max(1, len(pool) - length), (number,), generator=rng)
    return pool[(begins[:, None] + torch.arange(length)).clamp_max(len(pool) - 1)]


@torch.enable_grad()
def _slopes(model: TextModel, tokens: Tensor, classes: Tensor) -> Tensor:
    """(n, L, d) slope of each text's own loss by the embedding of each of its tokens."""
    embedded = model.words(tokens).detach().requires_grad_()
    logits = model(torch.cat([embedded, torch.ones_like(embedded[..., :1])], -1))
    if model.next_token:
        loss = F.cross_entropy(logits[..., :-1], tokens[:, 1:])
        loss = loss * len(tokens)
    else:
        loss = F.cross_entropy(logits, classes.to(logits.device), reduction="sum")
    slopes: Tensor = torch.autograd.grad(loss, embedded)[0]
    return slopes.detach()


def _fitted(rows: Tensor) -> WordModel:
    """The normal distribution of ``rows`` (m, d), along its leading directions."""
    center = rows.mean(0)
    values, directions = torch.linalg.svd(rows, full_matrices=False)[1:]
    kept = directions[: min(_DIRECTIONS, int((values > 1e-4 * values[0]).sum()) or 1)].T
    spread = ((rows - center) @ kept).square().mean(0)
    return WordModel(center @ kept, spread.clamp_min(1e-12 * float(values[0]) ** 2 / len(rows)), kept)


def _without_direction(energy: float, like: Tensor) -> WordModel:
    """All directions alike: of optimizers that keep signs alone, and where the simulation is wrong."""
    width = like.shape[-1]
    eye = torch.eye(width, dtype=like.dtype, device=like.device)
    return WordModel(like.new_zeros(width), like.new_full((width,), energy / width), eye)
