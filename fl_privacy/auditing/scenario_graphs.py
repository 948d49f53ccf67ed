"""Reconstruct graphs from gradients: nodes and edges, or the nodes if the edges are given; nodes are one-hot."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations_with_replacement, product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_privacy.attacks.attack import seconds_left, timely
from fl_privacy.attacks.exact.certificate import nonnegative_least_squares
from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.auditing.instrument.program import ReplayModel, connections_of
from fl_privacy.auditing.scenario_problem import NotAttackedError, StepProblem, reason_of
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

DEEPEST, MOST_NEIGHBORS, MOST_BALLS, MOST_NODES, MOST_STEPS = 6, 8, 20_000, 64, 20_000
"""Distance beyond any message; most neighbors of a node, neighborhoods of a radius, nodes, and steps of a search."""

NOISE, FITS = 1e-6, 1e-3
"""Smallest singular value of a gradient, relative to its largest, that rounding does not make; and largest relative
error of a neighborhood or of counts that fit."""

Layer = tuple[nn.Module, Tensor]
"""A layer with a basis (R, D) of its inputs' span."""

Graph = tuple[Tensor, Tensor]
"""Nodes (N, F) and edges (2, E), each in both directions."""


class GraphTrial:
    """Evaluates the network of an observation on guessed graphs.

    ``near``: layers whose input at a node depends only on the node and its neighbors; ``deep``: layers that depend on
    more distant nodes. ``present``: weight (F,) of each node feature in the first gradients, 0 if no node has the
    feature.
    """

    def __init__(self, observation: Observation) -> None:
        assert isinstance(observation.model, ReplayModel)
        self.model: Any = detached_copy(observation.model).train(observation.plan.mode == "train")
        self.model.load_state_dict({**observation.sent.parameters, **observation.sent.buffers}, strict=False)
        self.constants, (self.variable,) = observation.model.program.constants, observation.model.variables
        self.nodes, self.width = self.constants[self.variable].shape
        self.links = connections_of(observation.model)
        whole = {n: t for n, t in self.constants.items() if t.shape == (self.nodes,) and not t.is_floating_point()}
        self.graphs = next((n for n, ids in whole.items() if not ids.any()), -1)  # number of each node's graph
        self.around = [sorted({node, *near}) for node, near in enumerate(linked(*graph_in(observation.model)))]
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
        """Return ``layer``'s inputs (M, N, D) for ``nodes`` (M, N, F) of M guessed graphs, if each node has one."""
        number = len(nodes)
        given, edges = {self.variable: nodes.flatten(0, 1)}, self.constants[self.links]
        for key, value in self.constants.items():
            if key == self.links:
                given[key] = torch.cat([value + self.nodes * place for place in range(number)], 1)
            elif key != self.variable and value.dim() and len(value) in (self.nodes, edges.shape[1]):
                given[key] = value.repeat(number, *[1] * (value.dim() - 1))
        seen = self.stopped(layer, given)
        return seen.reshape(number, self.nodes, -1) if seen is not None and len(seen) == number * self.nodes else None

    def stopped(self, layer: nn.Module, given: Mapping[int, Tensor]) -> Tensor | None:
        if not seconds_left():
            raise NotAttackedError("the time limit ended the search")
        seen = list[Tensor]()

        def stop(inputs: Tensor) -> Tensor:
            seen.append(inputs.detach())
            raise InterruptedError

        with torch.no_grad(), replaced_input(layer, stop):
            attempt(lambda: self.model.program.run(given, list(self.model.parts), {}))
        return seen[0] if seen and seen[0].dim() == 2 else None

    def distance(self, layers: Sequence[Layer], nodes: Tensor) -> Tensor:
        """Return the misfit (M, N) of each node of M guessed graphs (M, N, F) to the gradients of ``layers``."""
        total = torch.zeros(nodes.shape[:2]).double()
        for layer, basis in layers:
            rows = self.inputs(layer, nodes)
            assert rows is not None
            rows = rows.double()
            total += (rows - rows @ basis.T @ basis).norm(dim=2) / rows.norm(dim=2).clamp_min(1e-12)
        return total

    def error(self, given: Mapping[int, Tensor]) -> float:
        named = [(p, self.gradient[name]) for name, p in self.model.named_parameters() if name in self.gradient]
        loss = self.model.program.run(given, list(self.model.parts), dict(self.model.named_parameters()))
        made = torch.autograd.grad(loss, [p for p, _ in named], allow_unused=True, materialize_grads=True)
        errors = [(g - t).square().sum() / t.square().sum() for g, (_, t) in zip(made, named, strict=True) if t.any()]
        return float(torch.stack(errors).mean())


