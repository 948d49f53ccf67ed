"""Reconstruct the one-hot features of a graph's nodes from gradients; the graph's edges are given."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.auditing.instrument.program import ReplayModel, connections_of
from fl_privacy.auditing.scenario_problem import StepProblem
from fl_privacy.auditing.scenario_scores import MOST_SHOWN
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.measure.answer import Answer, Shown
from fl_privacy.measure.counts import Counts
from fl_privacy.measure.intervals import binomial_tail
from fl_privacy.models.gradients.hooks import replaced_input
from fl_privacy.models.unwrap_model import detached_copy
from fl_privacy.types import Batch, Observation, Reconstruction, Tensors

MOST_ROWS, MOST_KEPT, MOST_CHECKED = 400_000, 1000, 100
"""Largest number of node rows of one trial, of kept assignments, and of those whose gradient is computed."""

SOLVED, SMALLEST = 1e-6, 1e-5
"""Squared relative error of a solved gradient, and smallest singular value of a span relative to the largest."""

Layer = tuple[nn.Module, Tensor]
"""A layer with a basis (R, D) of its inputs' span."""


class GraphTrial:
    """Evaluates the network of an observation on guessed graphs.

    ``near``: layers whose input at a node depends only on the node and its neighbors; ``deep``: layers that see more
    nodes. ``present``: size (F,) of each feature in the gradients, 0 if no node has it.
    """

    def __init__(self, observation: Observation) -> None:
        assert isinstance(observation.model, ReplayModel)
        self.model: Any = detached_copy(observation.model).train(observation.plan.mode == "train")
        self.model.load_state_dict({**observation.sent.parameters, **observation.sent.buffers}, strict=False)
        self.constants, (self.variable,) = observation.model.program.constants, observation.model.variables
        self.nodes, self.width = self.constants[self.variable].shape
        self.links = connections_of(observation.model)
        self.around = [sorted({node, *near}) for node, near in enumerate(neighbors(observation.model))]
        self.gradient: Tensors = as_gradient(observation)
        self.near, self.deep, self.present = list[Layer](), list[Layer](), torch.zeros(self.width)
        first, second = torch.rand(2, self.nodes, self.width, generator=torch.Generator().manual_seed(0))
        center = max(range(self.nodes), key=lambda node: len(self.around[node]))
        tries = torch.stack([first, second])
        tries[1, self.around[center]] = first[self.around[center]]
        for name, layer in self.model.named_modules():
            gradient = self.gradient.get(f"{name}.weight")
            if gradient is None or gradient.dim() != 2 or (seen := self.inputs(layer, tries)) is None:
                continue
            _, sizes, basis = torch.linalg.svd(gradient.double(), full_matrices=False)
            basis = basis[sizes > SMALLEST * sizes[0]]
            near = torch.allclose(seen[0, center], seen[1, center], rtol=1e-4, atol=1e-6)
            if near and seen.shape[2] == self.width:
                self.present += basis.abs().amax(0)
            if len(basis) < basis.shape[1] == seen.shape[2]:
                (self.near if near else self.deep).append((layer, basis))

    def inputs(self, layer: nn.Module, nodes: Tensor) -> Tensor | None:
        """Return a layer's inputs (M, N, D) in M guessed graphs (M, N, F); ``None`` without one input for each node."""
        number, seen = len(nodes), list[Tensor]()

        def stop(inputs: Tensor) -> Tensor:
            seen.append(inputs.detach())
            raise InterruptedError

        given, edges = {self.variable: nodes.flatten(0, 1)}, self.constants[self.links]
        for key, value in self.constants.items():
            if key == self.links:
                given[key] = torch.cat([value + self.nodes * place for place in range(number)], 1)
            elif key != self.variable and value.dim() and len(value) in (self.nodes, edges.shape[1]):
                given[key] = value.repeat(number, *[1] * (value.dim() - 1))
        with torch.no_grad(), replaced_input(layer, stop):
            attempt(lambda: self.model.program.run(given, list(self.model.parts), {}))
        fits = bool(seen) and seen[0].dim() == 2 and len(seen[0]) == number * self.nodes
        return seen[0].reshape(number, self.nodes, -1) if fits else None

    def distance(self, layers: Sequence[Layer], nodes: Tensor) -> Tensor:
        """Return how badly each of N nodes, in M guessed graphs, fits the gradients of ``layers``: (M, N).

        It is the distance of layers' inputs at the node from the gradients' row spaces, relative to the inputs, summed.
        """
        total = torch.zeros(nodes.shape[:2]).double()
        for layer, basis in layers:
            rows = self.inputs(layer, nodes)
            assert rows is not None
            rows = rows.double()
            total += (rows - rows @ basis.T @ basis).norm(dim=2) / rows.norm(dim=2).clamp_min(1e-12)
        return total

    def error(self, nodes: Tensor) -> float:
        named = [(p, self.gradient[name]) for name, p in self.model.named_parameters() if name in self.gradient]
        loss = self.model(nodes[:, None, None]).mean()
        made = torch.autograd.grad(loss, [p for p, _ in named], allow_unused=True, materialize_grads=True)
        errors = [(g - t).square().sum() / t.square().sum() for g, (_, t) in zip(made, named, strict=True) if t.any()]
        return float(torch.stack(errors).mean())


