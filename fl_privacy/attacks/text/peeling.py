"""Reconstruct the texts of a batch one after the other, by subtracting the gradient of each known text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy.attacks.text.encoder_assembly import (
    Assembled,
    Assembly,
    Enough,
    GuessedTexts,
    assemble,
    disaggregated,
    parts_of,
)
from fl_privacy.attacks.text.token_candidates import (
    CLEAR,
    Candidates,
    Lengths,
    Span,
    find_candidates,
    rows_of_words,
    span_of,
)
from fl_privacy.models import TextModel
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.types import Batch, ModelState, Tensors

_SAME = 1e-3
"""Relative difference of a word's parts that is rounding."""
_DEPENDENT = 1e-10
"""Share of the largest eigenvalue below which a text's gradients for its labels are dependent."""
_ATTEMPTS, _NEAREST = 5, 2
"""Starts of each guessed text, and number of nearest texts from which all candidates are tried."""
_ROUNDING = 1e-6
"""Share of the batch's gradient below which its rest is rounding."""


@dataclass(frozen=True, eq=False)
class Peeled:
    """Known texts, and the rest of the gradient.

    Attributes:
        texts: (L,) each.
        gradient: gradient of the rest of the batch, in double precision.
        words: (V,) that may be in them.
        rounding: largest singular value that is rounding, by block.
    """

    texts: Sequence[Tensor]
    gradient: Tensors
    lengths: Lengths
    words: Tensor
    rounding: tuple[float, float]


