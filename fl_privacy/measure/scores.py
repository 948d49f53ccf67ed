"""Scores of guesses, by comparison with the originals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.measure.distractors import Distractors, compare_images, compare_rows, compare_texts, compare_words
from fl_privacy.measure.images import MetricFunction
from fl_privacy.measure.matching import Match, hard_labels, match, no_guess
from fl_privacy.measure.outcome import GuessComparison, ImageScore
from fl_privacy.measure.registry import METRICS
from fl_privacy.measure.tables import WrittenRows, match_rows, right_cells, written_rows
from fl_privacy.measure.texts import Language, match_texts, widened, without
from fl_privacy.types import Batch, Certainty, Reconstruction, VictimId
from fl_privacy.types.modality import IMAGES, Modality, modality_of_inputs
from fl_privacy.types.schema import Schema

CHUNK = 256  # images compared at a time; bounds the memory of LPIPS's features


@dataclass(frozen=True, kw_only=True, eq=False)
class VictimScore:
    """Originals and guesses of one victim's batch (one attacked upload), with the score of each original."""

    id: VictimId
    images: tuple[ImageScore, ...]  # scores of the B originals, in order
    originals: Tensor | None  # images (B, C, H, W) in [0, 1], or tokens (B, L), on the CPU; ``None`` if unknown
    guesses: Tensor  # in the originals' order and shape; a missing image is 0, a missing text -1
    attack_loss: float
    history: tuple[float, ...] = ()
    label_source: str = "inferred"
    member: str = ""  # name of the sub-attack that made the guesses, if there are several
    transformed: Tensor | None = None  # images (B, C, H, W) in [0, 1] by which a defense replaced the originals
    labels: Tensor | None = None  # inferred classes (B,) if the originals are unknown
    # words of the original and of the guess of each text; ``None`` for an unknown text
    sentences: tuple[tuple[Sequence[str] | None, Sequence[str] | None], ...] = ()
    rows: WrittenRows | None = None

    def __repr__(self) -> str:
        read = [f"{name} {self._mean(name):.4g}" for name in ("psnr", "ssim", "lpips") if self._mean(name) is not None]
        failed = sum(one.failure is not None for one in self.images)
        figures = ", ".join([*read, *([f"{failed} failed"] if failed else [])])
        return f"VictimScore({self.id}: {len(self.images)} examples{', mean ' * bool(read)}{figures})"

    def _mean(self, name: str) -> float | None:
        values = [one.values[name] for one in self.images if name in one.values]
        return sum(values) / len(values) if values else None


_NOTHING: Mapping[str, MetricFunction] = {}


def evaluate(
    reconstruction: Reconstruction, truth: Batch, *, functions: Mapping[str, MetricFunction] = _NOTHING
) -> VictimScore:
    """Score the guesses at one batch: ``images[k].values["psnr"]`` of the result is the PSNR of original k in dB.

    ``truth`` has the originals, in any order. ``functions``: additional metrics by name.
    """
    return evaluate_all([reconstruction], [truth], functions=functions)[0]


