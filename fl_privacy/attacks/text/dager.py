"""Reconstruct texts from an update without gradient descent, and prove them if possible (DAGER)."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy.attacks.attack import Report
from fl_privacy.attacks.exact.certificate import ROUNDING, model_as_sent
from fl_privacy.attacks.gradient_inversion import grouping
from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError, as_gradient
from fl_privacy.attacks.text.encoder_assembly import (
    Assembled,
    Assembly,
    Enough,
    GuessedTexts,
    assemble,
    disaggregated,
    parts_of,
)
from fl_privacy.attacks.text.explanation import Explanation
from fl_privacy.attacks.text.token_candidates import (
    CLEAR,
    Candidates,
    Lengths,
    Span,
    entering_block,
    find_candidates,
    readable_model,
    rows_of_words,
    span_of,
)
from fl_privacy.checks import number, whole
from fl_privacy.models import TextModel
from fl_privacy.models.gradients import frozen_copy, loss_gradients
from fl_privacy.types import Batch, Certainty, ModelState, Observation, Reconstruction, Tensors

_AT_ONCE = 256
_MOST_PREFIXES = 4096
_LEAST_RATIO = 100.0  # ratio of the farthest to the nearest continuation's distance from which the farthest is wrong
_ROUNDED = 1e-6  # distance from the span that is rounding in single precision


@dataclass(frozen=True, eq=False)
class _Read:
    """Texts found in an update, and the largest distance of their hidden states from the row space of the gradient."""

    texts: Sequence[Tensor]  # token ids (L,) of each
    apart: float  # largest distance, about 0 for right texts
    clear: bool  # ``True`` if no other texts fit; such texts are certain if they reproduce the whole update


def grow_prefixes(model: TextModel, span: Span, candidates: Candidates, *, tolerance: float, texts: int) -> _Read:
    """Extend prefixes token by token while their hidden states lie in ``span``; return the longest prefixes as texts.

    ``span``: row space of the gradient of the second block's attention. ``tolerance``: largest distance from the span.
    ``texts``: number of texts; equal ones are returned once.
    """
    prefixes, scores = candidates.tokens[0][:, None], candidates.distances[0]
    farthest = torch.zeros_like(scores)
    finished: list[tuple[float, float, Tensor]] = []
    nearest_given_up, within, complete = 1.0, tolerance, True
    for position in range(candidates.length + 1):
        tokens, longer = candidates.tokens[0], prefixes
        if position:
            tokens = candidates.tokens[position] if position < candidates.length else prefixes.new_empty(0)
            longer = torch.cat([prefixes.repeat_interleave(len(tokens), 0), tokens.repeat(len(prefixes))[:, None]], 1)
        apart = span.basis.new_empty(0)
        if longer.numel():
            parts = torch.split(longer, _AT_ONCE)
            apart = torch.cat([span.distance(entering_block(model, part, 1)[:, -1]) for part in parts])
        if len(apart) and float(apart.max()) >= _LEAST_RATIO * max(float(apart.min()), _ROUNDED):
            within = min(within, tolerance * float(apart.max()))  # as a share of the distance of wrong ones
        kept = apart < within
        nearest_given_up = min(nearest_given_up, float(apart[~kept].min()) if bool((~kept).any()) else 1.0)
        if position:
            rows = (~kept.reshape(len(prefixes), len(tokens)).any(1)).nonzero().flatten().tolist()
            finished += [(float(scores[row]), float(farthest[row]), prefixes[row]) for row in rows]
            farthest = farthest.repeat_interleave(len(tokens))
        farthest = torch.maximum(farthest, apart)[kept][:_MOST_PREFIXES]
        prefixes, scores = longer[kept][:_MOST_PREFIXES], apart[kept][:_MOST_PREFIXES]
        complete &= int(kept.sum()) <= _MOST_PREFIXES
        if not len(prefixes):
            break
    finished.sort(key=lambda text: (-len(text[2]), text[0]))
    finished, number = finished[:texts], len(finished)
    clear = complete and 0 < number <= texts and nearest_given_up > CLEAR * max(far for _, far, _ in finished)
    return _Read([prefix for _, _, prefix in finished], max((score for score, _, _ in finished), default=1.0), clear)


_FULL = 0.9  # share of the first span's rank above which the second span contains the states of all tokens


@dataclass(frozen=True, kw_only=True)
class Dager(grouping.GroupAttack):
    """Attack that reconstructs exact texts with fewer tokens than the model's width (DAGER, Petrov et al. 2024).

    A token was at a position if and only if its embedding lies in the span (row space) of the first attention layer's
    gradient. The span of the second block's gradient then shows which tokens form a text: prefix by prefix in a
    decoder, by exchanges of tokens in an encoder. For encoders, the attack also infers positions and neighbors of words
    from the first block's gradient (:mod:`fl_privacy.attacks.text.encoder_assembly`), and subtracts found texts'
    gradients.

    A reconstruction is ``proven`` if it reproduces the whole update, and every alternative is at least ten times
    farther from a span. If a text occurs several times in the batch, the update's scale has to fit, too. Alternatives
    are all other tokens and, for several texts, all other choices of tokens inside the span; other lengths, if unknown.
    """

    of_rounds = "apart"

    tolerance: float = 0.05  # distance from a span up to which a vector lies in it, as a share of a random one's
    rounds: int = 4  # number of searches for the texts of an encoder

    def __post_init__(self) -> None:
        number("attack.tolerance", self.tolerance, above=0, below=1, example=0.05)
        whole("attack.rounds", self.rounds, at_least=1, example=4)

    def solve(self, group: grouping.Group, seed: int, report: Report) -> dict[int, Reconstruction]:
        first = group.first
        grouping.expect_gradient(first)
        model, like = readable_model(model_as_sent(first)), next(iter(first.sent.parameters.values()))
        copy = frozen_copy(first.model, first.assumed(), first.plan, device=like.device, dtype=like.dtype)

        def read(observation: Observation, rng: torch.Generator, _: Report) -> Reconstruction:
            return self._reconstruct(observation, model, readable_model(copy), rng)

        return grouping.read_group(group, read, name="dager", seed=seed, report=report)

    def _reconstruct(
        self, observation: Observation, model: TextModel, searched: TextModel, rng: torch.Generator
    ) -> Reconstruction:
        gradient = {name: value.to(model.words.weight.device) for name, value in as_gradient(observation).items()}
        explanation, span = Explanation(observation, model, gradient), span_of(searched, gradient, 0)
        read = self._read(explanation, searched, span, rng)
        if not read.texts:
            return grouping.failed(
                observation, "Tokens in the gradient's span are expected, but got none; use attack=tag."
            )
        different = list({tuple(text.tolist()): text for text in read.texts}.values())
        repeated = explanation.repeated(different, span.rank)
        batch = repeated or explanation.labelled(read.texts)
        if batch is None:
            return grouping.without_labels(observation)
        certainty = Certainty.CONSISTENT if explanation.distance(batch) < ROUNDING else Certainty.APPROXIMATE
        sure_of_all = repeated is not None or len(different) == observation.upload.num_examples
        if read.clear and sure_of_all and certainty is Certainty.CONSISTENT:
            certainty = Certainty.PROVEN
        batch = Batch(batch.inputs.cpu(), batch.labels.cpu())
        return Reconstruction(
            id=observation.id, batch=batch, loss=read.apart, history=(read.apart,), certainty=certainty
        )

    def _read(self, explanation: Explanation, model: TextModel, span: Span, rng: torch.Generator) -> _Read:
        lengths = Lengths.of(explanation.observation, model)
        if span.rank == span.width:
            raise NotAttackableError(
                f"The texts are expected to have fewer than {span.width} different tokens and positions, but the"
                " gradient has full rank, by more tokens or noise; use attack=tag."
            )
        tokens = rows_of_words(model, explanation.gradient)
        candidates = find_candidates(model, span, tokens=tokens, lengths=lengths, tolerance=self.tolerance)
        if candidates.length == 0 or (lengths.number > 1 and not candidates.whole):
            return _Read([], float("nan"), False)
        if lengths.number == 1:
            worst = max(float(d[0]) for d in candidates.distances[: candidates.length] if len(d))
            texts = [torch.stack([at[0] for at in candidates.tokens[: candidates.length] if len(at)])]
            return _Read(texts, worst, candidates.clear)
        return self._together(explanation, model, candidates, span.rank, rng)

    def _together(
        self, explanation: Explanation, model: TextModel, candidates: Candidates, rank: int, rng: torch.Generator
    ) -> _Read:
        gradient = explanation.gradient
        lengths = Lengths.of(explanation.observation, model).within(candidates.length)
        if len(model.attention_weights) < 2:
            raise NotAttackableError("A second block is expected for batches, but got one; use attack=tag.")
        second = span_of(model, gradient, 1)
        full = second.rank >= _FULL * rank and second.rank < second.width
        with suppress(NotAttackableError):  # the queries' gradient may be withheld
            full = full and span_of(model, gradient, 1, queries=True).rank > lengths.number
        if model.causal and full:
            grown = grow_prefixes(model, second, candidates, tolerance=self.tolerance, texts=lengths.number)
            return replace(grown, clear=grown.clear and candidates.hold(grown.texts))
        classified = None
        if not full:
            second = span_of(model, gradient, 1, queries=True)
            classified = -1 if model.causal else 0
        assembly = Assembly(model, second, classified, candidates, any_length=lengths.known is None)

        def enough(texts: Sequence[Tensor]) -> bool:
            return explanation.repeated(texts, rank) is not None

        search: dict[str, Any] = {"tolerance": self.tolerance, "rng": rng, "rounds": self.rounds, "enough": enough}
        if full:
            scale = explanation.observation.plan.loss_scale
            peeling = Peeling(model=explanation.model, searched=model, loss_scale=scale, **search)
            found = peeling.texts(gradient, lengths, assembly)
        else:
            found = assemble(assembly, lengths=lengths, **search)
        worst = max((text.residual for text in found), default=float("nan"))
        tokens = [text.tokens for text in found]
        clear = len(found) > 0 and all(text.clear for text in found) and worst < self.tolerance / CLEAR
        return _Read(tokens, worst, clear and candidates.hold(tokens))


_SAME = 1e-3  # relative difference of a word's parts that is rounding
_DEPENDENT = 1e-10  # share of the largest eigenvalue below which the gradients of a text's labels are dependent
_ATTEMPTS, _NEAREST = 5, 2  # starts of each guessed text, and nearest texts from which all candidates are tried
_ROUNDING = 1e-6  # share of the batch's gradient below which its rest is rounding


@dataclass(frozen=True, eq=False)
class Peeled:
    """Texts already found, and the gradient of the batch's other texts, in double precision."""

    texts: Sequence[Tensor]
    gradient: Tensors
    lengths: Lengths
    words: Tensor  # (V,) tokens that may be in the other texts
    rounding: tuple[float, float]  # largest singular value that is rounding, by block


