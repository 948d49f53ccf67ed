"""What attacks read of examples beside what guesses at other examples' uploads would have read of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fl_privacy.experiment.ladder_problem import Problem
from fl_privacy.experiment.unattacked import others_among
from fl_privacy.metrics import evaluate_all
from fl_privacy.metrics.controls import Others
from fl_privacy.metrics.matching import assign
from fl_privacy.results.counts import Counts, counts_of
from fl_privacy.types import Batch, Certainty, Reconstruction

EXACT_ROW = 0.01
"""Largest error of a feature, as a share of its range, in a row that counts as read to the last digit."""

LEAST_CANDIDATES = 20
"""Other rows without which the nearest says nothing."""

MOST_SHOWN = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """An image and the guess at it, (C, H, W) in [0, 1]."""

    original: Tensor
    guess: Tensor | None
    read: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """Features of a row and of the guess at it, as shares of their ranges."""

    original: Sequence[float]
    guess: Sequence[float] | None
    read: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Scored:
    """The scores of one rung.

    Attributes:
        counts: of the examples.
        control: the same of other examples' guesses; ``None`` where there is a single upload.
        labels: right ones, and how many are known; ``None`` where there are none.
        shown: some of them.
    """

    counts: Counts
    control: Counts | None = None
    labels: tuple[int, int] | None = None
    shown: Sequence[Any] = ()


def score(problems: Sequence[Problem], found: Sequence[Reconstruction], loaded: Sequence[Tensor], seed: int) -> Scored:
    """Compare reconstructions with the truth.

    Args:
        problems: with the truth, one for each reconstruction.
        found: in the same order.
        loaded: inputs (N, ...) of the same clients, what the originals are distinguished from.
        seed: of the choice among them.
    """
    truths = [_batch(problem) for problem in problems]
    labels = _labels(problems, found)
    turned = [
        replace(other, id=own.id, certainty=Certainty.APPROXIMATE, certainties=()) for own, other in _turned(found)
    ]
    shown: Sequence[Any]
    if problems[0].kind == "image":
        others = _candidates(problems[0], truths, loaded, seed)
        counts, shown = _images(found, truths, others)
        control = _images(turned, truths, others)[0] if turned else None
    else:
        rows = _rows(problems[0], truths, loaded)
        counts, shown = _count_rows(found, truths, rows)
        control = _count_rows(turned, truths, rows)[0] if turned else None
    return Scored(counts=counts, control=control, labels=labels, shown=shown[:MOST_SHOWN])


def _turned(found: Sequence[Reconstruction]) -> list[tuple[Reconstruction, Reconstruction]]:
    """Pair each reconstruction with the next one's guess; none if there is only one."""
    if len(found) < 2:
        return []
    return list(zip(found, [*found[1:], found[0]], strict=True))


def _batch(problem: Problem) -> Batch:
    labels = problem.labels
    usable = labels is not None and labels.dim() == 1 and not labels.is_floating_point()
    return Batch(problem.truth, labels if usable and labels is not None else torch.zeros(len(problem.truth)).long())


def _labels(problems: Sequence[Problem], found: Sequence[Reconstruction]) -> tuple[int, int] | None:
    right = known = 0
    for problem, guess in zip(problems, found, strict=True):
        labels = problem.labels
        if problem.whole or labels is None or labels.dim() != 1 or labels.is_floating_point():
            continue
        known += len(labels)
        if guess.batch is not None:
            given = guess.batch.labels
            given = given.argmax(-1) if given.is_floating_point() else given
            wanted, got = Counter(labels.tolist()), Counter(given.flatten().tolist())
            right += sum((wanted & got).values())
    return (right, known) if known else None


def _candidates(problem: Problem, truths: Sequence[Batch], loaded: Sequence[Tensor], seed: int) -> Others:
    model, shape = problem.model, problem.input_shape
    alike = [inputs for inputs in loaded if tuple(inputs.shape[1:]) == shape]
    images = [(image, 0) for inputs in alike for image in model.looked_for(inputs)[:1000]]
    return others_among(images, list(truths), shape, 1000, seed=seed)


def _images(found: Sequence[Reconstruction], truths: Sequence[Batch], others: Others) -> tuple[Counts, list[Picture]]:
    shaped = [
        guess
        if guess.batch is None or guess.batch.inputs.shape == truth.inputs.shape
        else replace(guess, batch=None, failure="a guess of another size")
        for guess, truth in zip(found, truths, strict=True)
    ]
    records, pictures = [], []
    for result in evaluate_all(shaped, list(truths), others=others):
        for place, image in enumerate(result.images):
            record = {"id": str(result.id), **image.values, **image.compared, "certainty": image.certainty}
            record |= {} if image.failure is None else {"failure": image.failure}
            records.append(record)
            read = counts_of([record]).read > 0
            guess = result.guesses[place] if image.guess is not None else None
            assert result.originals is not None
            pictures.append(Picture(original=result.originals[place], guess=guess, read=read))
    pictures.sort(key=lambda one: not one.read)
    return counts_of(records), pictures


def _rows(problem: Problem, truths: Sequence[Batch], loaded: Sequence[Tensor]) -> Tensor:
    """Return (N, F) other rows in [0, 1] to compare with; none where inputs have several tensors."""
    model, width = problem.model, problem.truth[0].numel()
    if len(model.shapes) != 1:
        return torch.empty(0, width)
    alike = [i.reshape(len(i), *model.shapes[0]) for i in loaded if len(i) and i[0].numel() == width]
    if not alike:
        return torch.empty(0, width)
    rows = model.looked_for(torch.cat(alike)).flatten(1)[:2000]
    own = torch.cat([truth.inputs for truth in truths]).flatten(1)
    return rows[torch.cdist(rows, own).amin(1) > 1e-5]


def _count_rows(found: Sequence[Reconstruction], truths: Sequence[Batch], others: Tensor) -> tuple[Counts, list[Row]]:
    exact = identified = nothing = failures = 0
    shown: list[Row] = []
    for guess, truth in zip(found, truths, strict=True):
        wanted = truth.inputs.flatten(1).float()
        if guess.batch is None or guess.batch.inputs.flatten(1).shape != wanted.shape:
            failures += len(wanted)
            shown += [Row(original=row.tolist(), guess=None, read=False) for row in wanted]
            continue
        given = guess.batch.inputs.detach().float().flatten(1).clamp(0, 1)
        given = given[assign(given, wanted)] if len(wanted) > 1 else given
        for row, made in zip(wanted, given, strict=True):
            is_exact = bool((row - made).abs().max() <= EXACT_ROW)
            apart = (made - row).norm()
            near = len(others) >= LEAST_CANDIDATES and bool(apart < torch.cdist(made[None], others).min())
            exact, identified = exact + is_exact, identified + (near and not is_exact)
            nothing += not (is_exact or near)
            shown.append(Row(original=row.tolist(), guess=made.tolist(), read=is_exact or near))
    shown.sort(key=lambda one: not one.read)
    counts = Counts(
        exact=exact,
        identified=identified,
        nothing=nothing,
        failures=failures,
        groups=len(found),
        candidates=len(others),
    )
    return counts, shown