@dataclass(frozen=True, eq=False)
class Balls:
    """Possible neighborhoods of radius r around a graph's nodes; entry i of each list describes neighborhood i.

    ``cores``: index of the neighborhood of radius r - 1 around the same node. ``slots``: index of the neighborhood of
    radius r - 1 around each neighbor. ``kinds``: index of the node's features.
    """

    cores: Sequence[int]
    slots: Sequence[tuple[int, ...]]
    kinds: Sequence[int]

    def chosen(self, places: Sequence[int]) -> "Balls":
        cores, slots, kinds = self.cores, self.slots, self.kinds
        return Balls([cores[p] for p in places], [slots[p] for p in places], [kinds[p] for p in places])


class UnknownEdges:
    """Search for a graph that explains the gradient of a message-passing network (GRAIN, arXiv 2503.01838, sec. 4)."""

    def __init__(self, trial: GraphTrial, widths: Sequence[int], noise: float) -> None:
        self.trial, self.filters, self.pools = trial, defaultdict[int, list[Layer]](list), list[tuple[str, nn.Module]]()
        path = torch.stack([torch.arange(DEEPEST), torch.arange(1, DEEPEST + 1)])
        drawn = torch.rand(DEEPEST + 1, trial.width, generator=torch.Generator().manual_seed(0))
        self.nodes, self.edges, self.start, self.top, present = drawn[:1], path[:, :0], 0, 0, torch.ones(trial.width)
        for name, layer in trial.model.named_modules():
            gradient = trial.gradient.get(f"{name}.weight")
            if gradient is None or gradient.dim() != 2 or (last := self._last(layer, drawn, path)) is None:
                continue
            seen, pooled = last
            moved = [drawn.index_add(0, torch.tensor([DEEPEST - far]), drawn[:1] + 1) for far in range(DEEPEST)]
            depth = max([k for k, each in enumerate(moved) if self._moves(layer, each, path, seen)], default=0)
            crossed = torch.cat([path, torch.tensor([[0], [DEEPEST - depth]])], 1)
            if depth == DEEPEST - 1 or (depth and self._moves(layer, drawn, crossed, seen)):
                raise NotAttackedError("a node's output depends on its neighbors' degrees, the batch or random draws")
            _, sizes, basis = torch.linalg.svd(gradient.double(), full_matrices=False)
            basis = basis[sizes > noise * sizes[0]]
            if pooled:
                self.pools.append((name, layer))
                self.top = depth
            elif depth <= 1 and seen.shape[1] == trial.width:
                present *= basis.abs().amax(0) > noise
            elif depth:
                self.filters[depth].append((layer, basis))
        choices = [[c for c in each.tolist() if present[c]] for each in torch.arange(trial.width).split(list(widths))]
        if not self.pools or not self.top or not 0 < math.prod(map(len, choices)) <= MOST_NODES:
            raise NotAttackedError("a layer after pooling is expected, and few kinds of nodes")
        kinds = [torch.zeros(trial.width).index_fill(0, torch.tensor(each), 1.0) for each in product(*choices)]
        self.kinds = torch.stack(kinds)

    def _last(self, layer: nn.Module, nodes: Tensor, edges: Tensor, number: int = 1) -> tuple[Tensor, bool] | None:
        """Return ``layer``'s inputs at the last ``number`` nodes of a graph, and whether the layer follows pooling.

        The graph has features ``nodes`` (N, F) and ``edges`` (2, E). ``None`` if not each node or graph has one input.
        """
        ids = torch.cat([torch.full((len(nodes) - number,), number), torch.arange(number)])
        given = {self.trial.variable: nodes, self.trial.links: edges, self.trial.graphs: ids}
        if (seen := self.trial.stopped(layer, given)) is None or len(seen) not in (len(nodes), number + 1):
            return None
        return (seen[-number:], False) if len(seen) == len(nodes) else (seen[:number], True)

    def _moves(self, layer: nn.Module, nodes: Tensor, edges: Tensor, seen: Tensor) -> bool:
        now = self._last(layer, nodes, edges)
        return now is None or not torch.allclose(now[0], seen, rtol=1e-4, atol=1e-7)

    def _inputs(self, layer: nn.Module, balls: Balls) -> Tensor:
        nodes = torch.cat([self.nodes, self.kinds[balls.kinds]])
        seen = self._last(layer, nodes, torch.cat([self.edges, self._leading(balls)], 1), len(balls.kinds))
        if seen is None:
            raise NotAttackedError("the network takes no other graph than the client's")
        return seen[0].double()

    def _leading(self, balls: Balls) -> Tensor:
        ends = [(self.start + one, len(self.nodes) + k) for k, slots in enumerate(balls.slots) for one in slots]
        return torch.tensor(ends, dtype=torch.long).reshape(-1, 2).T

    def _grown(self, low: Balls, radius: int) -> Balls:
        made = list[tuple[int, tuple[int, ...], int]]()
        if radius == 1:
            number = len(low.kinds)
            sizes = [number * math.comb(number + k - 1, k) for k in range(MOST_NEIGHBORS + 1)]
            most = max(k for k in range(MOST_NEIGHBORS + 1) if sum(sizes[: k + 1]) <= MOST_BALLS)
            ways = [w for k in range(most + 1) for w in combinations_with_replacement(range(number), k)]
            made = [(kind, way, kind) for kind in range(number) for way in ways]
        else:
            fitting = defaultdict[tuple[int, int], list[int]](list)
            for ball, (core, slots) in enumerate(zip(low.cores, low.slots, strict=True)):
                for slot in set(slots):
                    fitting[core, slot].append(ball)
            for ball, (core, slots) in enumerate(zip(low.cores, low.slots, strict=True)):
                each = Counter(slots).items()
                if math.prod(math.comb(len(fitting[s, core]) + m - 1, m) for s, m in each) > MOST_BALLS - len(made):
                    raise NotAttackedError(f"more than {MOST_BALLS} neighborhoods fit the gradients")
                for way in product(*(combinations_with_replacement(fitting[s, core], m) for s, m in each)):
                    made.append((ball, tuple(sorted(chain.from_iterable(way))), low.kinds[ball]))
        balls = Balls(*map(list, zip(*made, strict=True)))
        far = torch.full((len(made),), math.inf).double()
        for layer, basis in self.filters[radius] if radius < self.top else ():
            rows = self._inputs(layer, balls)
            if torch.linalg.matrix_rank(rows, rtol=NOISE) > len(basis):  # otherwise all rows fit
                left = (rows - rows @ basis.T @ basis).norm(dim=1) / rows.norm(dim=1).clamp_min(1e-12)
                far = torch.minimum(far, left)  # a layer may miss nodes whose outputs have equal gradients
        return balls.chosen((far < FITS).nonzero()[:, 0].tolist()) if bool(far.isfinite().any()) else balls

    def solved(self) -> Iterator[Graph]:
        balls = Balls(range(len(self.kinds)), [()] * len(self.kinds), range(len(self.kinds)))
        for radius in range(1, self.top + 1):
            self.edges = torch.cat([self.edges, self._leading(balls)], 1)
            self.start, self.nodes = len(self.nodes), torch.cat([self.nodes, self.kinds[balls.kinds]])
            balls = self._grown(balls, radius)
        for counts in timely(self._counts(balls)):
            held = balls.chosen([ball for ball, number in enumerate(counts) for _ in range(number)])
            if (pairs := joined(held.cores, held.slots)) is not None:
                yield self.kinds[held.kinds], torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T

    def _counts(self, balls: Balls) -> Iterator[list[int]]:
        ends = defaultdict[tuple[int, int], Tensor](lambda: torch.zeros(len(balls.cores)).double())
        for ball, (core, slots) in enumerate(zip(balls.cores, balls.slots, strict=True)):
            for slot, number in Counter(slots).items():
                if slot != core:
                    ends[min(core, slot), max(core, slot)][ball] += number if core < slot else -number
        each = torch.stack([torch.ones(len(balls.cores)).double(), *ends.values()])
        for name, layer in self.pools:
            if (bias := self.trial.gradient.get(f"{name}.bias")) is None or not bias.any():
                continue
            pooled = bias.double() @ self.trial.gradient[f"{name}.weight"].double() / bias.double().square().sum()
            outputs, size = self._inputs(layer, balls).T, pooled.norm()
            left = torch.cat([outputs / size, each])
            right = torch.cat([pooled / size, torch.eye(len(each))[0]]).double()
            rows = torch.arange(len(left)) != len(outputs)  # without the sum of shares: for sums of nodes, not means
            for used, numbers in ((rows | True, range(1, MOST_NODES + 1)), (rows, (1,))):
                shares = nonnegative_least_squares(left[used], right[used])
                for counts in ((number * shares).round() for number in numbers):
                    total = counts.sum() if used.all() else 1
                    if 0 < counts.sum() <= MOST_NODES and (left @ counts / total - right)[used].abs().max() < FITS:
                        yield counts.int().tolist()