@dataclass(frozen=True, eq=False, kw_only=True)
class Peeling:
    """Finds a batch's texts in turn: certain texts are subtracted from the gradient before the next search."""

    model: TextModel  # model with the values sent, in double precision
    searched: TextModel  # the same in the precision of the values sent
    loss_scale: float
    tolerance: float  # distance up to which a vector is in a span, as a share of that of a random one
    rng: torch.Generator
    rounds: int
    enough: Enough  # check if texts, with copies, make up the batch

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
            Assembly(self.searched, self.second(left), None, candidates, any_length=lengths.known is None),
            lengths=left.lengths.within(candidates.length),
            tolerance=self.tolerance,
            rng=self.rng,
            rounds=self.rounds,
            enough=lambda texts: self.enough([*left.texts, *texts]),
        )

    def peel(self, gradient: Tensors, lengths: Lengths) -> Peeled:
        entries = [
            sum(float(gradient[name].norm()) for name in names if name in gradient)
            for names in self.searched.attention_weights[:2]
        ]
        exact, words = {name: g.double() for name, g in gradient.items()}, rows_of_words(self.searched, gradient)
        left = Peeled([], exact, lengths, words, rounding=(_ROUNDING * entries[0], _ROUNDING * entries[1]))
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
        span = span_of(self.searched, left.gradient, 0, least=left.rounding[0])
        return find_candidates(self.searched, span, tokens=left.words, lengths=left.lengths, tolerance=self.tolerance)

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
        """Exchange tokens of guessed texts; return those whose hidden states then lie in the second block's span."""
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
                    if len(text) == length or (lengths.known is None and not bool(held[length:].any()))
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
        """Subtract the gradient of ``text`` from the rest in ``left``, as often as the text occurs in the batch.

        The number of occurrences follows from a word that only this text contains. Without one, return ``left``.
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
        same = ((aim - own @ factors).norm(dim=(1, 2)) < _SAME * aim.norm(dim=(1, 2))) & torch.isin(left.words, text)
        if not bool(same.any()):
            return left
        each = factors[same, :, 0].median(0).values.tolist()
        rest = {
            name: value - sum(factor * of[name] for factor, of in zip(each, gradients, strict=True))
            for name, value in left.gradient.items()
        }
        return replace(left, texts=[*left.texts, text], gradient=rest, lengths=left.lengths.without(len(text)))

    def _attended(self, left: Peeled, gradient: Tensors) -> Tensor | None:
        parts = parts_of(self.model, gradient, left.words, left.lengths.longest)
        return None if parts is None else parts.attended
