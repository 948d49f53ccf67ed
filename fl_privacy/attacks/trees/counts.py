"""Infer training settings, the first tree's row and label counts, and feature values from trees."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fl_privacy.attacks.trees.grid import Exchange, OwnTree, distinct_thresholds, own_trees
from fl_privacy.attacks.trees.model import LOGISTIC, SOFTMAX, SQUARED, Tree
from fl_privacy.errors import UserError

MOST_COUNTED, MOST_BOUNDS = 1 << 40, 5_000_000  # largest accepted numbers of a leaf's rows, and of all leaves' bounds
WHOLE = 0.02  # largest distance of a count from a whole number by rounding of float32
COVERS = 3.0  # weight of a relative change of a site's sum of hessians, next to the share of known thresholds
MOST_BASES = 4000  # largest number of rows tried in the search for a base score


@dataclass(frozen=True, kw_only=True)
class Training:
    """A client's training settings; ``residual``: relative error with which they reproduce nodes' weights and gains."""

    learning_rate: float
    reg_lambda: float
    residual: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Leaf:
    """A leaf of the first tree.

    ``labels``: counts of each class; for two classes, negatives and positives. Empty for numeric labels. ``bounds``:
    feature -> (least, below), possibly infinite: the leaf's rows have least <= value < below.
    """

    rows: int  # number of training rows
    labels: tuple[int, ...]
    bounds: dict[int, tuple[float, float]]


@dataclass(frozen=True, kw_only=True, eq=False)
class FirstTree:
    """Row and label counts of the first tree; if XGBoost drew a subsample for it, only of the rows drawn."""

    leaves: tuple[Leaf, ...]  # from left to right, like ``Tree.leaves``
    whole: bool  # all counts are whole up to rounding; else rows are weighted or sums were changed
    exact: bool = False  # the counts also add up to the client's stated number of rows

    @property
    def rows(self) -> int:
        return sum(leaf.rows for leaf in self.leaves)


def infer_training(own: Sequence[OwnTree]) -> Training:
    """Infer learning rate eta and regularization lambda from the equations of inner nodes.

    Models hold the sum H of hessians of each node, w = -G / (H + lambda) of inner nodes (G: sum of gradients) and eta w
    of leaves (Chen and Guestrin, KDD 2016, eqs. 4 to 7). ``UserError`` if no tree splits, or the model lacks H.
    """
    # With children l and r: G_l + G_r = G, gain = w_l^2 (H_l + lambda) + w_r^2 (H_r + lambda) - w^2 (H + lambda).
    parts = [_node_terms(one.tree, one.parallel) for one in own if len(one.tree.inner)]
    terms = [np.concatenate([part[k] for part in parts]) for k in range(len(parts[0]))] if parts else []
    if not terms or not (terms[1] > 0).any() or not (terms[2] > 0).any():
        raise UserError(
            "Learning rate and lambda are expected to follow from covers, weights and gains of inner nodes, but the"
            " models have none; give learning_rate and reg_lambda."
        )

    from scipy.optimize import minimize_scalar  # noqa: PLC0415  (slow to import)

    def fit(reg_lambda: float) -> tuple[float, float]:
        weight, cover, gain, inner, leaf, inner_square, leaf_square = (
            term if term.ndim == 1 else term[:, 0] + reg_lambda * term[:, 1] for term in terms
        )
        flat, curved = inner - weight * (cover + reg_lambda), inner_square - weight**2 * (cover + reg_lambda) - gain
        square = float(-(curved @ leaf_square) / max(float(leaf_square @ leaf_square), 1e-300))
        options, tries = [float(-(flat @ leaf) / max(float(leaf @ leaf), 1e-300)), max(square, 0.0) ** 0.5], []
        for inverse in (option for option in options if option > 1e-6):
            left = np.abs(flat + inverse * leaf).sum() + np.abs(curved + inverse**2 * leaf_square).sum()
            scale = np.abs(flat).sum() + inverse * np.abs(leaf).sum() + gain.sum()
            tries.append((1 / inverse, float(left / max(scale, 1e-300))))
        return min(tries, key=lambda each: each[1], default=(1.0, np.inf))

    grid = np.concatenate([[0.0], np.geomspace(1e-3, 1e3, 121)])
    best = int(np.argmin([fit(value)[1] for value in grid]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    found = minimize_scalar(lambda value: fit(value)[1], bounds=(low, high), method="bounded", options={"xatol": 1e-9})
    least = min(float(found.fun), fit(grid[best])[1])
    near = [round(float(found.x), places) for places in (0, 1, 2, 3)] + [float(found.x), float(grid[best])]
    chosen = next((value for value in near if fit(value)[1] <= 2 * least + 1e-6), float(grid[best]))
    rate, residual = fit(chosen)
    return Training(learning_rate=float(rate), reg_lambda=float(chosen), residual=residual)


def _node_terms(tree: Tree, parallel: int) -> tuple[np.ndarray, ...]:
    # returns w, hessian sum H and gain of n inner nodes, and sums (n, 2) over their children of (H, 1) times, in order:
    # w of inner children, ``parallel`` * value of leaves, and the squares of both
    nodes = tree.inner
    sums = [np.zeros((len(nodes), 2)) for _ in range(4)]
    for child in (tree.left[nodes], tree.right[nodes]):
        leaf = tree.left[child] < 0
        cover = np.column_stack([tree.cover[child], np.ones(len(nodes))])
        weight = np.where(leaf, 0.0, tree.weight[child])[:, None]
        value = np.where(leaf, tree.value[child] * parallel, 0.0)[:, None]
        for place, factor in enumerate((weight, value, weight**2, value**2)):
            sums[place] += factor * cover
    return tree.weight[nodes], tree.cover[nodes], tree.gain[nodes], *sums


def gradient_sums(own: OwnTree, training: Training) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of gradients and of hessians in each leaf of a tree, from left to right."""
    leaves = own.tree.leaves
    cover, value = own.tree.cover[leaves], own.tree.value[leaves] * own.parallel
    return -value / training.learning_rate * (cover + training.reg_lambda), cover