def joined(cores: Sequence[int], slots: Sequence[Sequence[int]]) -> list[tuple[int, int]] | None:
    """Return edges of a graph, in both directions, in which each node has the neighbors that it needs.

    ``cores``: type of each node. ``slots``: types of neighbors that each node needs. A connected graph is preferred;
    ``None`` if none is found within ``MOST_STEPS`` steps.
    """
    begun = sorted(range(len(slots)), key=lambda v: len(slots[v]) > 0)[: 1 + sum(not each for each in slots)]
    free, near = [Counter(each) for each in slots], [set[int]() for _ in slots]

    def grow(order: list[int], steps: Iterator[int], *, apart: bool) -> bool:
        if next(steps, None) is None:
            return False
        node = next((v for v in order if free[v].total()), None)
        if node is None:
            rest = [v for v in range(len(slots)) if v not in order]
            return not rest or (apart and grow([*order, rest[0]], steps, apart=apart))
        slot, seen = min(+free[node]), set[tuple[Any, ...]]()
        others = [v for v in range(len(slots)) if cores[v] == slot and free[v][cores[node]] and v not in near[node]]
        for other in sorted(others, key=order.__contains__):
            state = tuple(sorted(free[other].items())), other if other in order else -1
            if other == node or state in seen:
                continue
            seen.add(state)
            for a, b, change in ((node, other, -1), (other, node, -1)):
                free[a][cores[b]] += change
                near[a].add(b)
            if grow(order if other in order else [*order, other], steps, apart=apart):
                return True
            for a, b, change in ((node, other, 1), (other, node, 1)):
                free[a][cores[b]] += change
                near[a].discard(b)
        return False

    whole = any(grow(begun, timely(range(MOST_STEPS)), apart=apart) for apart in (False, True))
    return [(a, b) for a, each in enumerate(near) for b in sorted(each)] if whole else None


