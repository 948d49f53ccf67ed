"""Metrics of reconstructed texts by tokens or words, one value for each text."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fl_privacy.measure.matching import Match, hard_labels, matched, no_guess, numbered, order_of
from fl_privacy.types import Batch, Reconstruction

_RIGHT_PLACE = 2.0  # weight of tokens at the right position, relative to token F1, in the matching of guesses


class Language(Protocol):
    """Tokenizer as metrics need it: its special tokens, such as the one that begins a text, and the words of a text."""

    @property
    def special(self) -> frozenset[int]: ...

    def word_numbers(self, tokens: Tensor) -> Tensor:
        """Return integers (N, W) for the words of texts ``tokens`` (N, L), equal for equal words; -1 pads both."""
        ...


def match_texts(reconstruction: Reconstruction, truth: Batch) -> Match:
    """Match the guesses of ``reconstruction`` to the texts of ``truth``, by tokens in the right place, then by F1."""
    originals = truth.inputs.detach().cpu()
    labels = hard_labels(truth.labels.detach().cpu()) if truth.labels.dim() == 1 else truth.labels[:, 0].detach().cpu()
    failure, guess = no_guess(reconstruction), None
    if failure is None and (batch := reconstruction.batch) is not None:
        found, known = batch.inputs, batch.labels.dim() == 1 or batch.labels.is_floating_point()
        if found.dim() != 2 or found.is_floating_point():
            failure = f"The guess is expected to be tokens (B, L), but has {tuple(found.shape)} {found.dtype}."
        else:
            inputs, originals = widened([found.detach().cpu().long(), originals])
            guess = inputs, _assign(inputs, originals), batch.labels if known else None
    return matched(originals, labels, guess, failure, missing="There is no guess for this text.", empty=-1)


def widened(texts: Sequence[Tensor]) -> list[Tensor]:
    """Pad texts (N, L) of different lengths L with -1 to the largest."""
    width = max(tokens.shape[1] for tokens in texts)
    return [torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]), value=-1) for tokens in texts]


def without(tokens: Tensor, special: frozenset[int]) -> Tensor:
    """Remove the tokens ``special`` from texts (N, L), which are padded with -1."""
    kept = (tokens >= 0) & ~torch.isin(tokens, torch.tensor(sorted(special) or [-1]))
    return tokens.masked_fill(~kept, -1).gather(1, (~kept).long().argsort(dim=1, stable=True))


def token_precision(guesses: Tensor, truths: Tensor) -> Tensor:
    """Return the share (N,) float64 of guessed tokens that are in the text, with multiplicity."""
    return _share(_common(guesses, truths), _count(guesses))


def token_recall(guesses: Tensor, truths: Tensor) -> Tensor:
    """Return the share (N,) float64 of the text's tokens that were guessed, with multiplicity."""
    return _share(_common(guesses, truths), _count(truths))


def token_f1(guesses: Tensor, truths: Tensor) -> Tensor:
    """Return the harmonic mean (N,) float64 of token precision and token recall."""
    return _share(2 * _common(guesses, truths), _count(guesses) + _count(truths))


def shared_tokens(guesses: Tensor, texts: Tensor) -> Tensor:
    """Return the token F1 (G, N) float64 of each of G guesses with each of N texts."""
    found = torch.zeros(len(guesses), len(texts), dtype=torch.float64)
    for place, guess in enumerate(guesses):
        tokens, times = guess[guess >= 0].unique(return_counts=True)
        for token, most in zip(tokens.tolist(), times.tolist(), strict=True):
            found[place] += (texts == token).sum(1).clamp(max=most)
    return _share(2 * found, _count(guesses)[:, None] + _count(texts))


rouge_1 = token_f1  # F1 of words (Lin 2004)


def rouge_2(guesses: Tensor, truths: Tensor) -> Tensor:
    """Return the F1 (N,) float64 of pairs of neighboring words; NaN for texts of a single word."""
    pairs = []  # a number for each two neighboring words, (N, W - 1)
    for words in (guesses, truths):
        first, second = words[:, :-1], words[:, 1:]
        mixed = ((first * 0x9E3779B1 + second) % (1 << 40)).masked_fill((first < 0) | (second < 0), -1)
        pairs.append(mixed if words.shape[1] > 1 else words.new_full((len(words), 1), -1))
    return token_f1(*pairs).masked_fill(_count(pairs[1]) == 0, torch.nan)


def rouge_l(guesses: Tensor, truths: Tensor) -> Tensor:
    """Return the F1 (N,) float64 of the longest common subsequence of words."""
    best = torch.zeros(len(truths), truths.shape[1] + 1, dtype=torch.long)
    for at in range(guesses.shape[1]):
        longer = torch.where((guesses[:, at, None] == truths) & (truths >= 0), best[:, :-1] + 1, best[:, 1:])
        # the longest at each place is the largest up to it
        best[:, 1:] = torch.maximum(best[:, 1:], longer).cummax(1).values
    return _share(2 * best[:, -1].double(), _count(guesses) + _count(truths))


def most_frequent(public: Tensor, lengths: Tensor) -> Tensor:
    """Return guesses (N, L) that ignore the upload: for text i, the ``lengths[i]`` most frequent ``public`` tokens."""
    tokens, counts = torch.unique(numbered(public)[public >= 0], return_counts=True)
    order = counts.argsort(descending=True, stable=True)
    width = int(lengths.max()) if len(lengths) else 0
    best = tokens[order][:width] // public.shape[1]
    best = torch.nn.functional.pad(best, (0, width - len(best)), value=-1)
    return best.expand(len(lengths), width).masked_fill(torch.arange(width) >= lengths[:, None], -1)


def exact_match(guesses: Tensor, truths: Tensor) -> Tensor:
    """Return 1 for each text guessed exactly, else 0, (N,) float64."""
    guesses, truths = widened([guesses, truths])
    return (guesses == truths).all(1).double()


def _assign(guesses: Tensor, truths: Tensor) -> Tensor:
    shape = len(truths), len(guesses)

    def cost() -> Tensor:
        there = truths >= 0
        placed = ((truths[:, None] == guesses) & there[:, None]).sum(2) / there.sum(1).clamp_min(1)[:, None]
        pairs = [t.expand(*shape, -1).flatten(0, 1) for t in (guesses[None], truths[:, None])]
        return -(_RIGHT_PLACE * placed.double() + token_f1(*pairs).reshape(shape))

    return order_of(shape, cost)


def _common(guesses: Tensor, truths: Tensor) -> Tensor:
    guesses, truths = widened([guesses, truths])
    same = numbered(guesses)[:, :, None] == numbered(truths)[:, None]
    return (same & (guesses >= 0)[:, :, None]).sum((1, 2)).double()


def _count(tokens: Tensor) -> Tensor:
    return (tokens >= 0).sum(1).double()


def _share(part: Tensor, of: Tensor) -> Tensor:
    return torch.where(of > 0, part.double() / of.double().clamp_min(1), 0.0)