def leaf_bounds(tree: Tree) -> list[dict[int, tuple[float, float]]]:
    """Return for each leaf, from left to right: feature -> (least, below); ``UserError`` if splits are too many."""
    found: list[dict[int, tuple[float, float]]] = []
    stack: list[tuple[int, dict[int, tuple[float, float]]]] = [(0, {})]
    bounds_in_all = 0
    while stack:
        node, bounds = stack.pop()
        if tree.left[node] < 0:
            found.append(bounds)
            bounds_in_all += len(bounds)
            if bounds_in_all > MOST_BOUNDS:
                raise UserError(
                    f"Leaves with at most {MOST_BOUNDS} thresholds are expected, but got more; omit the model."
                )
            continue
        feature, threshold = int(tree.feature[node]), float(tree.threshold[node])
        low, high = bounds.get(feature, (-np.inf, np.inf))
        stack.append((int(tree.right[node]), {**bounds, feature: (max(low, threshold), high)}))
        stack.append((int(tree.left[node]), {**bounds, feature: (low, min(high, threshold))}))
    return found


def count_first_tree(
    own: Sequence[OwnTree], objective: str, training: Training, *, positive_weight: float = 1.0, rows: int | None = None
) -> FirstTree:
    """Count rows and labels in the leaves of the first tree, which no other precedes.

    All rows then have the same prediction, so that sums of hessians and gradients give counts (Di Gennaro et al.,
    TimberStrike, 2025, section 5). ``UserError`` if there is no such tree, the objective is unsupported, or the tree is
    too large.

    Args:
        own: trees that the client fitted.
        objective: XGBoost's name for logistic, squared error or softmax.
        training: client's learning rate and lambda.
        positive_weight: XGBoost's ``scale_pos_weight``.
        rows: number of rows that the client states; without it, counts are not marked as exact.
    """
    if not own or own[0].before:
        raise UserError("A first tree is expected, but the client was given trees before; start at round 1.")
    tree, margin = own[0].tree, own[0].base_margin
    gradient, hessian = gradient_sums(own[0], training)
    if objective in LOGISTIC:
        p = float(1 / (1 + np.exp(-margin[0])))
        # H = (n_0 + s n_1) p (1 - p) and G = n_0 p - s n_1 (1 - p), with s the weight of positives
        weighted = hessian / (p * (1 - p))
        positive = (weighted * p - gradient) / positive_weight
        counts = np.stack([weighted - positive_weight * positive, positive], 1)
    elif objective in SQUARED:
        counts = hessian[:, None]
    elif objective in SOFTMAX:
        classes = max(one.tree.group for one in own) + 1
        p = 1 / classes if len(margin) < classes else float(np.exp(margin[0]) / np.exp(margin).sum())
        weighted = hessian / (2 * p * (1 - p))
        positive = weighted * p - gradient
        counts = np.stack([positive, weighted - positive], 1)
    else:
        raise UserError(f"Logistic, squared error or softmax is expected, but got {objective}; use thresholds alone.")
    if not (np.abs(counts) <= MOST_COUNTED).all():
        raise UserError(f"At most {MOST_COUNTED} rows are expected in a leaf, but the model states more; leave it out.")
    near = np.round(counts)
    whole = bool((np.abs(counts - near) <= WHOLE + 1e-5 * np.abs(counts)).all() and (near >= 0).all())
    near = np.maximum(near, 0).astype(int)
    leaves = tuple(
        Leaf(rows=int(row.sum()), labels=() if objective in SQUARED else tuple(map(int, row)), bounds=bounds)
        for row, bounds in zip(near, leaf_bounds(tree), strict=True)
    )
    return FirstTree(leaves=leaves, whole=whole, exact=whole and int(near.sum()) == rows)


