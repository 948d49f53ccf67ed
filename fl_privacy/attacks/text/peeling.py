"""The texts of a batch one after the other: the gradient of each that is known leaves an easier batch behind."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy.attacks.text.assembly import Assembled, Assembly, assemble
from fl_privacy.attacks.text.candidates import CLEAR, Candidates, find_candidates, rows_of_words
from fl_privacy.attacks.text.disaggregation import GuessedTexts, disaggregated, parts_of
from fl_privacy.attacks.text.spans import Span, span_of
from fl_privacy.gradients import loss_gradients
from fl_privacy.models import TextModel
from fl_privacy.types import Batch, ModelState, Tensors

_SAME = 1e-3
"""Parts of a word that differ by this share of their length are the same but for rounding."""
_ATTEMPTS, _NEAREST = 5, 2
"""Starts of each guessed text; texts nearest to the span, from which all candidates are tried where none led on."""
_ROUNDING = 1e-6
"""Share of the batch's gradient below which what is left of it is rounding."""


@dataclass(frozen=True, eq=False)
class Peeled:
    """What is known, and what is left.

    Attributes:
        texts: (L,) each.
        gradient: of the rest of the batch, in double precision.
        lengths: of the texts in it, the shortest first.
        words: (V,) that may be in them.
        rounding: by block, singular values of the gradient at its entry that say nothing.
    """

    texts: Sequence[Tensor]
    gradient: Tensors
    lengths: Sequence[int]
    words: Tensor
    rounding: tuple[float, float]


