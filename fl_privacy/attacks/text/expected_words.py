"""Estimate how often and in which order words occur, by the attacker's own simulation of a word's row.

A word's row is the sum of its positions' rows, which gives the order if these were uploaded.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy.models import TextModel

_TEXTS = 24
"""Simulated texts of each class."""
_MOST_CLASSES = 8
_UNUSUAL = 16.0
"""Multiple of the usual energy above which a position is classified."""
_DIRECTIONS = 48
"""Leading directions of a word's row that are modeled one by one."""


@dataclass(frozen=True, eq=False)
class WordModel:
    """Normal distribution of the gradient that a token sends to its row, up to a common factor.

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
    """Expectations of the rows of words.

    Attributes:
        models: one for each class of a text, then one without any direction.
        energy: mean squared length of a token's contribution.
        common: mean product of two tokens' contributions, as a share of ``energy``.
    """

    models: tuple[WordModel, ...]
    energy: float
    common: float


def simulated(
    model: TextModel, *, length: int, public: Tensor | None, labels: Tensor | None, texts: int, rng: torch.Generator
) -> Expected:
    """Simulate the rows of words, from texts of ``length`` tokens, drawn from ``public`` ones if given.

    Args:
        length: tokens of a text, at least 2.
        public: (N, L) texts of the domain, -1 for no token; ``None``: tokens are drawn evenly.
        labels: (B,) known classes, if any.
        texts: B; several texts, whose classes differ, share one distribution.
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
    """Return the positions of a text (n, L, d) with usual energy, which leaves out a classified one."""
    energy = slopes.square().sum(-1).mean(0)
    return (energy <= _UNUSUAL * energy.median()).nonzero().flatten()


def _classes(model: TextModel, labels: Tensor | None) -> Tensor:
    if model.next_token:
        return torch.zeros(1, dtype=torch.long)
    if labels is not None and labels.dim() == 1:
        known: Tensor = torch.unique(labels)
        return known.cpu()
    return torch.arange(min(_MOST_CLASSES, model(torch.zeros(1, 1, dtype=torch.long)).shape[1]))


def _drawn(model: TextModel, length: int, public: Tensor | None, number: int, rng: torch.Generator) -> Tensor:
    """Draw tokens (number, length), all of them present."""
    if public is None:
        return torch.randint(model.words.num_embeddings, (number, length), generator=rng)
    pool = public[public >= 0].cpu().long()
    begins = torch.randint(max(1, len(pool) - length), (number,), generator=rng)
    return pool[(begins[:, None] + torch.arange(length)).clamp_max(len(pool) - 1)]


@torch.enable_grad()
def _slopes(model: TextModel, tokens: Tensor, classes: Tensor) -> Tensor:
    """Return the slope (n, L, d) of each text's own loss by its embeddings."""
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
    """Fit ``rows`` (m, d) along their leading directions."""
    center = rows.mean(0)
    values, directions = torch.linalg.svd(rows, full_matrices=False)[1:]
    kept = directions[: min(_DIRECTIONS, int((values > 1e-4 * values[0]).sum()) or 1)].T
    spread = ((rows - center) @ kept).square().mean(0)
    return WordModel(center @ kept, spread.clamp_min(1e-12 * float(values[0]) ** 2 / len(rows)), kept)


def _without_direction(energy: float, like: Tensor) -> WordModel:
    """Build an isotropic model, for optimizers that keep signs alone and for wrong simulations."""
    width = like.shape[-1]
    eye = torch.eye(width, dtype=like.dtype, device=like.device)
    return WordModel(like.new_zeros(width), like.new_full((width,), energy / width), eye)


_MOST = 8
"""Largest number of times that a word occurs."""


def repeated(energy: Tensor, *, common: float, total: int | None, untold: float = 2.0) -> Tensor:
    """Estimate how often each word occurs (k,), at least once, by the squared length of its row.

    For c occurrences it is c + c (c - 1) common times that for one.

    Args:
        energy: (k,) without the noise's.
        common: share in [0, 1] of the squared length that two rows have in common.
        total: number of tokens; ``None`` counts a repetition only if nearer by the factor ``untold``.
    """
    times = torch.arange(1, _MOST + 1, dtype=energy.dtype, device=energy.device)
    growth = times + times * (times - 1) * common
    between = (growth[1:] * growth[:-1]).sqrt()
    reached = energy[:, None] / between
    if total is None:
        once = energy.median() if len(energy) else energy.sum()
        return 1 + (reached > untold * once).long().cumprod(1).sum(1)
    spare = min(max(0, total - len(energy)), reached.numel())
    found = torch.ones_like(energy, dtype=torch.long)
    if spare:
        chosen = reached.flatten().topk(spare).indices // reached.shape[1]
        found += chosen.bincount(minlength=len(energy))
    return found


_SWEEPS = 20


def placed(words: Tensor, positions: Tensor) -> Tensor:
    """Place ``words`` (k, d) at ``positions`` (L, d) by their rows, and return the word of each position (L,).

    Exchanges minimize the squared distances of the words from their positions' sums. Zero elements, as dropped, are not
    compared.
    """
    words, positions = words.double(), positions.double()
    found = _paired(words, positions)
    return found if bool((positions == 0).any()) else _exchanged(found, words, positions)


def _paired(words: Tensor, positions: Tensor) -> Tensor:
    """Pair each position with the nearest word (L,), each word once while possible."""
    number, length = len(words), len(positions)
    found = torch.full((length,), -1, dtype=torch.long, device=words.device)
    left = _apart(words, positions)
    for _ in range(min(number, length)):
        at = int(left.argmin())
        word, position = divmod(at, length)
        found[position] = word
        left[word], left[:, position] = torch.inf, torch.inf
    free = (found < 0).nonzero().flatten()
    if len(free):
        taken = found >= 0
        rest = words.index_add(0, found[taken], -positions[taken])
        found[free] = (
            _apart(rest, positions[free]) - _apart(rest, torch.zeros_like(positions[free]), positions[free])
        ).argmin(0)
    return found


def _apart(words: Tensor, positions: Tensor, kept: Tensor | None = None) -> Tensor:
    there = ((positions if kept is None else kept) != 0).to(words.dtype)
    return words.square() @ there.T - 2 * words @ positions.T + positions.square().sum(1)


def _exchanged(found: Tensor, words: Tensor, positions: Tensor) -> Tensor:
    number, length = len(words), len(found)
    own = torch.arange(length, device=found.device)
    products = positions @ positions.T
    squares = products.diagonal()
    for _ in range(_SWEEPS * length):
        rest = words - torch.zeros_like(words).index_add_(0, found, positions)
        fits = rest @ positions.T  # (k, L)
        now = fits[found, own]
        moved = 2 * (now + squares) - 2 * fits  # change where position j goes from its word to v
        counts = found.bincount(minlength=number)
        moved[:, counts[found] < 2] = torch.inf  # every word that was found stands somewhere
        moved[found, own] = 0.0
        other = fits[found].T  # (L, L): residual of the word at i, along position j, at [j, i]
        swapped = 2 * ((now + squares)[:, None] + (now + squares)[None] - other - other.T - 2 * products)
        swapped[found[:, None] == found] = 0.0
        best_move, best_swap = float(moved.min()), float(swapped.min())
        tolerance = -1e-9 * float(words.square().sum())
        if min(best_move, best_swap) >= tolerance:
            break
        if best_move <= best_swap:
            word, position = divmod(int(moved.argmin()), length)
            found[position] = word
        else:
            one, two = divmod(int(swapped.argmin()), length)
            found[[one, two]] = found[[two, one]]
    return found