def graph_of(observation: Observation, widths: Sequence[int]) -> Graph | Failure:
    """Reconstruct a graph's nodes and edges from the observed gradient; return the reason if no graph explains it.

    ``widths``: number of columns of each one-hot feature. Graphs whose nodes have the same neighborhoods, as far as the
    network sees, can't be distinguished.
    """

    def fitting() -> Graph:
        trial, noise = GraphTrial(observation), rounding_of(observation)
        for nodes, edges in UnknownEdges(trial, widths, noise).solved():
            given = {trial.variable: nodes, trial.links: edges, trial.graphs: torch.zeros(len(nodes)).long()}
            if trial.error(given) < max(SOLVED, noise**2):
                return nodes, edges
        raise NotAttackedError("no graph with the observed gradient was found")

    return attempt(fitting)


def rounding_of(observation: Observation) -> float:
    """Return the largest error that rounding may make in a gradient, relative to its largest singular value."""
    gradient, plan, most = as_gradient(observation), observation.plan, NOISE
    for name, value in gradient.items() if plan.shares != "gradient" else ():
        if value.dim() == 2 and value.any():
            error = 2.0**-24 * observation.sent.parameters[name].abs().max() * math.sqrt(max(value.shape)) / plan.lr
            most = max(most, float(error / torch.linalg.matrix_norm(value, 2)))
    return most


