"""Texts that are read from an update without any descent, and whether that is proven."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.attacks.attack import Progress, no_progress
from fl_privacy.attacks.exact.certificate import ROUNDING, Reproduction, model_as_sent
from fl_privacy.attacks.gradient_inversion.attackable import NotAttackableError
from fl_privacy.attacks.gradient_inversion.grouping import failed, read_each, without_labels
from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.attacks.text.assembly import Assembly, assemble
from fl_privacy.attacks.text.candidates import CLEAR, Candidates, find_candidates, rows_of_words
from fl_privacy.attacks.text.heads import last_tokens, next_tokens
from fl_privacy.attacks.text.peeling import Peeling
from fl_privacy.attacks.text.prefixes import grow_prefixes
from fl_privacy.attacks.text.spans import readable_model, span_of
from fl_privacy.checks import number, whole
from fl_privacy.gradients import frozen_copy
from fl_privacy.models import TextModel
from fl_privacy.types import Batch, Certainty, Observation, Reconstruction, Tensors

_FULL = 0.9
"""Share of the first block's rank from which the second one's span holds what every token becomes."""


@dataclass(frozen=True, eq=False)
class _Read:
    """Texts (L,) each, how far they are from the spans, and whether they are beyond doubt but for the whole update."""

    texts: Sequence[Tensor]
    apart: float
    clear: bool


@dataclass(frozen=True, kw_only=True)
class Dager:
    """DAGER (Petrov et al. 2024): exact texts, of batches as well, while they have fewer tokens than the model is wide.

    The inputs of the first attention layer span the rows of its gradient, so that a token was at a position if and only
    if its embedding lies in that span. Which of these make a text, the span of the second block's inputs says: prefix
    by prefix in a decoder. In an encoder what a token becomes depends on all others, and every word may have stood at
    every position. There the gradient of the first block tells where a word stood that was at one position only, and by
    the derivative of attention which of them stood together (:mod:`fl_privacy.attacks.text.disaggregation`, ours);
    tokens are exchanged from there until all are in the span, and the gradient of a text that is known is taken off, so
    that an easier batch is left. Where that does not lead on, tokens are exchanged from texts at random. Where the
    gradient of the embeddings was uploaded as well, only the tokens of its rows that are not zero are looked at.

    A reconstruction is ``proven`` if the whole update is reproduced and there is no second choice: of a single text
    every token is in the span and every other one at least ten times farther; of several, so is every one
    outside the span, and of those in it every other choice at any position, or of one that goes on with a prefix, is at
    least ten times farther from the second span.

    Attributes:
        tolerance: distance from a span up to which a vector lies in it, as a share of that of a random one.
        rounds: of searches for the texts of an encoder.
    """

    tolerance: float = 0.05
    rounds: int = 4

    def __post_init__(self) -> None:
        number("attack.tolerance", self.tolerance, above=0, below=1, example=0.05)
        whole("attack.rounds", self.rounds, at_least=1, example=4)

    def __call__(
        self, observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
    ) -> list[Reconstruction]:
        """Attack all ``observations``; see :class:`fl_privacy.attacks.ReconstructionAttack`."""
        return read_each(observations, self._reader, name="dager", seed=seed, progress=progress)

    def _reader(self, first: Observation) -> Callable[[Observation, torch.Generator], Reconstruction]:
        model, like = readable_model(model_as_sent(first)), next(iter(first.sent.parameters.values()))
        searched = frozen_copy(first.model, first.assumed(), first.plan, device=like.device, dtype=like.dtype)
        return lambda observation, rng: self._reconstruct(observation, model, readable_model(searched), rng)

    def _reconstruct(
        self, observation: Observation, model: TextModel, searched: TextModel, rng: torch.Generator
    ) -> Reconstruction:
        """By ``searched``, in the precision of the values sent, and seen to be right by ``model``, in double."""
        gradient = {name: value.to(model.words.weight.device) for name, value in as_gradient(observation).items()}
        read = self._read(observation, (searched, model), gradient, rng)
        if not read.texts:
            return failed(observation, "No token lies in the span of the gradient: there are too many, or it is noise.")
        tokens = torch.nn.utils.rnn.pad_sequence(list(read.texts), batch_first=True, padding_value=-1)
        reproduction = Reproduction(observation, model)
        if model.next_token:
            tokens = last_tokens(model, gradient, tokens, longest=observation.input_shape[0])
            labels: Tensor | None = next_tokens(tokens)
        else:
            labels = reproduction.labels(tokens)
        if labels is None:
            return without_labels(observation)
        whole_batch = len(tokens) == observation.upload.num_examples
        apart = reproduction.distance(Batch(tokens, labels)) if whole_batch else float("inf")
        certainty = Certainty.CONSISTENT if apart < ROUNDING else Certainty.APPROXIMATE
        if read.clear and certainty is Certainty.CONSISTENT:
            certainty = Certainty.PROVEN
        return Reconstruction(
            id=observation.id,
            batch=Batch(tokens.cpu(), labels.cpu()),
            loss=read.apart,
            history=(read.apart,),
            certainty=certainty,
        )

    def _read(
        self, observation: Observation, models: tuple[TextModel, TextModel], gradient: Tensors, rng: torch.Generator
    ) -> _Read:
        model = models[0]
        count, span = observation.upload.num_examples, span_of(model, gradient, 0)
        if span.rank == span.width:
            raise NotAttackableError(
                f"The texts are expected to have fewer than {span.width} different tokens and positions, but the"
                " gradient's rank is full: there are more, or noise was added."
            )
        rows, told = rows_of_words(model, gradient), _in_spans(observation, model)
        candidates = find_candidates(
            model,
            span,
            tokens=torch.arange(model.words.num_embeddings, device=span.basis.device) if rows is None else rows,
            lengths=told,
            longest=observation.input_shape[0] if told is None else int(told.max()),
            tolerance=self.tolerance,
            texts=count,
        )
        if candidates.length == 0:
            return _Read([], float("nan"), False)
        if count == 1:
            worst = max(float(d[0]) for d in candidates.distances[: candidates.length] if len(d))
            texts = [torch.stack([at[0] for at in candidates.tokens[: candidates.length] if len(at)])]
            return _Read(texts, worst, candidates.clear)
        return self._together(observation, models, gradient, candidates, rank=span.rank, rng=rng)

    def _together(
        self,
        observation: Observation,
        models: tuple[TextModel, TextModel],
        gradient: Tensors,
        candidates: Candidates,
        *,
        rank: int,
        rng: torch.Generator,
    ) -> _Read:
        """The texts of a batch, of which ``candidates`` are the tokens."""
        model = models[0]
        count, told = observation.upload.num_examples, _in_spans(observation, model)
        if len(model.attention_weights) < 2:
            raise NotAttackableError(
                "A second block is expected, to tell the texts of a batch apart, but there is none."
            )
        second = span_of(model, gradient, 1)
        full = second.rank >= _FULL * rank and second.rank < second.width
        if model.causal and full:
            grown = grow_prefixes(model, second, candidates, tolerance=self.tolerance, texts=count)
            return _Read(grown.texts, grown.apart, grown.clear and candidates.hold(grown.texts))
        lengths = _lengths(candidates, count) if told is None else sorted(told.tolist())
        classified = None
        if not full:
            second = span_of(model, gradient, 1, queries=True)
            classified = -1 if model.causal else 0
        assembly = Assembly(model, second, classified, candidates)
        if full:
            peeling = Peeling(
                model=models[1],
                searched=model,
                loss_scale=observation.plan.loss_scale,
                tolerance=self.tolerance,
                rng=rng,
                rounds=self.rounds,
            )
            found = peeling.texts(gradient, lengths, assembly)
        else:
            found = assemble(assembly, lengths=lengths, tolerance=self.tolerance, rng=rng, rounds=self.rounds)
        worst = max((text.residual for text in found), default=float("nan"))
        tokens = [text.tokens for text in found]
        clear = len(found) == count and all(text.clear for text in found) and worst < self.tolerance / CLEAR
        return _Read(tokens, worst, clear and candidates.hold(tokens))


def _in_spans(observation: Observation, model: TextModel) -> Tensor | None:
    """(B,) tokens of each text that the spans can hold, where lengths are told: of a language model all but the last,
    which nothing is predicted from."""
    told = observation.knowledge.lengths
    return told - 1 if told is not None and model.next_token else told


def _lengths(candidates: Candidates, count: int) -> list[int]:
    """Of so many texts, as far as the numbers of tokens at each position tell."""
    reached, least = [], 0
    for at in reversed(candidates.tokens):
        least = max(least, len(at))
        reached.append(least)
    return sorted(max(1, sum(n > number for n in reached)) for number in range(count))