def evaluate_all(
    reconstructions: Sequence[Reconstruction],
    truths: Sequence[Batch],
    *,
    functions: Mapping[str, MetricFunction] = _NOTHING,
    transformed: Sequence[Batch] | None = None,
    language: Language | None = None,
    schema: Schema | None = None,
    others: Distractors | None = None,
    augmented: bool = False,
) -> list[VictimScore]:
    """Match each reconstruction to its originals, and return the scores by every metric.

    Images are clamped to [0, 1] and matched with the least total squared error. An image gets a ``failure`` instead of
    values if its attack failed, or its guess is not finite or of another shape. Metrics whose package is missing are
    left out. ``UserError`` if ``truths`` differ in number or shape, or if scipy, which matches batches, is missing.

    Args:
        truths: originals of each reconstruction, all of one shape.
        functions: additional metrics by name, such as those with settings.
        language, schema: tokenizer of texts, for metrics of words; columns of table rows.
        transformed: images by which a defense replaced each of ``truths``, for the metrics of transformed images.
        others: public examples and guesses made without the update, which decide each guess's outcome; ``None`` leaves
            outcomes out.
        augmented: ``True`` if ``transformed`` are the client's crops and flips, with which guesses are compared.
    """
    if len(reconstructions) != len(truths):
        raise UserError(
            f"truths are expected to be as many as the {len(reconstructions)} reconstructions, but got {len(truths)};"
            " give a batch for each."
        )
    if schema is not None:
        return _of_rows(reconstructions, truths, schema, others)
    if truths and not modality_of_inputs(truths[0].inputs).continuous:
        return _of_texts(reconstructions, truths, language, others)
    if len(shapes := {tuple(truth.inputs.shape[1:]) for truth in truths}) > 1:
        raise UserError(f"truths are expected to have one shape, but got {sorted(shapes)}; evaluate them separately.")
    matches = [match(r, t) for r, t in zip(reconstructions, truths, strict=True)]
    to_transformed, compared = None, None
    if transformed is not None:
        to_transformed = [match(r, t) for r, t in zip(reconstructions, transformed, strict=True)]
    if others is not None:
        fed = transformed if augmented and transformed is not None else [None] * len(matches)
        each = zip(matches, reconstructions, fed, strict=True)
        compared = [compare_images(m, others, r.id, None if f is None else f.inputs) for m, r, f in each]
    values = list[dict[str, float]]()
    if any(len(m.found) for m in matches):
        given = {"images": _inputs(matches, matches), "labels": _labels(matches)}
        if to_transformed is not None:
            given["transformed"] = _inputs(matches, to_transformed)
        values = _by_metric(given, functions)
    scores = _scored(reconstructions, matches, values, compared)
    if to_transformed is None:
        return scores
    return [replace(score, transformed=m.originals) for score, m in zip(scores, to_transformed, strict=True)]


def _of_texts(
    reconstructions: Sequence[Reconstruction],
    truths: Sequence[Batch],
    language: Language | None,
    others: Distractors | None,
) -> list[VictimScore]:
    matches = [match_texts(r, t) for r, t in zip(reconstructions, truths, strict=True)]
    compared = None if others is None else [compare_texts(m, others, language) for m in matches]
    scored = _scored(reconstructions, matches, _measure_texts(matches, language), compared)
    for place, (reconstruction, truth) in enumerate(zip(reconstructions, truths, strict=True)):
        values, figures = compare_words(reconstruction, truth, others, language)
        images = list(scored[place].images)
        for k, one in enumerate(images):
            if one.failure is None:
                of_words = replace(one.compared, **figures.as_record())
                images[k] = replace(one, values={**one.values, **values}, compared=of_words)
        scored[place] = replace(scored[place], images=tuple(images))
    return scored


def _of_rows(
    reconstructions: Sequence[Reconstruction], truths: Sequence[Batch], schema: Schema, others: Distractors | None
) -> list[VictimScore]:
    matches = [match_rows(r, t, schema) for r, t in zip(reconstructions, truths, strict=True)]
    compared = None if others is None else [compare_rows(m, others, schema) for m in matches]
    measured: list[dict[str, float]] = []
    if any(len(m.found) for m in matches):
        right = right_cells(schema, *(schema.cells(rows) for rows in _inputs(matches, matches)))
        measured = _by_metric({"cells": (right, schema.numbers.expand_as(right)), "labels": _labels(matches)}, _NOTHING)
    each = zip(_scored(reconstructions, matches, measured, compared), matches, reconstructions, strict=True)
    return [replace(score, rows=written_rows(m, r, schema)) for score, m, r in each]


def _scored(
    reconstructions: Sequence[Reconstruction],
    matches: Sequence[Match],
    measured: Sequence[dict[str, float]],
    compared: Sequence[Sequence[GuessComparison]] | None = None,
) -> list[VictimScore]:
    figures = [GuessComparison() for _ in measured] if compared is None else [one for each in compared for one in each]
    rows, scores = iter(zip(measured, figures, strict=True)), []
    for reconstruction, m in zip(reconstructions, matches, strict=True):
        images = []
        for image, guess in enumerate(m.order.tolist()):
            if guess < 0:
                images.append(ImageScore(image=image, guess=None, values={}, failure=m.failure))
                continue
            (values, figure), certainty = next(rows), _certainty(reconstruction, guess)
            images.append(ImageScore(image=image, guess=guess, values=values, certainty=certainty, compared=figure))
        scores.append(_of_victim(reconstruction, images, m.guesses, originals=m.originals))
    return scores