@dataclass(frozen=True, eq=False, kw_only=True)
class Peeling:
    """Peels texts off a batch while :func:`disaggregated` leads to certain ones.

    Attributes:
        model: model with the values sent, in double precision.
        searched: the same in the precision of the values sent.
        tolerance: distance up to which a vector is in a span, as a share of that of a random one.
        enough: check whether texts, with copies, are complete.
    """

    model: TextModel
    searched: TextModel
    loss_scale: float
    tolerance: float
    rng: torch.Generator
    rounds: int
    enough: Enough

    def texts(self, gradient: Tensors, lengths: Lengths, whole: Assembly) -> list[Assembled]:
        left, whole = self.peel(gradient, lengths), whole.in_units(self.rng)
        apart = [float(whole.residuals(text[None])) for text in left.texts]
        known = [whole.judged(Assembled(*pair, clear=False)) for pair in zip(left.texts, apart, strict=True)]
        if not left.lengths.number or (left.texts and self.enough(left.texts)):
            return known
        candidates = self.candidates(left)
        if not candidates.whole:
            return known
        return known + assemble(
            Assembly(self.searched, self.second(left), None, candidates, any_length=lengths.told is None),
            lengths=left.lengths.within(candidates.length),
            tolerance=self.tolerance,
            rng=self.rng,
            rounds=self.rounds,
            enough=lambda texts: self.enough([*left.texts, *texts]),
        )

    def peel(self, gradient: Tensors, lengths: Lengths) -> Peeled:
        rows = rows_of_words(self.searched, gradient)
        words = torch.arange(self.searched.words.num_embeddings, device=self._device) if rows is None else rows
        entries = [
            sum(float(gradient[name].norm()) for name in names if name in gradient)
            for names in self.searched.attention_weights[:2]
        ]
        left = Peeled(
            texts=[],
            gradient={name: value.double() for name, value in gradient.items()},
            lengths=lengths,
            words=words,
            rounding=(_ROUNDING * entries[0], _ROUNDING * entries[1]),
        )
        while left.lengths.number:
            candidates = self.candidates(left)
            if not candidates.whole:
                break
            words = torch.unique(torch.cat(list(candidates.tokens)))
            left = replace(left, words=words, lengths=left.lengths.within(candidates.length))
            rest = left
            for text in self._known(left, candidates):
                rest = self._without(rest, text)
            if rest.lengths.number == left.lengths.number:
                break
            left = rest
        return left

    def candidates(self, left: Peeled) -> Candidates:
        return find_candidates(
            self.searched,
            span_of(self.searched, left.gradient, 0, least=left.rounding[0]),
            tokens=left.words,
            lengths=left.lengths,
            tolerance=self.tolerance,
        )

    def second(self, left: Peeled) -> Span:
        return span_of(self.searched, left.gradient, 1, least=left.rounding[1])

    def _known(self, left: Peeled, candidates: Candidates) -> list[Tensor]:
        if left.lengths.number == 1:
            return [torch.cat(list(candidates.tokens))] if candidates.clear else []
        second = self.second(left)
        guess = disaggregated(self.searched, left.gradient, left.words, left.lengths)
        if guess is None or second.rank == second.width:
            return []
        assembly = Assembly(self.searched, second, None, candidates).in_units(self.rng)
        return [text.tokens for text in self._mended(assembly, guess, left.lengths)]

    def _sure(self, text: Assembled) -> bool:
        return text.residual < self.tolerance / CLEAR

    def _mended(self, assembly: Assembly, guess: GuessedTexts, lengths: Lengths) -> list[Assembled]:
        """Descend from the texts of ``guess`` and return the sure ones.

        Tokens that are not held are redrawn; at last all candidates are tried from the nearest texts.
        """
        few = replace(assembly, candidates=replace(assembly.candidates, tokens=guess.tokens))
        found: list[Assembled] = []
        for attempt in range(_ATTEMPTS):
            again = [tokens.clone() for tokens in guess.texts]
            for tokens, held in zip(again, guess.held, strict=True):
                for position in (~held).nonzero().flatten().tolist():
                    choices = guess.tokens[position]
                    tokens[position] = choices[torch.randint(len(choices), (1,), generator=self.rng)]
            starts = again if attempt else guess.texts
            for length in lengths.possible:
                fitting = [
                    text[:length]
                    for text, held in zip(starts, guess.held, strict=True)
                    if len(text) == length or (lengths.told is None and not bool(held[length:].any()))
                ]
                found += few.descend(torch.stack(fitting)) if fitting else []
            sure = {tuple(text.tokens.tolist()): text for text in found if self._sure(text)}
            if sure:
                return list(sure.values())
        for text in sorted(found, key=lambda text: text.residual)[:_NEAREST]:
            nearer = assembly.descend(text.tokens[None])
            if self._sure(nearer[0]):
                return nearer
        return []

    def _without(self, left: Peeled, text: Tensor) -> Peeled:
        """Subtract ``text`` and its copies, unless no word of it shows or no text of its length is left.

        Parts of its own words are sums of its gradients with each label, with the same factors.
        """
        seen = self._attended(left, left.gradient) if left.lengths.hold(len(text)) else None
        if seen is None:
            return left
        state = ModelState(dict(self.model.named_parameters()), dict(self.model.named_buffers()))
        options: dict[str, Any] = {"loss_scale": self.loss_scale, "loss_function": F.cross_entropy}
        labels = torch.arange(self.model(text[None]).shape[1], device=text.device)[:, None]
        batches = [Batch(text[None], label) for label in labels]
        gradients = [loss_gradients(self.model, state, batch, **options).gradients for batch in batches]
        parts = [self._attended(left, gradient) for gradient in gradients]
        own = torch.stack([part for part in parts if part is not None]).flatten(2).movedim(0, 2)  # (V, 2 d, K)
        aim = seen.flatten(1)[..., None]
        factors = torch.linalg.pinv(own.mT @ own, rtol=_DEPENDENT, hermitian=True) @ (own.mT @ aim)
        apart = (aim - own @ factors).norm(dim=(1, 2))
        same = (apart < _SAME * aim.norm(dim=(1, 2))) & torch.isin(left.words, text)
        if not bool(same.any()):
            return left
        each = factors[same, :, 0].median(0).values.tolist()
        rest = {
            name: value - sum(factor * of[name] for factor, of in zip(each, gradients, strict=True))
            for name, value in left.gradient.items()
        }
        return replace(left, texts=[*left.texts, text], gradient=rest, lengths=left.lengths.without(len(text)))

    def _attended(self, left: Peeled, gradient: Tensors) -> Tensor | None:
        """Return the parts (V, 2, d) of the words left; ``None`` if they can't be split."""
        parts = parts_of(self.model, gradient, left.words, left.lengths.longest)
        return None if parts is None else parts.attended

    @property
    def _device(self) -> torch.device:
        return self.searched.words.weight.device