def neighbors(model: ReplayModel) -> list[list[int]]:
    """List, for each node, the nodes from which an edge leads to that node."""
    edges, number = model.program.constants[connections_of(model)], len(model.program.constants[model.variables[0]])
    return [sorted(set(edges[0][edges[1] == node].tolist())) for node in range(number)]


def nodes_of(observation: Observation, widths: Sequence[int]) -> Reconstruction | None:
    """Reconstruct one-hot nodes from the condition that layer inputs lie in the row spaces of the gradients.

    See GRAIN (arXiv 2503.01838). ``widths``: number of columns of each one-hot feature. ``None`` if nothing is found.
    """
    made = attempt(lambda: _nearest(GraphTrial(observation), widths))
    if isinstance(made, Failure) or made is None:
        return None
    error, nodes = made
    batch = Batch(nodes[:, None, None], torch.ones(len(nodes), 1))
    return Reconstruction(id=observation.id, batch=batch, loss=error, member="spans of the layers' gradients")


def _nearest(trial: GraphTrial, widths: Sequence[int]) -> tuple[float, Tensor] | None:
    """Return (error, nodes (N, F)) of the guess whose gradient is nearest to the observed one; ``None`` without any."""
    columns = torch.arange(trial.width).split(list(widths))
    choices = [[c for c in each.tolist() if trial.present[c] > SMALLEST] for each in columns]
    most = MOST_ROWS // trial.nodes
    if not trial.near or not 0 < math.prod(map(len, choices)) <= most:
        return None
    kinds = torch.stack([torch.zeros(trial.width).index_fill(0, torch.tensor(each), 1.0) for each in product(*choices)])
    kept, far, unknown = torch.zeros(1, trial.nodes).long(), torch.zeros(1).double(), set(range(trial.nodes))
    waiting = set(unknown)
    while waiting:
        node = min(waiting, key=lambda v: len(unknown.intersection(trial.around[v])))
        waiting.remove(node)
        added = sorted(unknown.intersection(trial.around[node]))
        if (number := len(kinds) ** len(added)) > most:
            continue
        ways = torch.tensor(list(product(range(len(kinds)), repeat=len(added)))).reshape(number, len(added)).long()
        kept, far = (each[: most // number].repeat_interleave(number, 0) for each in (kept, far))
        kept[:, added] = ways.repeat(len(kept) // number, 1)
        far = far + trial.distance(trial.near, kinds[kept])[:, node]
        order = far.argsort()[:MOST_KEPT]
        kept, far, unknown = kept[order], far[order], unknown.difference(added)
    tried = kept[(far + trial.distance(trial.deep, kinds[kept]).sum(1)).argsort()[:MOST_CHECKED]]
    best = math.inf, kinds[tried[0]]
    for one in tried:
        if best[0] > SOLVED and (error := trial.error(kinds[one])) < best[0]:
            best = error, kinds[one]
    return best


def score_nodes(problems: Sequence[StepProblem], found: Sequence[Reconstruction], loaded: Sequence[Tensor]) -> Answer:
    """Count nodes that are reconstructed correctly; nodes that the edges do not distinguish are interchangeable.

    ``counts.chance`` is the hit rate of guesses without the update: nodes of other graphs with the same degree, or
    ``loaded`` nodes (N, F), whichever is higher. ``control`` counts another upload's guess, assigned by degree.
    """
    truths, near = [p.truth.flatten(1) for p in problems], [neighbors(p.model) for p in problems]
    degrees, colors = (
        [torch.tensor([len(each) for each in graph]) for graph in near],
        [colors_of(each) for each in near],
    )
    guesses = list[Tensor | None]()
    for one, problem in zip(found, problems, strict=True):  # guesses of other attacks are rounded to kinds
        parts = () if one.batch is None or one.failure else one.batch.inputs.flatten(1).split(problem.model.kinds, 1)
        guesses.append(torch.cat([torch.eye(part.shape[1])[part.argmax(1)] for part in parts], 1) if parts else None)
    pool = torch.cat([each for each in loaded if each.shape[1:] == truths[0].shape[1:]])
    counts, control, shares, shown = Counts(candidates=len(pool)), Counts(), list[float](), list[Shown]()
    for k, (truth, guess) in enumerate(zip(truths, guesses, strict=True)):
        if guess is None:
            counts = replace(counts, failures=counts.failures + len(truth))
            continue
        counts = _counted(counts, guess, truth, colors[k])
        same = (guess == truth).all(1).tolist()
        pairs = zip(truth.tolist(), guess.tolist(), same, strict=True)
        shown += [Shown(original=row, guess=made, reconstructed=right) for row, made, right in pairs]
        for node, row in enumerate(guess):
            linked = [t[degrees[j] == degrees[k][node]] for j, t in enumerate(truths) if j != k]
            equal = [(rows == row).all(1) for rows in (pool, torch.cat(linked or [pool]))]
            share = max(float(each.sum() + 1) / (len(each) + 1) for each in equal)
            shares.append(1 - (1 - share) ** colors[k].count(colors[k][node]))
        other, own = guesses[(k + 1) % len(guesses)], degrees[(k + 1) % len(guesses)]
        if len(guesses) > 1 and other is not None:
            placed = torch.empty_like(truth)
            placed[degrees[k].argsort()] = other[own.argsort()][torch.arange(len(truth)) * len(own) // len(truth)]
            control = _counted(control, placed, truth, colors[k])
    usual = sum(shares) / max(1, len(shares))
    chance = binomial_tail(counts.exact, len(shares), usual)  # at least that of unequal shares (Hoeffding 1956)
    counts = replace(counts, chance=chance if counts.exact > usual * len(shares) else 1.0)
    shown.sort(key=lambda one: not one.reconstructed)
    return Answer(kind="node", counts=counts, control=control if control.groups else None, shown=shown[:MOST_SHOWN])


def _counted(counts: Counts, guess: Tensor, truth: Tensor, colors: Sequence[int]) -> Counts:
    rows, there = (Counter(zip(colors, map(tuple, nodes.tolist()), strict=True)) for nodes in (guess, truth))
    exact, nothing = counts.exact + (rows & there).total(), counts.nothing + (rows - there).total()
    return replace(counts, exact=exact, nothing=nothing, groups=counts.groups + 1)


def colors_of(near: Sequence[Sequence[int]]) -> list[int]:
    """Return each node's color by color refinement (Weisfeiler and Leman); ``near`` lists each node's neighbors."""
    colors = [0] * len(near)
    while True:
        finer = [hash((colors[node], *sorted(colors[v] for v in around))) for node, around in enumerate(near)]
        if len(set(finer)) == len(set(colors)):
            return colors
        colors = finer