def _of_victim(
    reconstruction: Reconstruction,
    images: Sequence[ImageScore],
    guesses: Tensor,
    *,
    originals: Tensor | None = None,
    labels: Tensor | None = None,
) -> VictimScore:
    return VictimScore(
        id=reconstruction.id,
        images=tuple(images),
        originals=originals,
        guesses=guesses,
        attack_loss=reconstruction.loss,
        history=reconstruction.history,
        label_source=reconstruction.label_source,
        member=reconstruction.member,
        labels=labels,
    )


def unjudged(reconstruction: Reconstruction, shape: tuple[int, ...], modality: Modality = IMAGES) -> VictimScore:
    """Return the score of guesses of ``shape`` whose originals are unknown: it has no metrics."""
    batch, failure, labels = reconstruction.batch, reconstruction.failure, None
    guesses, several = torch.zeros(shape) if modality.continuous else torch.full(shape, -1), f"{modality.one}s"
    if batch is not None and not modality.continuous:
        guesses = batch.inputs.detach().cpu().long()
    elif batch is not None and tuple(batch.inputs.shape) != tuple(shape):
        got = tuple(batch.inputs.shape)
        failure = f"{several.capitalize()} of shape {tuple(shape)} are expected, but the attack returned {got}."
    elif batch is not None and not batch.inputs.isfinite().all():
        failure = "There is no guess with finite pixels." if modality.pixels else "There is no guess of finite values."
    elif batch is not None:
        guesses, labels = batch.inputs.detach().cpu().float(), hard_labels(batch.labels.detach().cpu())
        guesses = guesses.clamp(0, 1) if modality.pixels else guesses
    if failure := failure or no_guess(reconstruction):
        images = [ImageScore(image=k, guess=None, values={}, failure=failure) for k in range(len(guesses))]
    else:
        certain = [_certainty(reconstruction, k) for k in range(len(guesses))]
        images = [ImageScore(image=k, guess=k, values={}, certainty=own) for k, own in enumerate(certain)]
    return _of_victim(reconstruction, images, guesses, labels=labels)


def _measure_texts(matches: Sequence[Match], language: Language | None) -> list[dict[str, float]]:
    found = [(m.guesses[m.found], m.originals[m.found], m) for m in matches if len(m.found)]
    if not found:
        return []
    guesses, truths = (torch.cat(widened(texts)) for texts in zip(*((g, o) for g, o, _ in found), strict=True))
    guesses, truths = widened([guesses, truths])
    special = language.special if language else frozenset[int]()
    texts = without(guesses, special), without(truths, special)
    compared = {"texts": texts, "words": texts}
    if language is not None:
        words = widened([language.word_numbers(torch.cat([guesses, truths]))])[0]
        compared["words"] = words[: len(guesses)], words[len(guesses) :]
    labels = _labels([m for *_, m in found])
    if bool((labels[0] >= 0).all()):
        compared["labels"] = labels
    return _by_metric(compared, _NOTHING)


def _by_metric(
    compared: Mapping[str, tuple[Tensor, Tensor]], functions: Mapping[str, MetricFunction]
) -> list[dict[str, float]]:
    columns = {}
    for name, metric in METRICS.items():
        function = functions.get(name) or metric.function
        if function is None or metric.of not in compared or not metric.available:
            continue
        guesses, truths = compared[metric.of]
        chunks = zip(torch.split(guesses, CHUNK), torch.split(truths, CHUNK), strict=True)
        columns[name] = torch.cat([function(g, t) for g, t in chunks]).tolist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _inputs(found: Sequence[Match], matches: Sequence[Match]) -> tuple[Tensor, Tensor]:
    pairs = list(zip(found, matches, strict=True))
    return torch.cat([m.guesses[f.found] for f, m in pairs]), torch.cat([m.originals[f.found] for f, m in pairs])


def _labels(matches: Sequence[Match]) -> tuple[Tensor, Tensor]:
    return torch.cat([m.guessed_labels[m.found] for m in matches]), torch.cat([m.labels[m.found] for m in matches])


def _certainty(reconstruction: Reconstruction, guess: int) -> Certainty:
    each = reconstruction.certainties
    return each[guess] if each else reconstruction.certainty
