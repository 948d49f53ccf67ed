"""Scores of reconstructions, compared with guesses from other examples' uploads, and the time of attacks."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fl_privacy.auditing.scenario_problem import StepProblem
from fl_privacy.measure import evaluate_all
from fl_privacy.measure.answer import Answer, Kind, Shown
from fl_privacy.measure.counts import Counts, count
from fl_privacy.measure.descriptors import COARSE, Descriptors, ShiftedDescriptors, largest
from fl_privacy.measure.distractors import Distractors
from fl_privacy.measure.identification import laid_otherwise
from fl_privacy.measure.intervals import BAND, Coincidences, chance_of_upload, combined, either
from fl_privacy.measure.matching import assign
from fl_privacy.measure.outcome import LEAST_CANDIDATES, LIKENESS
from fl_privacy.measure.rule import LEVEL
from fl_privacy.models.unwrap_model import detached_copy, without_checkpointing
from fl_privacy.rng import streams_put_back
from fl_privacy.runs.distractors import others_among
from fl_privacy.types import Batch, Certainty, Observation, Reconstruction

EXACT_ROW, SAME = 0.01, 1e-5
"""Largest error of a feature, as a share of its range, in an exactly reconstructed row, and distance of equal rows."""

NEARER, MANY = 0.5, 100
"""A row of a batch counts if it is nearer to its guess than ``NEARER`` times the nearest other row or, with ``MANY``
other rows for each of the batch, nearer than all of them."""

MOST_SHOWN = 8

CALL, PRODUCT, ELEMENT = 1e-5, 5e-11, 2e-8
"""Seconds of a standard processor for each PyTorch call, for each operation of a matrix product, and for each parameter
whose step an optimizer other than SGD normalizes."""


class TimeSpent:
    """Timer whose call returns the seconds since its creation: wall-clock or CPU time, whichever is less."""

    def __init__(self) -> None:
        self._begun = time.perf_counter(), time.process_time()

    def __call__(self) -> float:
        return min(time.perf_counter() - self._begun[0], time.process_time() - self._begun[1])


def score(
    problems: Sequence[StepProblem],
    found: Sequence[Reconstruction],
    loaded: Sequence[Tensor],
    seed: int,
    other: Reconstruction | None = None,
) -> Answer:
    """Score the reconstructions ``found`` of ``problems``, and a control.

    ``loaded``: inputs (N, ...) that a guess may resemble instead of its original. ``other``: reconstruction of another
    client's upload, as control; if ``None``, each true batch is compared with the guess for another, different batch.
    """
    found_labels = ((problem, _classes(problem)) for problem in problems)
    truths = [Batch(p.truth, torch.zeros(len(p.truth)).long() if own is None else own) for p, own in found_labels]
    counted: Counted
    if problems[0].kind == "image":
        model, shape = problems[0].model, problems[0].input_shape
        alike = [model.looked_for(inputs)[:1000] for inputs in loaded if tuple(inputs.shape[1:]) == shape]
        images = [(image, 0) for inputs in alike for image in inputs]
        counted = partial(count_images, others=others_among(images, truths, shape, 1000, seed=seed))
    else:
        counted = partial(count_rows, others=_rows(problems[0], truths, loaded))
    answer = compared(problems[0].kind, found, truths, counted, other)
    return replace(answer, labels=_labels(problems, found))


Counted = Callable[[Sequence[Reconstruction], Sequence[Batch]], tuple[Counts, Sequence[Shown]]]
"""(reconstructions, true batches) -> counts of outcomes among distractors, and pairs to show."""


def compared(
    kind: Kind, found: Sequence[Reconstruction], truths: Sequence[Batch], counted: Counted, other: Reconstruction | None
) -> Answer:
    """Count reconstructions that are exact, near or wrong; a control compares other uploads' guesses.

    ``counted``: function that counts, see :data:`Counted`. ``other``: control's guess if there is a single upload.
    """
    counts, shown = counted(found, truths)

    def reads(guess: Reconstruction, truth: Batch) -> bool:
        return not (kind == "image" and _unlike(guess, truth)) and counted([guess], [truth])[0].read > 0

    turned, of = _turned(found, truths, reads)
    if other is not None:
        turned, of = [replace(other, id=found[0].id, **UNSURE)], list(truths)
    control = counted(turned, of)[0] if turned else None
    if control is None and counts.chance is None and counts.candidates < LEAST_CANDIDATES and not counts.exact:
        counts = replace(counts, chance=1.0)
    best = sorted(shown, key=lambda one: not one.reconstructed)[:MOST_SHOWN]
    return Answer(kind=kind, counts=counts, control=control, shown=best)


def _turned(
    found: Sequence[Reconstruction], truths: Sequence[Batch], reads: Callable[[Reconstruction, Batch], bool]
) -> tuple[list[Reconstruction], list[Batch]]:
    """For a control, pair each true batch with the guess for another upload.

    ``reads(guess, truth)``: whether both have the same examples; such pairs are left out.
    """
    turned, of = [], []
    for place, (own, truth) in enumerate(zip(found, truths, strict=True)):
        for other in (*range(place + 1, len(found)), *range(place)):
            if not reads(replace(own, batch=truths[other], failure=None, **UNSURE), truth):
                turned.append(replace(found[other], id=own.id, **UNSURE))
                of.append(truth)
                break
    return turned, of


def _unlike(guess: Reconstruction, truth: Batch) -> bool:
    assert guess.batch is not None
    images = guess.batch.inputs
    if images.shape[1:] != truth.inputs.shape[1:]:
        return True
    still = Descriptors(truth.inputs, COARSE).rows(0, 0)
    laid = (ShiftedDescriptors(torch.stack(laid_otherwise(image)), COARSE).rows(0, 0) for image in images)
    return all(float(largest(each, still).max()) < LIKENESS for each in laid)


UNSURE: Mapping[str, Any] = {"certainty": Certainty.APPROXIMATE, "certainties": ()}


def _classes(problem: StepProblem) -> Tensor | None:
    labels = problem.labels
    return None if labels is None or labels.dim() != 1 or labels.is_floating_point() else labels


def _labels(problems: Sequence[StepProblem], found: Sequence[Reconstruction]) -> tuple[int, int] | None:
    right = known = 0
    for problem, guess in zip(problems, found, strict=True):
        if problem.whole or (labels := _classes(problem)) is None:
            continue
        known += len(labels)
        right += 0 if guess.batch is None else labels_right(guess.batch.labels, labels)
    return (right, known) if known else None


def labels_right(given: Tensor, truth: Tensor) -> int:
    """Count the labels in ``given``, classes or scores of classes (N, K), that are in ``truth`` (N,), in any order."""
    given = given.argmax(-1) if given.is_floating_point() else given
    return (Counter(truth.tolist()) & Counter(given.flatten().tolist())).total()


def count_images(
    found: Sequence[Reconstruction], truths: Sequence[Batch], others: Distractors
) -> tuple[Counts, list[Shown]]:
    """Count images by outcome, and pair each original with its guess; ``others``: unrelated images to compare with."""
    shaped, scored, pictures = list(found), [], []
    for place, truth in enumerate(truths):
        if (batch := found[place].batch) is not None and batch.inputs.shape != truth.inputs.shape:
            shaped[place] = replace(found[place], batch=None, failure="a guess of another size")
    for result in evaluate_all(shaped, list(truths), others=others):
        for place, image in enumerate(result.images):
            scored.append((str(result.id), image))
            read = count(scored[-1:]).read > 0
            guess = result.guesses[place] if image.guess is not None else None
            assert result.originals is not None
            pictures.append(Shown(original=result.originals[place], guess=guess, reconstructed=read))
    return count(scored), pictures


def _rows(problem: StepProblem, truths: Sequence[Batch], loaded: Sequence[Tensor]) -> Tensor:
    model, width = problem.model, problem.truth[0].numel()
    loaded = loaded if len(model.shapes) == 1 else ()
    if not (alike := [i.reshape(len(i), *model.shapes[0]) for i in loaded if len(i) and i[0].numel() == width]):
        return torch.empty(0, width)
    rows = model.looked_for(torch.cat(alike)).flatten(1)[:2000]
    return without_once(rows, torch.cat([truth.inputs for truth in truths]).flatten(1))


def without_once(rows: Tensor, own: Tensor) -> Tensor:
    """Remove from ``rows`` one equal row for each row of ``own``; further equal rows stay."""
    left = torch.ones(len(rows), dtype=torch.bool)
    for one in (torch.cdist(rows, own) <= SAME).T:
        left[(one & left).nonzero()[:1]] = False
    return rows[left]


def count_rows(found: Sequence[Reconstruction], truths: Sequence[Batch], others: Tensor) -> tuple[Counts, list[Shown]]:
    """Count rows of tables that are exact, near or wrong, and pair them with guesses; ``others``: unrelated rows."""
    exact = identified = nothing = failures = 0
    neighbors = np.zeros(len(others))  # other rows that would be exact guesses at each
    if len(others) > 1:
        apart = torch.cdist(others.float(), others.float(), p=torch.inf)
        neighbors = ((apart <= EXACT_ROW).sum(1) - 1).numpy()
    chances, shown, equal = list[float](), list[Shown](), Coincidences.counted(neighbors)
    judged = list[tuple[Tensor, Tensor, Tensor, Tensor]]()
    for place, (guess, truth) in enumerate(zip(found, truths, strict=True)):
        wanted = truth.inputs.flatten(1).float()
        if guess.batch is None or guess.batch.inputs.flatten(1).shape != wanted.shape:
            failures += len(wanted)
            shown += [Shown(original=row.tolist(), guess=None, reconstructed=False) for row in wanted]
            continue
        given = guess.batch.inputs.detach().float().flatten(1).clamp(0, 1)
        given = given[assign(given, wanted)] if len(wanted) > 1 else given
        is_exact = (given - wanted).abs().amax(1) <= EXACT_ROW
        pool = others
        if not len(others):  # rows of other uploads that are none of this one's
            foreign = [each.inputs.flatten(1).float() for k, each in enumerate(truths) if k != place]
            pool = torch.cat([wanted[:0], *(each for each in foreign if each.shape[1] == wanted.shape[1])])
            pool = pool[(torch.cdist(pool, wanted, p=torch.inf) > EXACT_ROW).all(1)] if len(pool) else pool
        fit = -torch.cdist(given.double(), torch.cat([wanted, pool.to(wanted)]).double()).square().add(1e-6).log()
        same = equal.chance(int(is_exact.sum()), len(wanted)) if is_exact.any() else 1.0
        chances.append(either(chance_of_upload(fit.numpy(), len(wanted)), same))
        judged.append((wanted, given, is_exact, ~is_exact & _is_near(given, wanted, others)))
    others_joint = combined([chance for chance in chances if chance >= LEVEL])  # a certain row proves no other one
    for chance, (wanted, given, is_exact, near) in zip(chances, judged, strict=True):
        few_others = chance <= 1 - BAND and others_joint < LEVEL  # but nearest of them in several uploads
        if chance >= LEVEL and not few_others:
            near[:] = False
            is_exact[:] &= len(others) < 2 or not equal.of_usual  # other rows also equal each other
        exact, identified = exact + int(is_exact.sum()), identified + int(near.sum())
        nothing += int((~(is_exact | near)).sum())
        read = (is_exact | near).tolist()
        rows = zip(wanted.tolist(), given.tolist(), read, strict=True)
        shown += [Shown(original=row, guess=made, reconstructed=own) for row, made, own in rows]
    counts = Counts(exact=exact, identified=identified, nothing=nothing, failures=failures, groups=len(judged))
    return replace(counts, candidates=len(others), chance=combined(chances)), shown


def _is_near(given: Tensor, wanted: Tensor, others: Tensor) -> Tensor:
    apart = others[(torch.cdist(others, wanted) > SAME).all(1)]
    if not len(apart) or len(others) < LEAST_CANDIDATES * (len(given) > 1):
        return torch.zeros(len(given), dtype=torch.bool)
    enough = len(given) == 1 or len(others) >= MANY * len(given)
    nearest = torch.cdist(given, apart).amin(1) * (1.0 if enough else NEARER)
    return (given - wanted).norm(dim=1) < nearest


class _Work(TorchDispatchMode):
    calls, products = 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, count = func(*args, **(kwargs or {})), flop_registry.get(func._overloadpacket)
        self.calls += 1
        self.products += count(*args, **(kwargs or {}), out_val=out) if count else 0.0
        return out


@without_checkpointing()
def seconds_of_evaluation(observation: Observation) -> float:
    """Estimate the seconds of one attack step (a gradient of a gradient) on a standard processor."""
    model = detached_copy(observation.model).train(observation.plan.mode == "train")
    gray = torch.full((observation.upload.num_examples, *observation.input_shape), 0.5, requires_grad=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    with streams_put_back(), _Work() as work:
        first = torch.autograd.grad(model(gray).sum(), parameters, create_graph=True, allow_unused=True)
        size = [g.square().sum() for g in first if g is not None and g.requires_grad]
        if size:
            torch.autograd.grad(torch.stack(size).sum(), gray, allow_unused=True)
    normalized = sum(p.numel() for p in parameters) if observation.plan.optimizer != "sgd" else 0
    once = CALL * work.calls + PRODUCT * work.products + ELEMENT * normalized
    return once * (observation.plan.steps or 1)
