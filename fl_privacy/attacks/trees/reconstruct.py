"""Reconstruct a client's rows from its trees: first exact parts, then rows that explain all trees."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fl_privacy.attacks.trees.counts import (
    FirstTree,
    Training,
    count_first_tree,
    gradient_sums,
    infer_training,
    thresholds,
)
from fl_privacy.attacks.trees.grid import (
    WORD,
    Exchange,
    Grid,
    OwnTree,
    leaf_masks,
    leaf_of,
    make_grid,
    own_trees,
    states_of,
)
from fl_privacy.attacks.trees.model import LOGISTIC, Trees
from fl_privacy.errors import UserError
from fl_privacy.rng import derive_seed

HESSIAN = 0.25
"""Deviation allowed for hessian sums, as a share of that for gradient sums; a row's hessian is at most a quarter."""

DEPARTURE = 0.05  # probability that a feature of a row differs from its known row
REPEATED = 2.0  # fall of the log probability of a known row for each row that already comes from it
STRENGTH = 5.0  # weight of a feature's even prior, in rows


class BoxProblem:
    """Equations of a client's trees (one output, logistic loss): sums of rows' gradients and hessians in each leaf.

    A row is given by the index of each feature's interval between thresholds.

    Args:
        first: row and label counts of the first tree's leaves, if known, which fix each row's leaf and label.
        rows, positives: numbers of rows and positives, used without ``first``.
        known: intervals (R, F) and labels (R,) of rows of the same population, if any.
        possible: (S,) ``True`` for intervals, of all features together, that the schema allows; ``None`` for all.
    """

    def __init__(
        self,
        own: Sequence[OwnTree],
        training: Training,
        grid: Grid,
        first: FirstTree | None,
        *,
        rows: int = 0,
        positives: int = 0,
        known: tuple[np.ndarray, np.ndarray] | None = None,
        possible: np.ndarray | None = None,
    ) -> None:
        self.grid, self.first, self.known = grid, first, known
        distinct = {tree.digest: tree for one in own for tree in (*one.before, one.tree)}
        trees, place = list(distinct.values()), {digest: number for number, digest in enumerate(distinct)}
        self.mine = np.array([place[one.tree.digest] for one in own])
        self.before = np.zeros((len(trees), len(own)))
        for number, one in enumerate(own):
            np.add.at(self.before, ([place[tree.digest] for tree in one.before], number), 1.0)
        self.masks = leaf_masks(trees, grid)
        self.base = np.array([float(one.base_margin[0]) for one in own])
        self.value_start = np.concatenate([[0], np.cumsum([len(tree.leaves) for tree in trees])[:-1]])
        self.values = np.concatenate([tree.value[tree.leaves] for tree in trees])
        sums = [gradient_sums(one, training) for one in own]
        self.slot_start = np.concatenate([[0], np.cumsum([len(one[0]) for one in sums])[:-1]]).astype(int)
        self.gradient = np.concatenate([one[0] for one in sums])
        self.hessian = np.concatenate([one[1] for one in sums])
        allowed = np.ones(len(self.masks)) if possible is None else possible.astype(float)
        self.even = allowed / np.repeat(np.maximum(np.add.reduceat(allowed, grid.first), 1), grid.states)
        self.rows = first.rows if first is not None else rows
        self.positives = int(sum(leaf.labels[1] for leaf in first.leaves)) if first is not None else positives
        if known is not None:
            counts = np.bincount((grid.first + known[0]).ravel(), minlength=len(self.masks))
            self.usual = (counts + self.even) / (len(known[0]) + 1)
            self.known_masks = np.bitwise_and.reduce(self.masks[grid.first + known[0]], axis=1)
            self.known_parts = self.parts(self.known_masks, known[1])

    def parts(self, masks: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return each row's leaf, gradient and hessian, (N, T) each, in the client's T trees.

        ``masks``: (N, U, W) for N rows and the U trees of all clients, the bit of the row's leaf is set among W 64-bit
        words. ``labels``: (N,) 0 or 1. Leaves are numbered across the T trees.
        """
        leaf = leaf_of(masks)
        margin = self.base + self.values[self.value_start + leaf] @ self.before
        p = 1 / (1 + np.exp(-margin))
        return self.slot_start + leaf[:, self.mine], p - labels[:, None], p * (1 - p)

    def start(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw N rows that fit the first tree: intervals (N, F), labels (N,), and copied rows' indices (N,) or -1."""
        if self.first is None:
            labels = np.repeat([0, 1], [self.rows - self.positives, self.positives])
            place = np.full(self.rows, -1)
        else:
            labels = np.concatenate([np.repeat([0, 1], leaf.labels) for leaf in self.first.leaves])
            place = np.repeat(np.arange(len(self.first.leaves)), [leaf.rows for leaf in self.first.leaves])
        states = np.empty((self.rows, len(self.grid.edges)), dtype=int)
        home = np.full(self.rows, -1)
        for leaf, label in {(int(a), int(b)) for a, b in zip(place, labels, strict=True)}:
            chosen = np.flatnonzero((place == leaf) & (labels == label))
            fits = np.empty(0, dtype=int)
            if self.known is not None:
                here = self.known_parts[0][:, 0] == leaf
                fits = np.flatnonzero((self.known[1] == label) & (here | (leaf < 0)))
            if len(fits):
                turns = -(-len(chosen) // len(fits))
                home[chosen] = np.concatenate([rng.permutation(fits) for _ in range(turns)])[: len(chosen)]
                states[chosen] = self.known[0][home[chosen]]  # type: ignore[index]
            else:
                states[chosen] = self._drawn(leaf, len(chosen), rng)
        return states, labels, home

    def _drawn(self, leaf: int, number: int, rng: np.random.Generator) -> np.ndarray:
        possible = np.ones(len(self.masks), dtype=bool)
        if leaf >= 0:
            word, bit = divmod(leaf, 64)
            possible = (self.masks[:, self.mine[0], word] >> np.uint64(bit)) & np.uint64(1) > 0
        weight = (self.usual if self.known is not None else self.even) * possible + 1e-9 * possible
        parts = np.split(weight, self.grid.first[1:])
        if not all(part.sum() > 0 for part in parts):
            raise UserError("A leaf is expected to be reachable, but its thresholds allow no row; check the model.")
        return np.stack([rng.choice(len(part), number, p=part / part.sum()) for part in parts], 1)

    def climb(self, rng: np.random.Generator, sweeps: int) -> "Chain":
        rows = Chain(self, *self.start(rng))
        for width in np.geomspace(max(rows.start_misfit, WIDEST), NARROWEST, sweeps):
            for feature in rng.permutation(len(self.grid.edges)):
                for row in rng.permutation(self.rows):
                    rows.redraw(int(row), int(feature), float(width), rng)
            if self.known is not None:
                for row in rng.permutation(self.rows):
                    rows.replace(int(row), float(width), rng)
        return rows


class Chain:
    """Rows of one search, which Gibbs sampling redraws to fit all trees.

    Attributes:
        states: (N, F) index of each cell's interval between thresholds.
        labels: (N,) 0 or 1.
        home: (N,) index of the known row that each row was copied from, -1 for none.
        start_misfit: root mean square residual of gradient sums for the initial rows.
    """

    def __init__(self, problem: BoxProblem, states: np.ndarray, labels: np.ndarray, home: np.ndarray) -> None:
        self.problem, self.states, self.labels, self.home = problem, states, labels, home
        grid = problem.grid
        whole = np.bitwise_and.reduce(problem.masks[grid.first + states], axis=1)
        self.slots, self.gradients, self.hessians = problem.parts(whole, labels)
        self.left = problem.gradient.copy(), problem.hessian.copy()
        np.subtract.at(self.left[0], self.slots, self.gradients)
        np.subtract.at(self.left[1], self.slots, self.hessians)
        self.counts = np.bincount((grid.first + states).ravel(), minlength=len(problem.masks)).astype(float)
        self.used = np.bincount(home[home >= 0], minlength=1 if problem.known is None else len(problem.known[1]))
        self.start_misfit = self.misfit

    @property
    def misfit(self) -> float:
        return float(np.sqrt(np.mean(self.left[0] ** 2)))

    def redraw(self, row: int, feature: int, width: float, rng: np.random.Generator) -> None:
        problem, grid = self.problem, self.problem.grid
        self._take(row)
        first, number = int(grid.first[feature]), int(grid.states[feature])
        chosen = problem.masks[grid.first + self.states[row]]
        chosen[feature] = ~np.uint64(0)
        made = np.bitwise_and.reduce(chosen, axis=0) & problem.masks[first : first + number]
        candidates, labels = np.arange(number), np.full(number, self.labels[row])
        if problem.first is None:
            candidates, labels = np.tile(candidates, 2), np.repeat([0, 1], number)
        slot, gradient, hessian = problem.parts(made[candidates], labels)
        here = slice(first, first + number)
        self.counts[first + self.states[row, feature]] -= 1
        if self.home[row] >= 0:
            prior = DEPARTURE * problem.usual[here]
            prior[problem.known[0][self.home[row], feature]] += 1 - DEPARTURE  # type: ignore[index]
        else:
            prior = self.counts[here] * (problem.even[here] > 0) + STRENGTH * problem.even[here]
        with np.errstate(divide="ignore"):
            score = np.log(prior)[candidates] - self._misfit(slot, gradient, hessian, width)
        if problem.first is not None:
            score[slot[:, 0] != self.slots[row, 0]] = -np.inf
        picked = int(np.argmax(score + rng.gumbel(size=len(score))))
        self.states[row, feature], self.labels[row] = candidates[picked], labels[picked]
        self._put(row, slot[picked], gradient[picked], hessian[picked])
        self.counts[first + self.states[row, feature]] += 1

    def replace(self, row: int, width: float, rng: np.random.Generator) -> None:
        problem, grid = self.problem, self.problem.grid
        assert problem.known is not None
        known, labels = problem.known
        fits = labels == self.labels[row] if problem.first is not None else np.ones(len(labels), dtype=bool)
        if problem.first is not None:
            fits &= problem.known_parts[0][:, 0] == self.slots[row, 0]
        options = np.flatnonzero(fits)
        if not len(options) or self.home[row] < 0:
            return
        self._take(row)
        self.used[self.home[row]] -= 1
        pairs = zip(problem.known_parts, (self.slots, self.gradients, self.hessians), strict=True)
        slot, gradient, hessian = (np.concatenate([part[options], own[row][None]]) for part, own in pairs)
        same = self.states[row] == known[self.home[row]]
        usual = DEPARTURE * problem.usual[grid.first + self.states[row]]
        stay = float(np.log(np.where(same, 1 - DEPARTURE + usual, usual + 1e-12)).sum())
        stay -= REPEATED * self.used[self.home[row]]
        at_home = np.log(1 - DEPARTURE + DEPARTURE * problem.usual[grid.first + known[options]]).sum(1)
        at_home -= REPEATED * self.used[options]
        score = np.append(at_home, stay) - self._misfit(slot, gradient, hessian, width)
        picked = int(np.argmax(score + rng.gumbel(size=len(score))))
        if picked < len(options):
            self.counts[grid.first + self.states[row]] -= 1
            self.home[row] = options[picked]
            self.states[row] = known[options[picked]]
            self.labels[row] = labels[options[picked]]
            self.counts[grid.first + self.states[row]] += 1
        self.used[self.home[row]] += 1
        self._put(row, slot[picked], gradient[picked], hessian[picked])

    def _misfit(self, slot: np.ndarray, gradient: np.ndarray, hessian: np.ndarray, width: float) -> np.ndarray:
        # returns the increase (C,) of the leaf sums' squared residuals over 2 ``width``^2, by C candidates for a row
        over = gradient * (gradient - 2 * self.left[0][slot])
        over += hessian * (hessian - 2 * self.left[1][slot]) / HESSIAN**2
        return np.asarray(over.sum(1) / (2 * width**2))

    def _take(self, row: int) -> None:
        self.left[0][self.slots[row]] += self.gradients[row]
        self.left[1][self.slots[row]] += self.hessians[row]

    def _put(self, row: int, slot: np.ndarray, gradient: np.ndarray, hessian: np.ndarray) -> None:
        self.slots[row], self.gradients[row], self.hessians[row] = slot, gradient, hessian
        self.left[0][slot] -= gradient
        self.left[1][slot] -= hessian


MOST_WORDS = 1 << 27  # largest number of 64-bit words in leaf masks: a gigabyte
MOST_ROWS = 20_000  # largest number of rows that are searched for


@dataclass(frozen=True, kw_only=True, eq=False)
class Knowledge:
    """The attacker's knowledge about the population.

    Attributes:
        categories: feature -> possible codes; a federation's schema is public.
        rows: (R, F) rows of other members of the population, such as an attacking client's own; NaN for no value.
        labels: (R,) 0 or 1.
    """

    categories: Mapping[int, Sequence[float]] = field(default_factory=dict)
    rows: np.ndarray | None = None
    labels: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeReconstruction:
    """Rows reconstructed from a client's trees.

    Attributes:
        rows: (N, F) guesses, in no order; NaN for no value.
        labels: (N,) guesses, 0 or 1.
        low, high: (N, F) bounds of each cell's guess, ``high`` excluded.
        agreement: (N, F) share of searches (chains) with the cell in the same interval; always 1 for one search.
        first: row and label counts of the first tree's leaves; ``None`` if other trees precede the client's.
        values: each feature's thresholds in the client's own trees, which are values of its rows.
        misfit: root mean square residual of gradient sums.
        start_misfit: misfit of rows that only fit the first tree.
    """

    rows: np.ndarray
    labels: np.ndarray
    low: np.ndarray
    high: np.ndarray
    agreement: np.ndarray
    training: Training
    first: FirstTree | None
    values: tuple[np.ndarray, ...]
    misfit: float
    start_misfit: float
    seconds: float

    @property
    def certainty(self) -> np.ndarray:
        return np.asarray(self.agreement.mean(1))


def reconstruct_rows(
    exchanges: Sequence[Exchange],
    *,
    knowledge: Knowledge | None = None,
    training: Training | None = None,
    rows: int = 0,
    positives: int = 0,
    chains: int = 4,
    sweeps: int = 20,
    seed: int = 0,
) -> TreeReconstruction:
    """Reconstruct the rows of one client from the models sent to it and its replies.

    ``UserError`` if the models are unsupported or too large, or the number of rows is needed and not given.

    Args:
        exchanges: the client's rounds in order; XGBoost with one output and logistic loss.
        knowledge: the attacker's knowledge of columns and similar rows.
        training: learning rate and lambda; ``None`` infers them from the models.
        rows, positives: numbers of rows and of positives; needed only if the client's first round had trees already.
        chains: number of searches, each with its own random stream.
        sweeps: number of passes of a search over all cells.
    """
    began = time.perf_counter()
    knowledge = knowledge or Knowledge()
    reply = _checked(exchanges)
    own = own_trees(exchanges)
    training = training or infer_training(own)
    first = None
    if own and not own[0].before:
        first = count_first_tree(own, reply.objective, training, positive_weight=reply.positive_weight, rows=rows)
    number = first.rows if first is not None else rows
    if not 0 < number <= MOST_ROWS:
        raise UserError(f"Between 1 and {MOST_ROWS} rows are expected, but got {number}; give rows.")
    grid, positives = _grid(own, reply.features), min(positives, number)
    known, possible = _known(knowledge, grid), _possible(knowledge, grid)
    problem = BoxProblem(own, training, grid, first, rows=number, positives=positives, known=known, possible=possible)
    streams = [np.random.default_rng(derive_seed(seed, "trees", chain)) for chain in range(max(chains, 1))]
    found = sorted((problem.climb(stream, sweeps) for stream in streams), key=lambda chain: chain.misfit)
    best, (low, high, middle) = found[0], _bounds(grid, knowledge)
    place = grid.first + best.states
    guesses = middle[place]
    if knowledge.rows is not None:  # the known row's value if in the cell's interval
        home = knowledge.rows[best.home]
        same = (best.home >= 0)[:, None] & (states_of(home, grid) == best.states)
        guesses = np.where(same, home, guesses)
    return TreeReconstruction(
        rows=guesses,
        labels=best.labels,
        low=low[place],
        high=high[place],
        agreement=_agreement(found),
        training=training,
        first=first,
        values=tuple(thresholds(own, reply.features)),
        misfit=best.misfit,
        start_misfit=best.start_misfit,
        seconds=time.perf_counter() - began,
    )


def _checked(exchanges: Sequence[Exchange]) -> Trees:
    if not exchanges:
        raise UserError("At least one round of the client is expected, but got none; give its replies.")
    reply = exchanges[0].reply
    if reply.objective not in LOGISTIC or reply.classes > 1:
        raise UserError(
            f"Logistic loss with one output is expected, but the model is {reply.objective} with"
            f" {reply.classes}; use count_first_tree and thresholds instead."
        )
    return reply


def _grid(own: Sequence[OwnTree], features: int) -> Grid:
    trees = [tree for one in own for tree in (*one.before, one.tree)]
    lacks = np.zeros(features, dtype=bool)
    for tree in trees:
        lacks[tree.feature[tree.inner][tree.default_left[tree.inner]]] = True
    grid = make_grid(trees, features, lacks.tolist())
    distinct = {tree.digest: len(tree.leaves) for tree in trees}
    words = int(grid.states.sum()) * len(distinct) * -(-max(distinct.values(), default=1) // WORD)
    if words > MOST_WORDS:
        raise UserError(
            f"Thresholds times trees (times 64 leaves) are expected to be at most {MOST_WORDS}, but are {words}; take"
            " fewer rounds."
        )
    return grid


def _known(knowledge: Knowledge, grid: Grid) -> tuple[np.ndarray, np.ndarray] | None:
    if knowledge.rows is None:
        return None
    if knowledge.labels is None or len(knowledge.labels) != len(knowledge.rows):
        raise UserError("Known rows are expected with a label each, but labels are missing; give knowledge.labels.")
    if knowledge.rows.ndim != 2 or knowledge.rows.shape[1] != len(grid.edges):
        raise UserError(
            f"Known rows (R, {len(grid.edges)}) are expected, but got {knowledge.rows.shape}; give all columns."
        )
    return states_of(knowledge.rows, grid), knowledge.labels.astype(int)


def _possible(knowledge: Knowledge, grid: Grid) -> np.ndarray:
    found = np.ones(int(grid.states.sum()), dtype=bool)
    for feature, codes in knowledge.categories.items():
        here = np.zeros(int(grid.states[feature]), dtype=bool)
        here[np.searchsorted(grid.edges[feature], np.asarray(codes, dtype=np.float64), side="right")] = True
        here[-1] |= grid.missing[feature]
        found[grid.first[feature] : grid.first[feature] + len(here)] = here
    return found


def _bounds(grid: Grid, knowledge: Knowledge) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    found = []
    for feature, edges in enumerate(grid.edges):
        low, high = np.concatenate([[-np.inf], edges]), np.concatenate([edges, [np.inf]])
        widths = np.diff(edges) if len(edges) > 1 else np.ones(1)
        middle = np.zeros(1)
        if len(edges):
            inner = (edges[:-1] + edges[1:]) / 2
            middle = np.concatenate([[edges[0] - widths[0] / 2], inner, [edges[-1] + widths[-1] / 2]])
            if (edges == np.round(edges)).all():  # whole numbers, as all thresholds are
                middle = np.floor(middle)
                middle[0] = min(np.ceil(edges[0] - widths[0] / 2 - 0.5), edges[0] - 1)
            middle += 0.0  # no negative zero
        known = None if knowledge.rows is None else knowledge.rows[:, feature]
        for options in (knowledge.categories.get(feature), known):
            values = np.unique(np.asarray([] if options is None else options, dtype=float))
            values = values[~np.isnan(values)]
            if len(values):  # the one nearest to the middle, if any is in the interval
                inside = (values >= low[:, None]) & (values < high[:, None])
                apart = np.where(inside, np.abs(values - middle[:, None]), np.inf)
                middle = np.where(inside.any(1), values[apart.argmin(1)], middle)
        lacks = [np.nan] * grid.missing[feature]
        found.append([np.append(each, lacks) for each in (low, high, middle)])
    lows, highs, middles = (np.concatenate(each) for each in zip(*found, strict=True))
    return lows, highs, middles


def _agreement(chains: Sequence[Chain]) -> np.ndarray:
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415  (slow to import)

    best = chains[0]
    found = np.ones(best.states.shape)
    for other in chains[1:]:
        alike = (best.states[:, None] == other.states[None]).sum(-1) + 0.5 * (best.labels[:, None] == other.labels)
        _, order = linear_sum_assignment(alike, maximize=True)
        found += best.states == other.states[order]
    return found / len(chains)


WIDEST, NARROWEST = 2.0, 0.1  # first (or larger) and last deviation allowed for a leaf's gradient sum; a row's is < 1
