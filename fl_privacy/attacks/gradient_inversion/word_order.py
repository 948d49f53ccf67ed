"""Moves of words in a guessed text (LAMP, Balunovic et al. 2022, section 4.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from fl_privacy.attacks.gradient_inversion.embeddings import WordEmbeddings
from fl_privacy.attacks.gradient_inversion.minimization import judged
from fl_privacy.attacks.gradient_inversion.problem import Problem
from fl_privacy.attacks.gradient_inversion.settings import Rearranging
from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError
from fl_privacy.errors import UserError
from fl_privacy.models import TextModel
from fl_privacy.types import Observation

_ORDER = 3
_DISCOUNT = 0.75


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """Trigram language model with absolute discounting, interpolated with bigrams and words (Ney et al. 1994).

    ``texts``: public token numbers (n, L), padded with -1. ``size``: number of tokens in the vocabulary.
    """

    texts: Tensor
    size: int

    @torch.no_grad()
    def surprise(self, tokens: Tensor) -> Tensor:
        """Return the mean negative log likelihood (n,) of the tokens of texts (n, L), in nats."""
        there = tokens >= 0
        likelihood = torch.full(tokens.shape, 1 / self.size, dtype=torch.float64)
        for length, (known, counts, contexts, *of_contexts) in enumerate(self._counts, start=1):
            keys = self._keys(tokens, length)
            total, followers = (_found(contexts, values, keys // self._base) for values in of_contexts)
            seen = _found(known, counts, keys)
            share = ((seen - _DISCOUNT).clamp_min(0) + _DISCOUNT * followers * likelihood) / total.clamp_min(1)
            likelihood = torch.where(total > 0, share, likelihood)
        return (-likelihood.log().masked_fill(~there, 0)).sum(1) / there.sum(1).clamp_min(1)

    @cached_property
    def usual(self) -> Tensor:
        words, times = self._counts[0][:2]
        counts = torch.full((self.size,), 0.5).index_add(0, words, times.float())
        return counts / counts.sum()

    def in_context(self, text: Sequence[int]) -> Tensor:
        """Return the bigram log likelihood (L, n) of n words at each of L places of ``text``, given both neighbors."""
        pairs, times, known, counts, followers = self._counts[1]
        first, second = pairs // self._base, pairs % self._base
        totals = torch.ones(self.size).index_add(0, known[known < self.size], (counts - 1.0)[known < self.size])
        spare = torch.ones(self.size).index_copy(
            0, known[known < self.size], (_DISCOUNT * followers / counts)[known < self.size]
        )
        found = self.usual.log().repeat(len(text), 1)
        for place, (word, follower) in enumerate(pairwise(text)):
            after, before = spare[word] * self.usual, spare * self.usual[follower]
            own, other = first == word, (second == follower) & (first < self.size)
            after[second[own]] += (times[own] - _DISCOUNT) / totals[word]
            before[first[other]] += (times[other] - _DISCOUNT) / totals[first[other]]
            found[place] += before.log()
            found[place + 1] += (after / self.usual).log()
        return found

    @property
    def _base(self) -> int:
        return self.size + 1

    def _keys(self, tokens: Tensor, length: int) -> Tensor:
        begun = torch.nn.functional.pad(tokens.long().clamp_min(0), (length - 1, 0), value=self.size)
        keys = torch.zeros_like(tokens, dtype=torch.long)
        for part in begun.unfold(1, length, 1).unbind(-1):
            keys = keys * self._base + part
        return keys

    @cached_property
    def _counts(self) -> list[tuple[Tensor, ...]]:
        texts, found = self.texts.cpu().long(), list[tuple[Tensor, ...]]()
        for length in range(1, _ORDER + 1):
            keys, counts = torch.unique(self._keys(texts, length)[texts >= 0], return_counts=True)
            contexts, whose = torch.unique(keys // self._base, return_inverse=True)
            totals = torch.zeros(len(contexts), dtype=torch.long).index_add_(0, whose, counts)
            found.append((keys, counts, contexts, totals, whose.bincount(minlength=len(contexts))))
        return found


def _found(keys: Tensor, values: Tensor, wanted: Tensor) -> Tensor:
    at = torch.searchsorted(keys, wanted).clamp_max(max(0, len(keys) - 1))
    return torch.where(keys[at] == wanted, values[at], 0).double()


NO_PUBLIC_TEXTS = (
    "attack=lamp needs public texts to learn likely texts from, but got none;"
    " set threat_model.public_images=200, or attack.prior=0."
)

_BETTER = 1e-2  # least improvement by a new order, as a share of the usual difference between orders


@dataclass(frozen=True, eq=False)
class Rearranged:
    """Search for the order of a text's words; ``moves``: its settings; ``capacity``: most guesses compared at once."""

    moves: Rearranging
    language: LanguageModel | None
    iterations: int
    capacity: int

    @torch.no_grad()
    def begin(self, problem: Problem, variables: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Return each victim's best start (V, N): ``variables`` or random guesses, and then their words reordered."""
        scores, (batch, longest, width) = self._mismatch(problem, variables.unsqueeze(1))[:, 0], problem.shape
        lengths = _lengths(problem)
        own = lengths.amax(1).tolist()  # draws for a victim do not depend on the other texts
        for pieces in _pieces(self.moves.starts - 1, self.moves.tries):
            drawn = [
                pad(torch.randn(pieces, batch, length, width, generator=g), (0, 0, 0, longest - length)).flatten(1)
                for g, length in zip(generators, own, strict=True)
            ]
            rest = variables[:, None, problem.pixels :].expand(-1, pieces, -1)
            tried = torch.cat([torch.stack(drawn).to(variables), rest], 2)
            variables, scores = _better(variables, scores, tried, self._mismatch(problem, tried))
        for pieces in _pieces(self.moves.starts - 1, self.moves.tries):
            keys = [
                pad(torch.rand(pieces, batch, length, generator=g), (0, longest - length))
                for g, length in zip(generators, own, strict=True)
            ]
            beyond = torch.arange(longest) >= lengths[:, None, :, None]
            orders = torch.where(beyond, 1 + torch.arange(longest), torch.stack(keys)).argsort(-1)
            tried = _in_order(problem, variables, orders)
            variables, scores = _better(variables, scores, tried, self._mismatch(problem, tried))
        return variables

    @torch.no_grad()
    def __call__(
        self, iteration: int, problem: Problem, variables: Tensor, generators: Sequence[torch.Generator]
    ) -> Tensor:
        burnt_in = iteration >= int(self.moves.burn_in * self.iterations)
        if not burnt_in or iteration % self.moves.every != 1 or iteration >= self.iterations:
            return variables
        read = _as_read(problem, variables)
        for text in range(problem.shape[0]):
            orders = self._best(problem, read, text, generators)
            read, variables = (_in_order(problem, rows, orders[:, None])[:, 0] for rows in (read, variables))
        return variables

    @torch.no_grad()
    def end(self, problem: Problem, variables: Tensor, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
        """Replace ``variables`` (V, N) by those of decoded words in the best order found; also return the loss (V,)."""
        read = _as_read(problem, variables)
        ended = torch.zeros(len(read), dtype=torch.bool, device=read.device)
        for _ in range(self.moves.last):
            before = read
            for text in range(problem.shape[0]):
                moved = _in_order(problem, read, self._best(problem, read, text, generators)[:, None])[:, 0]
                read = torch.where(ended[:, None], read, moved)
            ended |= (read == before).all(1)
            if bool(ended.all()):
                break
        return read, self._mismatch(problem, read[:, None])[:, 0]

    def _best(self, problem: Problem, decoded: Tensor, text: int, generators: Sequence[torch.Generator]) -> Tensor:
        """Return the best order (V, B, L) of words in ``decoded`` texts (V, N); only text number ``text`` changes."""
        source, (batch, longest) = problem.settings.source, problem.shape[:2]
        assert isinstance(source, WordEmbeddings)
        orders = torch.arange(longest).repeat(len(decoded), self.moves.tries, batch, 1)
        orders[:, :, text] = moved_orders(_lengths(problem)[:, text], self.moves.tries, longest, generators)
        scores = self._mismatch(problem, _in_order(problem, decoded, orders))
        usual = (scores - scores.amin(1, keepdim=True)).median(1, keepdim=True).values
        if self.language is not None:
            tokens = source.read(problem.images(decoded)[:, text]).cpu()
            texts = tokens[:, None].expand(-1, self.moves.tries, -1).gather(2, orders[:, :, text])
            surprise = self.language.surprise(texts.flatten(0, 1)).reshape(scores.shape)
            scores = scores + self.moves.prior * usual * surprise.to(scores)
        least, best = scores.min(1)
        best = torch.where(least < scores[:, 0] - _BETTER * usual[:, 0], best, 0).cpu()
        return orders[torch.arange(len(decoded)), best]

    def _mismatch(self, problem: Problem, tried: Tensor) -> Tensor:
        def mismatch(own: Problem, some: Tensor) -> Tensor:
            return own.mismatch(own.images(some), own.guessed_labels(some), own.hidden_gradients(some))

        return judged(problem, tried, torch.arange(len(tried), device=tried.device), self.capacity, mismatch)


def rearranged(
    moves: Rearranging | None, observation: Observation, *, iterations: int, capacity: int
) -> Rearranged | None:
    """Return the search for the order of words with the settings ``moves``; ``None`` if ``moves`` is ``None``.

    ``observation``: one of the updates of texts. ``iterations``: length of the descent. ``capacity``: most guesses
    compared at once. ``NotAttackableError`` if the model takes no texts; ``UserError`` if public texts are missing.
    """
    if moves is None:
        return None
    public, model = observation.knowledge.public_images, observation.model
    if not isinstance(model, TextModel):
        raise NotAttackableError("A text model is expected, since words are moved, but got another; use attack=auto.")
    if moves.prior and public is None:
        raise UserError(NO_PUBLIC_TEXTS)
    language = LanguageModel(public, model.words.num_embeddings) if moves.prior and public is not None else None
    return Rearranged(moves, language, iterations, capacity)


def moved_orders(lengths: Tensor, tries: int, longest: int, generators: Sequence[torch.Generator]) -> Tensor:
    """Draw T = ``tries`` word orders (V, T, L = ``longest``) of texts of ``lengths`` (V,); the first moves no word."""
    drawn = torch.stack([torch.rand(3, tries, generator=g, dtype=torch.float64) for g in generators])
    of = lengths[:, None].double()
    first, second = ((drawn[:, k] * of).long().unsqueeze(2) for k in (0, 1))
    at = torch.arange(longest)
    low, high = torch.minimum(first, second), torch.maximum(first, second) + 1
    inside = (at >= low) & (at < high)
    size = high - low
    place = (drawn[:, 2].unsqueeze(2) * (of.unsqueeze(2) - size + 1)).long()  # among the words that stay
    rank = torch.where(at >= high, at - size, at)
    kinds = [
        torch.where(at == first, second, torch.where(at == second, first, at)).double(),
        torch.where(at == first, second + 0.5 * (second - first).sign(), at.double()),
        torch.where(inside, place + at - low, rank + size * (rank >= place)).double(),
        torch.where(at < first, at + of.unsqueeze(2), at.double()),
    ]
    every = torch.stack([kind.expand(len(lengths), tries, longest) for kind in kinds])
    chosen = every[torch.arange(tries) % len(kinds), :, torch.arange(tries)].transpose(0, 1)
    chosen = torch.where(at >= lengths[:, None, None], 2.0 * longest + at, chosen)
    chosen[:, 0] = at.double()
    return chosen.argsort(-1)


def _as_read(problem: Problem, variables: Tensor) -> Tensor:
    source, found = problem.settings.source, problem.images(variables)
    assert isinstance(source, WordEmbeddings)
    return torch.cat([source.variables_of(source.read(found)).flatten(1), variables[:, problem.pixels :]], 1)


def _in_order(problem: Problem, variables: Tensor, orders: Tensor) -> Tensor:
    batch, longest, width = problem.shape
    words = variables[:, None, : problem.pixels].reshape(-1, 1, batch, longest, width)
    words = words.expand(-1, orders.shape[1], -1, -1, -1)
    taken = words.gather(3, orders.to(words.device)[..., None].expand(-1, -1, -1, -1, width)).flatten(2)
    return torch.cat([taken, variables[:, None, problem.pixels :].expand(-1, orders.shape[1], -1)], 2)


def _lengths(problem: Problem) -> Tensor:
    assert problem.held is not None
    batch, longest, _ = problem.shape
    return problem.held.reshape(-1, batch, longest).sum(2).round().long().cpu()


def _better(variables: Tensor, scores: Tensor, tried: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    least, which = found.min(1)
    chosen = tried[torch.arange(len(tried), device=tried.device), which]
    return torch.where((least < scores)[:, None], chosen, variables), torch.minimum(least, scores)


def _pieces(number: int, most: int) -> list[int]:
    return [min(most, number - begin) for begin in range(0, number, most)]
