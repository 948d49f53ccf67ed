"""Attack the real training's upload: replay its local steps, or take its change as one gradient, on a sample."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from fl_privacy.auditing.instrument.watch import Watched
from fl_privacy.auditing.scenario_problem import NotAttackedError, StepProblem, WatchedReply, gradient_plan, plan_of
from fl_privacy.auditing.scenario_scores import EXACT_ROW
from fl_privacy.runs.app import MOST_IMAGES, MOST_STEPS
from fl_privacy.types import Observation, Reconstruction, Tensors

MOST_POOL, VARIED, LEAST_VARIED = 4096, 32, 8
"""Largest number of compared examples of a client; if ``LEAST_VARIED`` features have ``VARIED`` different values,
equal examples are no coincidence."""


def examples_of(seen: Watched) -> int:
    """Return the number of examples behind a training: those of one epoch or, if not observed, all loaded ones."""
    return sum(seen.passes.values()) or seen.loaded


def once(seen: Watched, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return one epoch of each of ``inputs`` (N, ...); if none was observed, its distinct first ``MOST_POOL``."""
    number = sum(seen.passes.values())
    return [each[:number] if number else torch.unique(each[:MOST_POOL], dim=0) for each in inputs]


def pool_of(problem: StepProblem, inputs: Sequence[Tensor]) -> Tensor | None:
    """Return up to ``MOST_POOL`` loaded examples (N, ...), normalized like the attacker's guesses.

    ``inputs``: loaded tensors. ``None`` if the network takes other inputs, too, or the app changes examples before.
    """
    model, whole = problem.model, problem.whole or bool(problem.model.fixed_inputs)
    alike = [each for each in inputs if len(model.shapes) == 1 and tuple(each.shape[1:]) == tuple(model.shapes[0])]
    if whole or len(alike) != 1:
        return None
    pool = model.looked_for(alike[0][:MOST_POOL]).reshape(-1, *problem.input_shape)
    held = torch.cdist(problem.truth.flatten(1).double(), pool.flatten(1).double(), p=torch.inf).amin(1)
    return pool if bool((held <= EXACT_ROW).all()) else None


def observed_training(client: WatchedReply, problem: StepProblem, number: int, victim: int) -> tuple[Observation, str]:
    """Build what an attacker observes of an upload of ``number`` examples; also say what the attacker assumes.

    ``problem``: the client's first step, rebuilt. ``victim``: number of the observation.
    """
    seen, found = client.watched, client.matched
    if examples_of(seen) <= MOST_IMAGES and seen.steps <= MOST_STEPS and seen.batches:
        with suppress(NotAttackedError):
            plan, said = plan_of(seen, found, len(seen.batches[0][0])), f"The attacker replays all {seen.steps} steps."
            observation = problem.observed(victim, client.tensors(), plan)
            return replace(observation, upload=replace(observation.upload, num_examples=number)), said
    observation = problem.observed(victim, _mean_gradient(client), gradient_plan(seen))
    said = f"The attack treats the change in {seen.steps} steps as one gradient of {number} examples, which is inexact."
    return replace(observation, upload=replace(observation.upload, num_examples=number, buffers={})), said


def _mean_gradient(client: WatchedReply) -> Tensors:
    before, uploaded, shares = client.watched.before, client.tensors(), client.matched.shares
    if shares == "gradient":
        return uploaded
    rates = [(dict(settings), steps) for (_, settings), steps in client.watched.optimizers.items()]
    moved = sum(float(s.get("lr") or 1) * n / (1 - float(s.get("momentum") or 0)) for s, n in rates) or 1.0
    held = {name: value for name, value in uploaded.items() if name in before}
    changes = {name: value - before[name].float() if shares == "weights" else value for name, value in held.items()}
    if not any(change.any() for change in changes.values()):
        raise NotAttackedError("a changed model is expected, but the upload is equal to what was sent; train longer")
    return {name: -change / moved for name, change in changes.items()}


def sampled(
    problem: StepProblem, pool: Tensor, others: Sequence[Tensor], guess: Reconstruction, *, number: int, seed: int
) -> StepProblem:
    """Return ``problem`` with ``number`` true examples from ``pool``: those that ``guess`` has exactly, then random.

    An exact guess counts only if it equals one example of ``pool`` and none of other clients (``others``). None counts
    if ``others`` has fewer examples than ``pool``, or few features vary.
    """
    flat = pool.flatten(1).double()
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(seed)).tolist()
    hits = list[int]()
    shape = tuple(problem.model.shapes[0])
    alike = [problem.model.looked_for(each).flatten(1) for each in others if tuple(each.shape[1:]) == shape]
    foreign = torch.cat([torch.empty(0, problem.truth[0].numel()), *alike])[:MOST_POOL].double()
    varied = sum(len(column.unique()) >= min(VARIED, len(flat) / 2) for column in flat.T[: 64 * LEAST_VARIED])
    if guess.batch is not None and len(foreign) >= len(flat) and varied >= LEAST_VARIED:
        given = guess.batch.inputs.detach().flatten(1).double().clamp(0, 1)
        if given.shape[1] == flat.shape[1]:
            equal = torch.cdist(given, flat, p=torch.inf) <= EXACT_ROW
            usual = (torch.cdist(given, foreign, p=torch.inf) <= EXACT_ROW).any(1) | (equal.sum(1) != 1)
            hits = list(dict.fromkeys(equal[~usual].double().argmax(1).tolist()))
    chosen = list(dict.fromkeys([*hits, *order]))[:number]
    return replace(problem, truth=pool[chosen], labels=None)