def thresholds(own: Sequence[OwnTree], features: int) -> list[np.ndarray]:
    """Return each feature's distinct thresholds, ascending, in the trees ``own`` that the client fitted.

    XGBoost takes thresholds from the client's rows: values or, if these are more than its ``max_bin``, quantiles. With
    ``tree_method=exact`` (not the default, ``hist``), they are halfway between neighboring values.
    """
    return list(distinct_thresholds([one.tree for one in own], features))


def divide_among_sites(rounds: Sequence[Exchange], sites: int) -> tuple[tuple[Exchange, ...], ...]:
    """Divide other clients' trees in bagging rounds, whose origin is unknown, among ``sites`` clients (sites).

    A site's sum of hessians changes little between rounds, and its trees split at values of its own rows. Trees are
    matched to sites by both facts, or by splits alone for NVFlare since 2.7.2, which omits the sums. Similar sites of
    equal size are not distinguished. ``rounds``: new trees of each round, from ``read_others``; a site's trees are
    adjacent. ``UserError`` if a round has not equally many trees for each site.

    Return each site's rounds, ordered as in the first round, whose base score is inferred (:func:`with_own_base`).
    """
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415  (slow to import)

    found: list[dict[int, Exchange]] = [{} for _ in range(sites)]
    known, covers = [set[tuple[int, float]]() for _ in range(sites)], np.ones(sites)
    for number in (*range(1, len(rounds)), 0):  # the first at last, as margins are others there
        one = rounds[number]
        each, left = divmod(len(one.reply.trees), sites)
        usual = one.reply.parallel * one.reply.classes
        if left or each != usual:
            got = len(one.reply.trees)
            raise UserError(f"{usual} trees of each of {sites} sites are expected, but got {got}; check sites.")
        blocks = [one.reply.trees[k * each : (k + 1) * each] for k in range(sites)]
        split = [
            {
                pair
                for t in block
                for pair in zip(t.feature[t.inner].tolist(), t.threshold[t.inner].tolist(), strict=True)
            }
            for block in blocks
        ]
        sums, places = np.array([max(float(block[0].cover[0]), 1e-9) for block in blocks]), np.arange(sites)
        if any(known):
            rare = {x: 1 / sum(x in have for have in known) for x in set().union(*known)}
            shared = [[sum(rare[x] for x in x_of & have) / max(len(x_of), 1) for have in known] for x_of in split]
            moved = COVERS * np.abs(np.log(sums[:, None] / covers)) if number else 0.0
            _, places = linear_sum_assignment(moved - np.array(shared))
        for block, have, place, cover in zip(blocks, split, places, sums, strict=True):
            known[place] |= have
            covers[place] = cover
            seen = replace(one, reply=replace(one.reply, trees=block))
            found[place][number] = seen if one.sent is not None else with_own_base(seen)
    first = places.tolist()
    return tuple(tuple(found[place][number] for number in range(len(rounds))) for place in first)


def with_own_base(first: Exchange) -> Exchange:
    """Replace the base score of a site's ``first`` round by one that makes all row counts whole numbers, if possible.

    XGBoost's base score is the share of positives k / n, so that the first tree's hessians add up to k (n - k) / n.
    """
    own, reply = own_trees([first]), first.reply
    if reply.objective not in LOGISTIC or not len(own[0].tree.inner) or not (own[0].tree.cover > 0).all():
        return first
    training, total = infer_training(own), float(own[0].tree.cover[0])
    if count_first_tree(own, reply.objective, training, positive_weight=reply.positive_weight).whole:
        return first
    n = np.arange(int(4 * total), MOST_BASES)
    below = (n - np.sqrt(np.maximum(n * n - 4 * n * total, 0))) / 2
    for rows, count in ((n, below), (n, n - below)):
        for k in np.flatnonzero(np.abs(count - np.round(count)) < WHOLE):
            trial = replace(reply, base_score=(float(np.round(count[k]) / rows[k]),))
            own = own_trees([replace(first, reply=trial)])
            if count_first_tree(own, reply.objective, training, positive_weight=reply.positive_weight).whole:
                return replace(first, reply=trial)
    return first
