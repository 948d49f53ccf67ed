"""Reconstruct a client's rows from its models: exact parts first, then rows that explain all trees."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fl_privacy.attacks.trees.boxes import BoxProblem, Chain
from fl_privacy.attacks.trees.counts import FirstTree, Training, count_first_tree, infer_training, thresholds
from fl_privacy.attacks.trees.grid import WORD, Exchange, Grid, OwnTree, make_grid, own_trees, states_of
from fl_privacy.attacks.trees.model import LOGISTIC, Trees
from fl_privacy.errors import UserError
from fl_privacy.rng import derive_seed

MOST_WORDS = 1 << 27
"""Largest number of 64-bit words in masks of leaves, a gigabyte."""

MOST_ROWS = 20_000
"""Largest number of rows that are searched for."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Knowledge:
    """An attacker's knowledge of the population, if any.

    Attributes:
        categories: feature -> possible codes. The schema of a federation is public.
        rows: (R, F) rows of other people of the population, such as an attacking client's own; NaN for no value.
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
        agreement: (N, F) share of chains with the cell in the same interval; always 1 for a single chain.
        first: counts of the first tree; ``None`` if the client was given trees before.
        values: each feature's thresholds in the client's own trees: values of its rows.
        misfit: root mean square residual of gradient sums.
        start_misfit: the same for rows that fit the first tree alone.
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

    Args:
        exchanges: the client's rounds in order; XGBoost with one output and logistic loss.
        training: learning rate and lambda; ``None`` infers them from the models.
        rows, positives: numbers of rows, as clients state them, and of positives; needed only if the client was given
            trees before its first.
        chains: number of searches, each with a random stream of its own.

    Raises:
        UserError: the models are of another kind, or too large; or the number of rows is needed and not given.
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
        raise UserError(f"Between 1 and {MOST_ROWS} rows are searched for, but got {number}; give rows.")
    grid = _grid(own, reply.features)
    problem = BoxProblem(
        own,
        training,
        grid,
        first,
        rows=number,
        positives=min(positives, number),
        known=_known(knowledge, grid),
        possible=_possible(knowledge, grid),
    )
    streams = [np.random.default_rng(derive_seed(seed, "trees", chain)) for chain in range(max(chains, 1))]
    found = sorted((problem.climb(stream, sweeps) for stream in streams), key=lambda chain: chain.misfit)
    told = _told(found, grid, knowledge)
    values = tuple(thresholds(own, reply.features))
    seconds = time.perf_counter() - began
    return TreeReconstruction(training=training, first=first, values=values, seconds=seconds, **told)


def _checked(exchanges: Sequence[Exchange]) -> Trees:
    if not exchanges:
        raise UserError("At least one round of the client is expected, but got none.")
    reply = exchanges[0].reply
    if reply.objective not in LOGISTIC or reply.classes > 1:
        raise UserError(
            f"Rows are searched for behind logistic loss with one output, but the model is {reply.objective} with"
            f" {reply.classes}; its counts and thresholds are still extracted (count_first_tree, thresholds)."
        )
    return reply


def _grid(own: Sequence[OwnTree], features: int) -> Grid:
    """Cut features at all thresholds; rows may lack values if a tree sends such rows left."""
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


def _told(found: Sequence[Chain], grid: Grid, knowledge: Knowledge) -> dict[str, Any]:
    best = found[0]
    low, high, middle = _bounds(grid, knowledge)
    place = grid.first + best.states
    rows = middle[place]
    if knowledge.rows is not None:  # the known row's value if in the cell's interval
        home = knowledge.rows[best.home]
        same = (best.home >= 0)[:, None] & (states_of(home, grid) == best.states)
        rows = np.where(same, home, rows)
    return {
        "rows": rows,
        "labels": best.labels,
        "low": low[place],
        "high": high[place],
        "agreement": _agreement(found),
        "misfit": best.misfit,
        "start_misfit": best.start_misfit,
    }


def _known(knowledge: Knowledge, grid: Grid) -> tuple[np.ndarray, np.ndarray] | None:
    if knowledge.rows is None:
        return None
    if knowledge.labels is None or len(knowledge.labels) != len(knowledge.rows):
        raise UserError("Known rows are expected with a label each; give knowledge.labels.")
    if knowledge.rows.ndim != 2 or knowledge.rows.shape[1] != len(grid.edges):
        raise UserError(f"Known rows are expected to have {len(grid.edges)} features, but got {knowledge.rows.shape}.")
    return states_of(knowledge.rows, grid), knowledge.labels.astype(int)


def _possible(knowledge: Knowledge, grid: Grid) -> np.ndarray:
    """Return the (S,) states that the known categories allow."""
    found = np.ones(int(grid.states.sum()), dtype=bool)
    for feature, codes in knowledge.categories.items():
        here = np.zeros(int(grid.states[feature]), dtype=bool)
        here[np.searchsorted(grid.edges[feature], np.asarray(codes, dtype=np.float64), side="right")] = True
        here[-1] |= grid.missing[feature]
        found[grid.first[feature] : grid.first[feature] + len(here)] = here
    return found


def _bounds(grid: Grid, knowledge: Knowledge) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (S,) lower and upper ends of all states, and a value for each."""
    lows, highs, middles = [], [], []
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
        if grid.missing[feature]:
            low, high, middle = (np.append(each, np.nan) for each in (low, high, middle))
        lows.append(low)
        highs.append(high)
        middles.append(middle)
    return np.concatenate(lows), np.concatenate(highs), np.concatenate(middles)


def _agreement(chains: Sequence[Chain]) -> np.ndarray:
    """Return the (N, F) share of chains whose matched row has the cell in the first chain's interval."""
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415  (slow to import)

    best = chains[0]
    found = np.ones(best.states.shape)
    for other in chains[1:]:
        alike = (best.states[:, None] == other.states[None]).sum(-1) + 0.5 * (best.labels[:, None] == other.labels)
        _, order = linear_sum_assignment(alike, maximize=True)
        found += best.states == other.states[order]
    return found / len(chains)