def score_graphs(problems: Sequence[StepProblem], found: Sequence[Graph | Failure]) -> Answer:
    """Count the nodes whose features and neighbors are all reconstructed; ``found``: each upload's guess, or failure.

    The control scores true graphs of other uploads as guesses; ``counts.chance``: probability that such guesses hit as
    many nodes. Graphs above ``MOST_NODES`` nodes count as missed.
    """
    truths, right, usual = [graph_in(problem.model) for problem in problems], np.zeros(3, int), np.zeros(3)
    small = [k for k, truth in enumerate(truths) if len(truth[0]) <= MOST_NODES]
    for k in small:
        if not isinstance(guess := found[k], Failure):
            right += _overlap(guess, truths[k])
            others = [j for j in small if j != k] or [k]  # without others, all may be chance
            usual += np.mean([_overlap(truths[j], truths[k]) for j in others], 0)
    nodes, edges = sum(len(truth[0]) for truth in truths), sum(truth[1].shape[1] // 2 for truth in truths)
    missing, many = Counter(reason_of(each) for each in found if isinstance(each, Failure)), len(truths)
    why = [f"Of {number} of {many} graphs, edges are not reconstructed: {each}." for each, number in missing.items()]
    if missing.total() == many:
        return Answer(kind="graph", counts=Counts(failures=nodes), notes=("", *why))
    exact, by_chance = int(right[0]), round(usual[0])
    chance = binomial_tail(exact, nodes, usual[0] / nodes)
    counts = Counts(exact=exact, nothing=nodes - exact, groups=many, candidates=many - 1, chance=chance)
    said = f"{right[1]} of {edges} edges are right (control: {usual[1]:.0f}), and {right[2]} of {many} graphs"
    given = "The attacker is given each graph's label, but neither its nodes nor its edges."
    notes = (given, f"Without given edges, {said} as a whole (control: {usual[2]:.0f}).", *why)
    control = Counts(exact=by_chance, nothing=nodes - by_chance, groups=many)
    return Answer(kind="graph", counts=counts, control=control, notes=notes)


def _overlap(guess: Graph, truth: Graph) -> np.ndarray:
    """Return the numbers (3,) of nodes, edges and graphs of ``truth`` that are right in ``guess``."""
    first, near = len(guess[0]), [*linked(*guess), *([v + len(guess[0]) for v in each] for each in linked(*truth))]
    features = [hash(tuple(row)) for row in torch.cat([guess[0], truth[0]]).tolist()]
    places, begun = [-1] * len(truth[0]), list(features)
    while True:
        for colors in reversed(list(colors_of(near, begun))):
            free = {color: v for v, color in enumerate(colors[:first]) if v not in places}
            node = next((v for v, place in enumerate(places) if place < 0 and colors[first + v] in free), None)
            if node is not None:
                break
        else:
            break
        places[node] = free[colors[first + node]]
        begun[first + node] = begun[places[node]] = hash((features[first + node], node))
    right, edges = 0, 0
    for node, place in enumerate(places):
        if place >= 0:
            made = {places[v - first] for v in near[first + node]}
            edges += len(made.intersection(near[place]))
            right += made == set(near[place]) and features[first + node] == features[place]
    return np.array([right, edges // 2, right == len(places) == first])


def graph_in(model: ReplayModel) -> Graph:
    """Return the client's own nodes and edges."""
    return model.program.constants[model.variables[0]], model.program.constants[connections_of(model)]


def linked(nodes: Tensor, edges: Tensor) -> list[list[int]]:
    """List, for each of N ``nodes``, the nodes from which one of ``edges`` leads to that node."""
    return [sorted(set(edges[0][edges[1] == node].tolist())) for node in range(len(nodes))]


def nodes_of(observation: Observation, widths: Sequence[int]) -> Reconstruction | None:
    """Reconstruct a graph's one-hot nodes: those whose layer inputs lie in the row spaces of the layers' gradients.

    See GRAIN (arXiv 2503.01838). ``widths``: number of columns of each one-hot feature. ``None`` if no layer is usable.
    """
    made = attempt(lambda: _nearest(GraphTrial(observation), widths))
    if isinstance(made, Failure) or made is None:
        return None
    batch = Batch(made[1][:, None, None], torch.ones(len(made[1]), 1))
    return Reconstruction(id=observation.id, batch=batch, loss=made[0], member="spans of the layers' gradients")


def _nearest(trial: GraphTrial, widths: Sequence[int]) -> tuple[float, Tensor] | None:
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
        if best[0] > SOLVED and (error := trial.error({trial.variable: kinds[one]})) < best[0]:
            best = error, kinds[one]
    return best


def score_nodes(problems: Sequence[StepProblem], found: Sequence[Reconstruction], loaded: Sequence[Tensor]) -> Answer:
    """Count the nodes whose features are reconstructed; nodes that the given edges do not distinguish may be swapped.

    ``counts.chance``: probability that guesses without the update hit as many: nodes of the same degree in other
    graphs, or ``loaded`` nodes (N, F), whichever hit more. ``control``: score of guesses at other uploads, matched by
    degree.
    """
    truths, near = [p.truth.flatten(1) for p in problems], [linked(*graph_in(p.model)) for p in problems]
    degrees, colors = (
        [torch.tensor([len(each) for each in graph]) for graph in near],
        [list(colors_of(each, [0] * len(each)))[-1] for each in near],
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
            alike = [t[degrees[j] == degrees[k][node]] for j, t in enumerate(truths) if j != k]
            equal = [(rows == row).all(1) for rows in (pool, torch.cat(alike or [pool]))]
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


def colors_of(near: Sequence[Sequence[int]], colors: Sequence[int]) -> Iterator[list[int]]:
    """Yield nodes' colors after each round of color refinement (Weisfeiler and Leman); ``near``: nodes' neighbors."""
    finer = list(colors)
    while True:
        yield finer
        colors = finer
        finer = [hash((colors[node], *sorted(colors[v] for v in around))) for node, around in enumerate(near)]
        if len(set(finer)) == len(set(colors)):
            return
