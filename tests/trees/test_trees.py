"""Trees of XGBoost, from models in ``models`` (made by ``experiments/trees.py --part fixtures``; XGBoost 3.2)."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer

from experiments.measures import leaves_of, margins_of
from fl_privacy.attacks.trees import (
    Exchange,
    Knowledge,
    OwnTree,
    count_first_tree,
    divide_among_sites,
    infer_training,
    own_trees,
    read_exchange,
    read_model,
    read_others,
    reconstruct_rows,
    thresholds,
    with_own_base,
)
from fl_privacy.attacks.trees.counts import Training, leaf_bounds
from fl_privacy.attacks.trees.grid import leaf_masks, leaf_of, make_grid, states_of
from fl_privacy.attacks.trees.model import DEEPEST, LARGEST_MODEL, MOST_VALUES, read_ubjson
from fl_privacy.attacks.trees.reconstruct import BoxProblem
from fl_privacy.errors import UserError
from fl_privacy.measure.tables import pinned_rows

MODELS = Path(__file__).parent / "models"
FEATURES = [0, 1, 4, 5, 6]
NODES = 9
"""Of the first of two trees."""


def table() -> tuple[np.ndarray, np.ndarray]:
    rows, labels = load_breast_cancer(return_X_y=True)
    return rows[:120, FEATURES].astype(np.float32), labels[:120]


@cache
def exchanges(mode: str) -> list[Exchange]:
    replies = sorted(MODELS.glob(f"{mode}_*_reply.json"))
    return [
        read_exchange((MODELS / each.name.replace("reply", "sent")).read_bytes(), each.read_bytes()) for each in replies
    ]


def own(mode: str) -> tuple[OwnTree, ...]:
    return own_trees(exchanges(mode))


def altered(**changes: object) -> bytes:
    told = json.loads((MODELS / "two_trees.json").read_text())
    told["learner"]["gradient_booster"]["model"]["trees"][0].update(changes)
    return json.dumps(told).encode()


def claiming(part: str, **changes: object) -> bytes:
    """Return a model that says something else of itself."""
    told = json.loads((MODELS / "two_trees.json").read_text())
    told["learner"][part].update(changes)
    return json.dumps(told).encode()


def chain(levels: int) -> bytes:
    """Return a model whose first tree has so many levels, each with a leaf."""
    inner = np.arange(levels)
    left, right = np.full(2 * levels + 1, -1), np.full(2 * levels + 1, -1)
    left[2 * inner], right[2 * inner] = 2 * inner + 1, 2 * inner + 2
    zeros = [0.0] * len(left)
    numbers = dict.fromkeys(("split_conditions", "sum_hessian", "base_weights", "loss_changes"), zeros)
    whole = {name: [0] * len(left) for name in ("split_indices", "default_left", "split_type")}
    return altered(left_children=left.tolist(), right_children=right.tolist(), **numbers, **whole)


def test_the_new_trees_that_are_not_a_client_s_own_are_the_other_s() -> None:
    sent, reply, after = ((MODELS / f"bagging_{name}.json").read_bytes() for name in ("2_sent", "2_reply", "3_sent"))
    seen = read_others(sent, after, reply)
    known = {tree.digest for model in (sent, reply) for tree in read_model(model).trees}
    (other,) = own_trees([seen])
    assert other.tree.digest not in known
    assert {tree.digest for tree in other.before} == {tree.digest for tree in read_model(sent).trees}
    assert len(read_model(after).trees) == len(read_model(sent).trees) + 2
    with pytest.raises(UserError, match="all are known"):
        read_others(sent, sent, reply)


@pytest.mark.parametrize("kind", ["json", "ubj"])
def test_a_model_predicts_what_xgboost_predicts(kind: str) -> None:
    model = read_model((MODELS / f"two_trees.{kind}").read_bytes())
    expected = json.loads((MODELS / "two_trees_margins.json").read_text())
    assert np.allclose(margins_of(model, table()[0])[:, 0], expected, atol=1e-5)
    assert (model.features, model.classes, model.objective) == (5, 1, "binary:logistic")


def test_learning_rate_and_lambda_are_in_the_model() -> None:
    for mode in ("bagging", "cyclic"):
        found = infer_training(own(mode))
        assert found.learning_rate == pytest.approx(0.3, abs=1e-5)
        assert found.reg_lambda == 1.0
    stump = own_trees(exchanges("bagging")[:1])
    assert infer_training(stump).reg_lambda == 1.0


def test_counts_and_labels_of_the_first_tree_are_exact() -> None:
    rows, labels = table()
    trees = own("bagging")
    found = count_first_tree(trees, "binary:logistic", infer_training(trees), rows=120)
    leaf = leaves_of(trees[0].tree, rows)
    true = [tuple(int(((leaf == k) & (labels == y)).sum()) for y in (0, 1)) for k in range(len(found.leaves))]
    assert [each.labels for each in found.leaves] == true
    assert (found.exact, found.rows) == (True, 120)
    assert not count_first_tree(trees, "binary:logistic", infer_training(trees)).exact
    for place, each in enumerate(found.leaves):
        for feature, (low, high) in each.bounds.items():
            inside = rows[leaf == place, feature].astype(float)
            assert ((inside >= low) & (inside < high)).all()


@pytest.mark.parametrize("weight", [2, 3])
def test_counts_of_weighted_or_sampled_rows_are_not_called_exact(weight: int) -> None:
    """The model is that of rows which are repeated; only their number, which the client states, tells the two apart."""
    trees = own("bagging")
    tree = trees[0].tree
    heavier = [replace(trees[0], tree=replace(tree, cover=weight * tree.cover))]
    found = count_first_tree(heavier, "binary:logistic", Training(learning_rate=0.3, reg_lambda=weight), rows=120)
    assert found.whole and not found.exact and found.rows == weight * 120


def test_sums_that_are_no_counts_are_not_called_exact() -> None:
    trees = own("bagging")
    trees[0].tree.cover[trees[0].tree.leaves[0]] += 0.05
    try:
        assert not count_first_tree(trees, "binary:logistic", infer_training(trees[1:])).whole
    finally:
        trees[0].tree.cover[trees[0].tree.leaves[0]] -= 0.05


def test_thresholds_are_values_of_the_rows() -> None:
    rows, _ = table()
    found = thresholds(own("bagging"), 5)
    assert sum(map(len, found)) > 10
    for values, column in zip(found, rows.T, strict=True):
        assert np.isin(values.astype(np.float32), column).all()


@pytest.mark.parametrize("mode", ["bagging", "cyclic"])
def test_the_true_rows_explain_all_sums_with_the_other_clients_trees(mode: str) -> None:
    rows, labels = table()
    trees = own(mode)
    every = [tree for one in trees for tree in (*one.before, one.tree)]
    grid = make_grid(every, 5, [False] * 5)
    problem = BoxProblem(trees, infer_training(trees), grid, None, rows=120, positives=60)
    states = states_of(rows, grid)
    masks = np.bitwise_and.reduce(problem.masks[grid.first + states], axis=1)
    slots, gradients, hessians = problem.parts(masks, labels)
    left = problem.gradient.copy(), problem.hessian.copy()
    np.subtract.at(left[0], slots, gradients)
    np.subtract.at(left[1], slots, hessians)
    assert np.abs(left[0]).max() < 1e-4
    assert np.abs(left[1]).max() < 1e-4


def test_leaves_by_masks_are_those_of_the_tree() -> None:
    rows = table()[0].copy()
    rows[::7, 1] = np.nan
    trees = [one.tree for one in own("bagging")]
    grid = make_grid(trees, 5, [False, True, False, False, False])
    masks = leaf_masks(trees, grid)
    found = leaf_of(np.bitwise_and.reduce(masks[grid.first + states_of(rows, grid)], axis=1))
    assert (found == np.stack([leaves_of(tree, rows) for tree in trees], 1)).all()


def test_masks_of_more_than_64_leaves() -> None:
    masks = np.zeros((3, 2), dtype=np.uint64)
    masks[0, 0], masks[1, 1], masks[2, 0] = np.uint64(1) << np.uint64(63), np.uint64(1) << np.uint64(5), 1
    assert leaf_of(masks).tolist() == [63, 69, 0]


@pytest.mark.long
def test_rows_that_explain_the_trees_are_nearer_to_the_truth_than_ones_that_fit_the_first_tree() -> None:
    rows, labels = table()
    truth = np.column_stack([rows, labels])
    cells = {}
    for sweeps in (0, 15):
        tries = [reconstruct_rows(exchanges("bagging"), chains=1, sweeps=sweeps, seed=seed) for seed in range(3)]
        found = [pinned_rows(truth, np.column_stack([each.rows, each.labels]), [5]).cells for each in tries]
        cells[sweeps] = np.mean(found)
    assert all(each.misfit < 0.3 * each.start_misfit for each in tries)
    assert cells[15] > cells[0] + 0.03


def test_the_first_tree_s_counts_are_kept_and_seeds_repeat() -> None:
    first = reconstruct_rows(exchanges("bagging"), chains=2, sweeps=2, seed=5)
    second = reconstruct_rows(exchanges("bagging"), chains=2, sweeps=2, seed=5)
    assert np.array_equal(first.rows, second.rows)
    assert first.first is not None
    leaf = leaves_of(exchanges("bagging")[0].reply.trees[0], first.rows)
    for place, each in enumerate(first.first.leaves):
        labels = first.labels[leaf == place]
        assert (int((labels == 0).sum()), int((labels == 1).sum())) == each.labels
    assert ((first.rows >= first.low) & (first.rows < first.high)).all()
    assert first.agreement.shape == first.rows.shape
    assert set(np.unique(first.agreement)) <= {0.5, 1.0}


def test_known_rows_are_gone_back_to() -> None:
    rows, labels = load_breast_cancer(return_X_y=True)
    known = rows[300:420, FEATURES].astype(np.float32)
    found = reconstruct_rows(
        exchanges("bagging"), knowledge=Knowledge(rows=known, labels=labels[300:420]), chains=1, sweeps=2
    )
    assert np.isin(found.rows[:, 0].astype(np.float32), known[:, 0]).mean() > 0.5


def test_a_client_that_was_given_trees_first_needs_its_number_of_rows() -> None:
    later = exchanges("cyclic")[1:]
    with pytest.raises(UserError, match="give rows"):
        reconstruct_rows(later)
    found = reconstruct_rows(later, rows=120, positives=60, chains=1, sweeps=1)
    assert len(found.rows) == 120
    assert found.first is None


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (b"", "is neither"),
        (b"{", "damaged"),
        (b"{}", "lacks 'learner'"),
        (b"[" * 100_000, "is neither"),
        (b'{"a":' * 100_000, "damaged"),
        (altered(split_type=[1]), "categories"),
        (altered(left_children=[1, 1]), "differ in length"),
        (altered(split_indices=[9] * 15), "."),
        (altered(sum_hessian="x"), "not of numbers"),
        (altered(sum_hessian=[-1.0] * NODES), "covers below 0"),
        (altered(loss_changes=[math.nan] * NODES), "no numbers"),
        (claiming("learner_model_param", num_feature="1000000000000000"), "100000 features"),
        (claiming("learner_model_param", num_feature="-1"), "100000 features"),
        (claiming("learner_model_param", num_class="1000000000"), "10000 classes"),
        (claiming("learner_model_param", base_score="[0.5,0.5,0.5]"), "base score"),
        (claiming("objective", reg_loss_param={"scale_pos_weight": "nan"}), "above 0"),
        (claiming("objective", reg_loss_param={"scale_pos_weight": "0"}), "above 0"),
    ],
)
def test_models_that_are_none_end_in_a_line(model: bytes, what: str) -> None:
    with pytest.raises(UserError, match=what):
        read_model(model)


def test_a_tree_that_goes_round_is_refused() -> None:
    told = json.loads((MODELS / "two_trees.json").read_text())
    tree = told["learner"]["gradient_booster"]["model"]["trees"][0]
    tree["left_children"][1] = 0
    with pytest.raises(UserError, match="or whose root has a parent"):
        read_model(json.dumps(told).encode())


def test_a_tree_is_as_deep_as_trees_are() -> None:
    assert DEEPEST == 256, "of splits, which is no limit of containers within each other"
    assert len(read_model(chain(DEEPEST)).trees[0].leaves) == DEEPEST + 1
    with pytest.raises(UserError, match="levels"):
        read_model(chain(DEEPEST + 1))


def test_bounds_of_leaves_are_counted_before_they_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_privacy.attacks.trees.counts.MOST_BOUNDS", 5)
    with pytest.raises(UserError, match="at most 5 thresholds"):
        leaf_bounds(read_model((MODELS / "two_trees.json").read_bytes()).trees[0])


def test_more_rows_than_there_can_be_are_refused() -> None:
    own = own_trees([read_exchange(b"", altered(sum_hessian=[3e38] * NODES))])
    with pytest.raises(UserError, match="states more"):
        count_first_tree(own, "binary:logistic", Training(learning_rate=0.1, reg_lambda=1.0))


def test_a_leaf_that_nothing_falls_into_is_no_place_for_rows() -> None:
    told = json.loads((MODELS / "bagging_0_reply.json").read_text())
    tree = told["learner"]["gradient_booster"]["model"]["trees"][0]
    for node in (0, tree["left_children"][0]):
        tree["split_indices"][node], tree["default_left"][node] = 0, 0
    tree["split_conditions"][0], tree["split_conditions"][tree["left_children"][0]] = 1.0, 5.0
    with pytest.raises(UserError, match="allow no row"):
        reconstruct_rows([read_exchange(b"", json.dumps(told).encode())], chains=1, sweeps=1)


@pytest.mark.long
def test_containers_without_end_take_no_memory() -> None:
    with pytest.raises(UserError, match="values"):
        read_ubjson(b"[" + b"[]" * (MOST_VALUES + 1) + b"]")


def test_a_model_that_is_too_large_is_not_parsed() -> None:
    with pytest.raises(UserError, match="64 MiB"):
        read_model(b"{" + bytes(LARGEST_MODEL))


def test_memory_is_bounded_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_privacy.attacks.trees.reconstruct.MOST_WORDS", 10)
    with pytest.raises(UserError, match="fewer rounds"):
        reconstruct_rows(exchanges("bagging"), chains=1, sweeps=1)


def test_other_boosters_are_named() -> None:
    told = json.loads((MODELS / "two_trees.json").read_text())
    told["learner"]["gradient_booster"]["name"] = "gblinear"
    with pytest.raises(UserError, match="gblinear"):
        read_model(json.dumps(told).encode())


def test_other_objectives_are_not_searched() -> None:
    told = json.loads((MODELS / "two_trees.json").read_text())
    told["learner"]["objective"]["name"] = "reg:squarederror"
    with pytest.raises(UserError, match="Logistic"):
        reconstruct_rows([Exchange(sent=None, reply=read_model(json.dumps(told).encode()))])


@pytest.mark.parametrize("kind", ["json", "ubj"])
def test_damaged_bytes_never_end_in_anything_else(kind: str) -> None:
    whole = (MODELS / f"two_trees.{kind}").read_bytes()
    rng = np.random.default_rng(0)
    for cut in rng.integers(0, len(whole), 60):
        with pytest.raises(UserError):
            read_model(whole[:cut])
    for _ in range(300):
        changed = bytearray(whole)
        for place in rng.integers(1, len(whole), 3):
            changed[place] = rng.integers(0, 256)
        try:
            read_model(bytes(changed))
        except UserError:
            continue


def test_trees_of_several_sites_are_divided_by_covers_and_thresholds() -> None:
    pairs = [(name, read_exchange(*pair)) for name, pair in two_sites()]
    rounds = []
    for number in range(4):
        both = [one for _, one in pairs[2 * number : 2 * number + 2]]
        trees = tuple(tree for one in (both if number in (0, 2) else both[::-1]) for tree in one.reply.trees)
        rounds.append(replace(both[0], reply=replace(both[0].reply, trees=trees)))
    first, second = divide_among_sites(rounds, 2)
    for found, place in ((first, 0), (second, 1)):
        expected = [pairs[2 * number + place][1].reply.trees[0].digest for number in range(4)]
        assert [one.reply.trees[0].digest for one in found] == expected
    with pytest.raises(UserError, match="1 trees of each of 3 sites are expected"):
        divide_among_sites(rounds, 3)


def two_sites() -> list[tuple[str, tuple[bytes, bytes]]]:
    """Return two clients' exchanges of four rounds, in turn; the other's replies are taken from what is sent next."""
    found = []
    for number in range(4):
        sent, reply = ((MODELS / f"bagging_{number}_{way}.json").read_bytes() for way in ("sent", "reply"))
        after = json.loads((MODELS / f"bagging_{number + 1}_sent.json").read_text())
        own = json.loads(reply)["learner"]["gradient_booster"]["model"]["trees"]
        model = after["learner"]["gradient_booster"]["model"]
        model["trees"] = [t for t in model["trees"][-2:] if t["split_conditions"] != own[0]["split_conditions"]]
        model |= {"tree_info": [0], "iteration_indptr": [0, 1]}
        found += [("one", (sent, reply)), ("other", (sent, json.dumps(after).encode()))]
    return found


def test_a_base_score_that_is_another_s_is_found_by_whole_counts() -> None:
    one = exchanges("bagging")[0]
    wrong = replace(one, reply=replace(one.reply, base_score=(0.3,)))
    found = with_own_base(wrong)
    assert found.reply.base_score == pytest.approx(one.reply.base_score, abs=1e-6)
    assert with_own_base(found) is found
    counted = count_first_tree(own_trees([found]), found.reply.objective, infer_training(own_trees([found])))
    assert counted.whole and counted.rows == 120
