"""Compares what was attacked with what was there."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

from torch import Tensor, nn

from fl_privacy.attacks.exact.first_layer import NotFullyConnectedError, find_first_layer
from fl_privacy.attacks.gradient_inversion.targets import is_sum_of_gradients
from fl_privacy.data import Vocabulary
from fl_privacy.experiment.tracing import Tracer
from fl_privacy.federation import Replay
from fl_privacy.metrics import MetricFunction, VictimScore, evaluate_all, unjudged
from fl_privacy.metrics.beyond import Others, other_updates
from fl_privacy.metrics.distortion import UpdateDistortion, distortion_of, linear_system
from fl_privacy.models import TextModel
from fl_privacy.progress import counted
from fl_privacy.types import Batch, ModelState, Observation, Reconstruction, Tensors, VictimId


class Truth(Protocol):
    """Knows what was behind an update, or that nobody does."""

    def batch(self, victim: VictimId) -> Batch | None: ...

    def replay(self, observation: Observation) -> Replay: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Judge:
    """Scores reconstructions, and what the defense did to the updates.

    Attributes:
        truth: what was behind an observation; asked only after the attack. What nobody knows is shown, not judged.
        transforms: whether the model sees other images than the truth, so that both are compared with.
        distorts: whether a defense changes updates, so that they are compared with undefended ones.
        functions: of the metrics that need something of the run, by name; see ``build_metrics``.
        tracer: runs the tracing attack on what was reconstructed.
        vocabulary: of texts; ``None`` where images are attacked.
        others: what guesses are compared with beside the truth, for the outcome of each.
        augments: whether what the model sees is but the client's own crops and flips of the truth, of no defense: what
            was read is judged by that.
        prior: whether the attack looks among the images of a generator: what it makes of other clients' updates is the
            control of what it makes of one.
    """

    truth: Truth
    transforms: bool = False
    distorts: bool = False
    functions: Mapping[str, MetricFunction] = field(default_factory=dict)
    tracer: Tracer = field(default_factory=Tracer)
    vocabulary: Vocabulary | None = None
    others: Others = field(default_factory=Others)
    augments: bool = False
    prior: bool = False

    def scores(self, found: Sequence[Reconstruction], observations: Sequence[Observation]) -> list[VictimScore]:
        """Of what was made of each of ``observations``."""
        transformed = None
        if self.transforms:
            transformed = [
                self.truth.replay(o).transformed for o in counted("what the model saw of victim", observations)
            ]
        originals = [self.truth.batch(result.id) for result in counted("victim", found)]
        known = [(r, o) for r, o in zip(found, originals, strict=True) if o is not None]
        judged: Iterator[VictimScore] = iter(())
        if known:
            results, truths = zip(*known, strict=True)
            judged = iter(self._judged(results, truths, transformed))
        return [
            unjudged(r, (o.upload.num_examples, *o.input_shape)) if truth is None else next(judged)
            for r, o, truth in zip(found, observations, originals, strict=True)
        ]

    def pieces(self, tokens: Tensor) -> Sequence[str]:
        """Of a text (L,), as its tokenizer writes them; none where images are attacked."""
        return [] if self.vocabulary is None else self.vocabulary.pieces(tokens.tolist())

    def _judged(
        self, found: Sequence[Reconstruction], truths: Sequence[Batch], transformed: Sequence[Batch] | None
    ) -> list[VictimScore]:
        if self.vocabulary is None:
            return evaluate_all(
                found,
                truths,
                functions=self.functions,
                transformed=transformed,
                others=self._with_controls(found, truths),
                augmented=self.augments,
            )
        scores = evaluate_all(found, truths, language=self.vocabulary, others=self.others)
        return [replace(score, sentences=_sentences(score, self.vocabulary)) for score in scores]

    def _with_controls(self, found: Sequence[Reconstruction], truths: Sequence[Batch]) -> Others:
        if not self.prior:
            return self.others
        guesses = [None if each.batch is None else each.batch.inputs for each in found]
        controls = other_updates([each.id for each in found], guesses, [truth.inputs for truth in truths])
        return replace(self.others, controls={**self.others.controls, **controls})


def _sentences(
    score: VictimScore, vocabulary: Vocabulary
) -> tuple[tuple[Sequence[str] | None, Sequence[str] | None], ...]:
    """Original and guess of each text, token by token."""
    originals = [None] * len(score.images) if score.originals is None else score.originals.tolist()
    return tuple(
        (
            None if original is None else vocabulary.pieces(original),
            None if image.guess is None else vocabulary.pieces(guess),
        )
        for image, original, guess in zip(score.images, originals, score.guesses.tolist(), strict=True)
    )


def update_distortion(truth: Truth, observation: Observation) -> tuple[UpdateDistortion, Mapping[str, float]]:
    """How far the defense moved an intercepted update from the one its client would have uploaded without.

    Where the model's first layer is fully connected and the update is of one example, also figures of the equations
    for its input: ``condition`` of them all, and ``contraction``, ``error_bound`` and ``solvable`` (1 or 0) of the row
    whose uploaded bias gradient is largest, which an attacker would trust most.
    """
    clean, seen = replace(observation, upload=truth.replay(observation).undefended()).update(), observation.update()
    alone = observation.upload.num_examples == 1 and is_sum_of_gradients(observation.plan)
    names = _fully_connected(observation.model, observation.input_shape) if alone else None
    return distortion_of(clean, seen), _solving(clean, seen, names) if names else {}


@lru_cache(maxsize=1)
def _fully_connected(model: nn.Module, input_shape: tuple[int, ...]) -> tuple[str, str] | None:
    """Weight and bias of the first layer; ``None`` where that is another one."""
    if isinstance(model, TextModel):
        return None
    try:
        found = find_first_layer(model, ModelState.of(model), input_shape)
    except NotFullyConnectedError:
        return None
    return found.weight, found.bias


def _solving(clean: Tensors, seen: Tensors, names: tuple[str, str]) -> dict[str, float]:
    weight, bias = names
    if weight not in seen or bias not in seen:
        return {}
    tensors = (clean[weight], clean[bias]), (seen[weight], seen[bias])
    trusted = linear_system(*tensors, rows=1)
    return {
        "condition": linear_system(*tensors).condition,
        "contraction": trusted.contraction,
        "error_bound": trusted.error_bound,
        "solvable": float(trusted.solvable),
    }
