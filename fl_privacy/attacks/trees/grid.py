"""Split features into intervals between thresholds, and find leaves that rows reach (Lucchese et al., SIGIR 2015)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fl_privacy.attacks.trees.model import Tree, Trees, read_model
from fl_privacy.errors import UserError

WORD = 64  # leaves in the bits of one number


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """The intervals (states) into which thresholds cut each feature's range.

    ``edges``: ascending thresholds of each feature; a value in interval k is at least edge k - 1 and below edge k.
    ``missing``: ``True`` for each feature with an additional last interval for missing values.
    """

    edges: tuple[np.ndarray, ...]
    missing: tuple[bool, ...]

    @cached_property
    def states(self) -> np.ndarray:
        return np.array([len(edges) + 1 + lacks for edges, lacks in zip(self.edges, self.missing, strict=True)])

    @cached_property
    def first(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.states)[:-1]])


def make_grid(trees: Sequence[Tree], features: int, missing: Sequence[bool]) -> Grid:
    """Build the grid of all thresholds of ``trees``; ``missing``: ``True`` for features that may lack a value."""
    return Grid(edges=distinct_thresholds(trees, features), missing=tuple(bool(each) for each in missing))


def distinct_thresholds(trees: Sequence[Tree], features: int) -> tuple[np.ndarray, ...]:
    """Return each feature's distinct thresholds, ascending."""
    found: list[list[np.ndarray]] = [[] for _ in range(features)]
    for tree in trees:
        nodes = tree.inner
        for feature in np.unique(tree.feature[nodes]):
            found[feature].append(tree.threshold[nodes][tree.feature[nodes] == feature])
    return tuple(np.unique(np.concatenate(each)) if each else np.empty(0) for each in found)


def leaf_masks(trees: Sequence[Tree], grid: Grid) -> np.ndarray:
    """Return which leaves of U trees a row can reach, as bits (S, U, W), if one feature is in a given interval.

    S: number of intervals (states) of all features together. W: number of 64-bit words with a bit for each leaf.
    """
    words = max(1, -(-max((len(tree.leaves) for tree in trees), default=1) // WORD))
    masks = np.full((int(grid.states.sum()), len(trees), words), np.uint64(2**64 - 1))
    for number, tree in enumerate(trees):
        below = np.zeros((len(tree.left), words), dtype=np.uint64)  # the leaves beneath each node
        for place, leaf in enumerate(tree.leaves):
            below[leaf, place // WORD] = np.uint64(1) << np.uint64(place % WORD)
        for node in tree.inner[::-1]:  # children come after their parents
            below[node] = below[tree.left[node]] | below[tree.right[node]]
        masks[:, number] &= below[0]
        for node in tree.inner:
            feature = int(tree.feature[node])
            first, states = int(grid.first[feature]), int(grid.states[feature])
            goes_left = np.arange(states) <= np.searchsorted(grid.edges[feature], tree.threshold[node])
            if grid.missing[feature]:
                goes_left[-1] = tree.default_left[node]
            barred = np.where(goes_left[:, None], below[tree.right[node]], below[tree.left[node]])
            masks[first : first + states, number] &= ~barred
    return masks


def leaf_of(masks: np.ndarray) -> np.ndarray:
    """Return the index (...,) of the only leaf that is marked in ``masks`` (..., W), 64-bit words."""
    place = (masks.astype(np.float64).view(np.int64) >> 52) - 1023  # exponent of a power of two; -1023 of zero
    if masks.shape[-1] == 1:
        return place[..., 0]
    return np.asarray(np.where(masks != 0, place + WORD * np.arange(masks.shape[-1]), 0).sum(-1))


def states_of(rows: np.ndarray, grid: Grid) -> np.ndarray:
    """Return the interval in ``grid`` of each value of ``rows`` (N, F); NaN gets that of missing values, or 0."""
    found = np.empty(rows.shape, dtype=int)
    for feature, edges in enumerate(grid.edges):
        column = rows[:, feature].astype(np.float32).astype(np.float64)
        found[:, feature] = np.searchsorted(edges, column, side="right")
        found[np.isnan(column), feature] = grid.states[feature] - 1 if grid.missing[feature] else 0
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """A client's models in one round: ``sent`` to it, if any, and its ``reply`` (new trees for bagging, else all)."""

    sent: Trees | None
    reply: Trees


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnTree:
    """A tree that the client fitted, with the earlier trees and the base margin that it was added to."""

    tree: Tree
    before: tuple[Tree, ...]  # trees whose outputs are the margins that ``tree`` was fitted to
    base_margin: np.ndarray  # (K,) initial margins
    parallel: int = 1  # number of trees fitted at once, which share the learning rate


def read_exchange(sent: bytes, reply: bytes) -> Exchange:
    """Parse the models of one round; ``sent`` is empty if no model was sent. ``UserError`` if one can't be parsed."""
    return Exchange(sent=read_model(sent) if len(sent) > 1 else None, reply=read_model(reply))


def read_others(before: bytes, after: bytes, own: bytes) -> Exchange:
    """Parse the trees that other clients added in a bagging round: those of ``after`` that ``before`` and ``own`` lack.

    ``before``, ``after``: global models. ``own``: this client's reply. With two clients, this is the other's exchange,
    except that the first round's base score is the one of the client that the server aggregated first. ``UserError`` if
    a model can't be parsed, or no tree is new.
    """
    sent, following = (read_model(model) if len(model) > 1 else None for model in (before, after))
    known = Counter(tree.digest for model in (sent, read_model(own)) if model is not None for tree in model.trees)
    new = []
    for tree in following.trees if following is not None else ():
        if known[tree.digest]:
            known[tree.digest] -= 1
        else:
            new.append(replace(tree, round=0))
    if following is None or not new:
        raise UserError("Trees of other clients are expected, but all are known; give a later round.")
    return Exchange(sent=sent, reply=replace(following, trees=tuple(new)))


def own_trees(exchanges: Sequence[Exchange]) -> tuple[OwnTree, ...]:
    """Return the trees a client fitted, each with the trees it was added to; ``UserError`` if objectives differ."""
    kinds = {(one.reply.objective, one.reply.features, one.reply.classes) for one in exchanges}
    if len(kinds) > 1:
        raise UserError("Rounds of one objective and features are expected, but got several; give one client's.")
    found: list[OwnTree] = []
    for one in exchanges:
        given = one.sent.trees if one.sent is not None else ()
        new = list(one.reply.trees)
        if given and len(new) > len(given) and all(a.digest == b.digest for a, b in zip(given, new, strict=False)):
            new = new[len(given) :]
        base = (one.sent or one.reply).base_margin
        first = new[0].round if new else 0
        for tree in new:
            before = tuple(given) + tuple(each for each in new if first <= each.round < tree.round)
            found.append(OwnTree(tree=tree, before=before, base_margin=base, parallel=one.reply.parallel))
    return tuple(found)