@dataclass(frozen=True, eq=False, kw_only=True)
class Peeling:
    """Takes texts off a batch as long as :func:`disaggregated` leads to some beyond doubt.

    Attributes:
        model: with the values sent, in double precision.
        searched: the same in the precision of the values sent.
        loss_scale: of the client's loss.
        tolerance: distance up to which a vector is in a span, as a share of that of a random one.
        rng: draws texts to compare with, and where searches begin.
        rounds: of searches for the texts that can't be taken off.
    """

    model: TextModel
    searched: TextModel
    loss_scale: float
    tolerance: float
    rng: torch.Generator
    rounds: int

    def texts(self, gradient: Tensors, lengths: Sequence[int], whole: Assembly) -> list[Assembled]:
        """The texts of a batch: those that can be taken off ``gradient``, and what searches find of the others.

        Args:
            gradient: by name.
            lengths: of the texts.
            whole: the search for all of them.
        """
        left, whole = self.peel(gradient, lengths), whole.in_units(self.rng)
        apart = [float(whole.residuals(text[None])) for text in left.texts]
        known = [whole.judged(Assembled(*pair, clear=False)) for pair in zip(left.texts, apart, strict=True)]
        if not left.lengths:
            return known
        rest = Assembly(self.searched, self.second(left), None, self.candidates(left))
        return known + assemble(
            rest, lengths=list(left.lengths), tolerance=self.tolerance, rng=self.rng, rounds=self.rounds
        )

    def peel(self, gradient: Tensors, lengths: Sequence[int]) -> Peeled:
        """All that can be taken off ``gradient`` of texts of ``lengths``."""
        rows = rows_of_words(self.searched, gradient)
        words = torch.arange(self.searched.words.num_embeddings, device=self._device) if rows is None else rows
        entries = [
            sum(float(gradient[name].norm()) for name in names if name in gradient)
            for names in self.searched.attention_weights[:2]
        ]
        left = Peeled(
            texts=[],
            gradient={name: value.double() for name, value in gradient.items()},
            lengths=sorted(lengths),
            words=words,
            rounding=(_ROUNDING * entries[0], _ROUNDING * entries[1]),
        )
        while left.lengths:
            candidates = self.candidates(left)
            left = replace(left, words=torch.unique(torch.cat(list(candidates.tokens))))
            rest = left
            for text in self._known(left, candidates):
                rest = self._without(rest, text)
            if len(rest.lengths) == len(left.lengths):
                break
            left = rest
        return left

    def candidates(self, left: Peeled) -> Candidates:
        """The tokens at each position of what is ``left``."""
        return find_candidates(
            self.searched,
            span_of(self.searched, left.gradient, 0, least=left.rounding[0]),
            tokens=left.words,
            lengths=torch.tensor(left.lengths),
            longest=left.lengths[-1],
            tolerance=self.tolerance,
            texts=len(left.lengths),
        )

    def second(self, left: Peeled) -> Span:
        """What entered the second block, of what is ``left``."""
        return span_of(self.searched, left.gradient, 1, least=left.rounding[1])

    def _known(self, left: Peeled, candidates: Candidates) -> list[Tensor]:
        """Texts (L,) beyond doubt, of those ``left``."""
        if any(len(tokens) == 0 for tokens in candidates.tokens):
            return []
        if len(left.lengths) == 1:
            return [torch.cat(list(candidates.tokens))] if candidates.clear else []
        second = self.second(left)
        guess = disaggregated(self.searched, left.gradient, left.words, left.lengths)
        if guess is None or second.rank == second.width:
            return []
        assembly = Assembly(self.searched, second, None, candidates).in_units(self.rng)
        return [text.tokens for text in self._mended(assembly, guess)]

    def _sure(self, text: Assembled) -> bool:
        return text.residual < self.tolerance / CLEAR

    def _mended(self, assembly: Assembly, guess: GuessedTexts) -> list[Assembled]:
        """What descents from the texts of ``guess`` end in: by its tokens, with others at random where a text was not
        held, and where none is sure by all candidates from the nearest."""
        few = replace(assembly, candidates=replace(assembly.candidates, tokens=guess.tokens))
        found: list[Assembled] = []
        for attempt in range(_ATTEMPTS):
            again = [self._refilled(guess, number) for number in range(len(guess.texts))]
            starts = again if attempt else guess.texts
            for length in sorted({len(text) for text in starts}):
                found += few.descend(torch.stack([text for text in starts if len(text) == length]))
            sure = {tuple(text.tokens.tolist()): text for text in found if self._sure(text)}
            if sure:
                return list(sure.values())
        for text in sorted(found, key=lambda text: text.residual)[:_NEAREST]:
            nearer = assembly.descend(text.tokens[None])
            if self._sure(nearer[0]):
                return nearer
        return []

    def _refilled(self, guess: GuessedTexts, number: int) -> Tensor:
        """A text of ``guess`` with others of its tokens, at random, where none is held."""
        text = guess.texts[number].clone()
        for position in (~guess.held[number]).nonzero().flatten().tolist():
            choices = guess.tokens[position]
            text[position] = choices[torch.randint(len(choices), (1,), generator=self.rng)]
        return text

    def _without(self, left: Peeled, text: Tensor) -> Peeled:
        """What is left without ``text``; the same where its label does not show, or no text of its length is left.

        A word that was in this text alone has the same part in the gradient of the text as in that of the batch, but
        for a positive factor, by which the client has scaled all.
        """
        seen = self._attended(left, left.gradient) if len(text) in left.lengths else None
        if seen is None:
            return left
        most, factor, taken = 0, 0.0, left.gradient
        for label in range(self.model(text[None]).shape[1]):
            gradient = self._gradient(text, label)
            own = self._attended(left, gradient)
            assert own is not None
            factors = (seen * own).sum((1, 2)) / own.square().sum((1, 2)).clamp_min(1e-300)
            apart = (seen - factors[:, None, None] * own).norm(dim=(1, 2))
            same = (factors > 0) & (apart < _SAME * seen.norm(dim=(1, 2))) & torch.isin(left.words, text)
            if int(same.sum()) > most:
                most, factor, taken = int(same.sum()), float(factors[same].median()), gradient
        if not most:
            return left
        lengths = list(left.lengths)
        lengths.remove(len(text))
        rest = {name: value - factor * taken[name] for name, value in left.gradient.items()}
        return replace(left, texts=[*left.texts, text], gradient=rest, lengths=lengths)

    def _attended(self, left: Peeled, gradient: Tensors) -> Tensor | None:
        """(V, 2, d) the parts of the words left."""
        parts = parts_of(self.model, gradient, left.words, left.lengths[-1])
        return None if parts is None else parts.attended

    def _gradient(self, text: Tensor, label: int) -> Tensors:
        """Of ``text`` (L,) alone."""
        state = ModelState(dict(self.model.named_parameters()), dict(self.model.named_buffers()))
        batch = Batch(text[None], torch.tensor([label], device=text.device))
        return loss_gradients(
            self.model, state, batch, loss_scale=self.loss_scale, loss_function=F.cross_entropy
        ).gradients

    @property
    def _device(self) -> torch.device:
        return self.searched.words.weight.device
