"""In which order the words of a text are, where the gradient of the positions' embeddings was uploaded as well.

What a token sends back to its word's row it sends to its position's too: the row of a word is the sum of those of the
positions where it stands.
"""

import torch
from torch import Tensor

_SWEEPS = 20


def placed(words: Tensor, positions: Tensor) -> Tensor:
    """(L,) which of ``words`` (k, d) stands at each of ``positions`` (L, d), by rows: such that the sum over the words
    of the squared distance from what their positions add up to is least, as far as exchanges lead.

    Where an element of a position was dropped, and is exactly zero, it is not compared.
    """
    words, positions = words.double(), positions.double()
    found = _paired(words, positions)
    return found if bool((positions == 0).any()) else _exchanged(found, words, positions)


def _paired(words: Tensor, positions: Tensor) -> Tensor:
    """(L,) for each position the nearest word, each word once as long as there are enough, the nearest pairs first."""
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
    """(k, L) squared distances, of the elements that were ``kept``, those of ``positions`` unless given."""
    there = ((positions if kept is None else kept) != 0).to(words.dtype)
    return words.square() @ there.T - 2 * words @ positions.T + positions.square().sum(1)


def _exchanged(found: Tensor, words: Tensor, positions: Tensor) -> Tensor:
    """``found`` after moves of one position to another word, and exchanges of two, as long as they lead on."""
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
        moved[:, counts[found] < 2] = torch.inf  # every word that was read stands somewhere
        moved[found, own] = 0.0
        other = fits[found].T  # (L, L): what is left of the word at i, along position j, read as [j, i]
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
