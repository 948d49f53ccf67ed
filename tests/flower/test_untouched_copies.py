"""A client's data within what it sends, however shaped, ordered or written; and what only looks like them."""

import io
import json
import pickle
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from flwr.clientapp import ClientApp
from sklearn.ensemble import RandomForestClassifier
from sklearn.tree import DecisionTreeClassifier

from fl_privacy.auditing.app.tapped_grid import TappedGrid
from fl_privacy.auditing.clear_text import copies
from fl_privacy.auditing.clear_text.findings import Loaded, findings_of
from fl_privacy.auditing.clear_text.inventory import UP, Sent
from fl_privacy.auditing.instrument.fitted import FittedBy, leaks_of_nodes

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(60, 12)).astype(np.float32)
IMAGES = RNG.random((40, 3, 6, 6)).astype(np.float32)
LABELS = RNG.integers(0, 3, 60)
TWO = np.array([0, 1] * 30)


def _said(
    array: object, loaded: Loaded, key: str = "a", *, unknown: bool = True, trained: bool = True
) -> list[tuple[str, str]]:
    arrays = {f"m/{key}": array} if isinstance(array, np.ndarray) else {}
    values = {} if arrays else {f"m/{key}": array}
    sent = Sent(direction=UP, kind="train", round=1, node=0, arrays=arrays, values=values)
    found = findings_of(sent, loaded, [f"m/{key}"] if unknown else [], trained=trained)
    return [(leak.severity, leak.what) for leak in found]


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


AS_THEY_ARE = "30 of 30 rows are examples of the client, value by value"


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (lambda rows: rows, AS_THEY_ARE),
        (lambda rows: rows.astype(np.float16), AS_THEY_ARE),
        (lambda rows: rows.astype(np.float64)[::-1].reshape(5, 6, 12), AS_THEY_ARE),
        (lambda rows: rows.reshape(-1), AS_THEY_ARE),
        (lambda rows: rows[:, ::-1], f"{AS_THEY_ARE}, in another order"),
        (lambda rows: rows[3], "an example of the client, value by value"),
        (lambda rows: rows[3:4], "an example of the client, value by value"),
        (lambda rows: np.vstack([rows[3:4], rows[4:9] + 1]), "1 of 6 rows is an example of the client, value by value"),
        (lambda rows: rows.reshape(-1).tolist(), AS_THEY_ARE),
        (lambda rows: json.dumps(rows[:2].tolist()), "2 of 2 rows are examples of the client, value by value"),
        (lambda rows: rows.tobytes(), "1440 bytes that hold 6 examples of the client at least, value by value"),
        (lambda rows: np.frombuffer(rows[:1].astype(float).tobytes(), np.uint8), "96 bytes that hold 1 example of"),
        (_npy, AS_THEY_ARE),
    ],
)
def test_rows_are_found_however_they_are_sent(made: Callable[[np.ndarray], object], what: str) -> None:
    ((severity, said), *_) = sorted(_said(made(ROWS[10:40]), Loaded(rows=[ROWS], labels=LABELS, examples=60)))
    assert severity == "data" and said.startswith(what)


def test_pickled_rows_are_more_than_a_pickle() -> None:
    found = _said(pickle.dumps(ROWS), Loaded(rows=[ROWS], examples=60))
    assert [severity for severity, _ in found] == ["data", "look"]


@pytest.mark.parametrize(
    "made",
    [
        lambda images: images[0],
        lambda images: images[:20].transpose(0, 2, 3, 1),
        lambda images: (images[:20] * 255).round().astype(np.uint8),
    ],
    ids=["one", "channels_last", "uint8"],
)
def test_images_are_found_in_other_shapes_and_scales(made: Callable[[np.ndarray], np.ndarray]) -> None:
    ((severity, said),) = _said(made(IMAGES), Loaded(rows=[IMAGES.reshape(40, -1)], examples=40))
    assert severity == "data" and "of the client" in said


def test_features_that_leave_apart_are_found() -> None:
    loaded = Loaded(rows=[np.vstack([ROWS, ROWS])], labels=LABELS, examples=60)
    (left,) = _said(ROWS[::-1, :5], loaded)
    assert left == ("data", "the values of 5 of 12 features of the client's 60 examples")
    (one,) = _said(np.sort(ROWS[:, 7]), loaded)
    assert one == ("data", "the values of 1 of 12 features of the client's 60 examples")


def test_figures_of_all_features_are_facts() -> None:
    loaded = Loaded(rows=[ROWS], labels=LABELS, examples=60)
    for name, array in (
        ("mean", ROWS.mean(0)),
        ("largest value", ROWS.max(0)),
        ("variance", ROWS.var(0)),
        ("standard deviation", ROWS.std(0, ddof=1)),
    ):
        (found,) = _said(array, loaded, trained=False)
        assert found == ("facts", f"the {name} of each of 12 features over the client's examples")
    assert _said(np.array([10, 25, 5, 20]), Loaded(columns={"age": np.arange(60)}), trained=False) == [
        ("facts", "a histogram of the client's 60 examples")
    ]


@pytest.mark.parametrize("kind", [np.uint8, bool])
def test_labels_are_found_in_any_type(kind: type) -> None:
    (found,) = _said(TWO.astype(kind), Loaded(labels=TWO, examples=60))
    assert found == ("data", "the class of each of the client's 60 examples, as it is")


def test_texts_in_arrays_are_read() -> None:
    for kind in ("U", "S"):
        (found,) = _said(np.array(["ann@clinic.org", "none"]).astype(kind), Loaded(), trained=False)
        assert found[0] == "facts" and found[1].startswith("an e-mail address")


BINARY = RNG.integers(0, 2, (60, 4)).astype(np.float32)


@pytest.mark.parametrize(
    ("array", "loaded"),
    [
        (np.array([[0.0, 1.0]]), Loaded(rows=[BINARY[:, :2]])),
        (np.eye(5), Loaded(rows=[np.eye(5)[RNG.integers(0, 5, 60)]])),
        (BINARY[:20] % 2, Loaded(rows=[1 - BINARY])),
        (np.arange(60), Loaded(columns={"age": RNG.integers(0, 100, 900)})),
        (np.arange(12), Loaded(rows=[RNG.integers(0, 12, (60, 12)).astype(np.float32)])),
        (np.ones(12), Loaded(rows=[np.ones((60, 12))])),
        (np.array([0, 1, 2]), Loaded(labels=np.array([1, 2, 2]), examples=3)),
        (np.full((60, 12), np.nan), Loaded(rows=[ROWS])),
        (np.array([None, "x"], dtype=object), Loaded(rows=[ROWS])),
        (np.zeros((3, 0)), Loaded(rows=[ROWS])),
        (np.array(2.0), Loaded(rows=[ROWS])),
    ],
)
def test_what_many_arrays_have_is_nobody_s_data(array: np.ndarray, loaded: Loaded) -> None:
    assert not [what for severity, what in _said(array, loaded) if severity != "look"]


def test_right_answers_that_are_as_many_as_a_class_are_no_labels() -> None:
    loaded = Loaded(labels=TWO, examples=60)
    right = np.sort(TWO)
    assert _said(right, loaded, "right") == [("facts", "one number for each of the client's 60 examples")]
    assert [severity for severity, _ in _said(right, loaded, "labels")] == ["data"]


def test_settings_and_shares_that_a_column_has_as_well_are_no_figures() -> None:
    loaded = Loaded(columns={"ones": np.ones(80), "sex": np.array([0, 1] * 40), "age": np.arange(80) + 0.25})
    for key, value in (("accuracy", 1.0), ("lr", 0.5), ("epochs", 40.0), ("num-examples", 3180), ("huge", 10**400)):
        assert _said(value, loaded, key) == []
    of = "of the column {} over the client's 80 examples"
    assert _said(0.5, loaded, "sex_share") == [("facts", f"the mean {of.format('sex')}")]
    assert _said(3180, loaded, "total") == [("facts", f"the sum {of.format('age')}")]


@pytest.mark.parametrize(("number", "said"), [(0, 0), (1, 1)])
def test_a_client_that_says_that_it_has_no_example_tells_of_nobody(number: int, said: int) -> None:
    assert len(_said(number, Loaded(examples=number), "num-examples")) == said


def test_what_is_many_times_in_one_reply_is_found_in_one_reply() -> None:
    grid = TappedGrid([0], ClientApp(), {}, 1, tables={}, node_config={})
    sent = Sent(direction=UP, kind="train", round=1, node=0, values={"m/who": ["ann@c.org", "anna@c.org"]})
    grid.replies["train"] += 1
    grid._count("train", findings_of(sent, Loaded(), [], trained=True))
    ((found),) = grid.findings()
    assert (found.times, found.of) == (1, 1)


@pytest.mark.parametrize("kind", [DecisionTreeClassifier, RandomForestClassifier])
def test_nodes_of_decision_trees_are_facts(kind: type) -> None:
    options = {"n_estimators": 3} if kind is RandomForestClassifier else {}
    looking = FittedBy()
    with looking.looking():
        model = kind(random_state=0, **options).fit(ROWS, LABELS)
    (fit,) = looking.fits
    assert fit.kind == kind.__name__ and len(fit.nodes) == options.get("n_estimators", 1)
    tree = getattr(model, "estimators_", [model])[0].tree_
    arrays = {"a/t": tree.threshold.astype(np.float32), "a/n": tree.n_node_samples, "a/other": tree.threshold + 1}
    found = leaks_of_nodes(fit, arrays, {"m/model": pickle.dumps(model), "m/lr": 0.1})
    assert {leak.where: leak.what.partition(" of ")[0] for leak in found} == {
        "a/t": "thresholds",
        "a/n": "how many",
        "m/model": f"{len(fit.nodes)} decision tree{'s' * (len(fit.nodes) != 1)}",
    }


def test_a_comparison_in_pieces_finds_what_one_of_all_does(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    table = rng.normal(size=(300, 20)).astype(np.float32)
    sent = np.concatenate([table[[250]] * 3 + 1, rng.normal(size=(4, 20)).astype(np.float32)])
    found = []
    for at_once in (copies.AT_ONCE, 1, 64):
        monkeypatch.setattr(copies, "AT_ONCE", at_once)
        asked = (sent, table[[299, 7]][:, ::-1].copy(), table[7:9])
        found.append([copies.copies_in(one, [table], unknown=True) for one in asked])
        found[-1].append(copies.figure_of_features(table.std(0), [table]))
    assert found[0] == found[1] == found[2]
    assert [str(one).partition(" of ")[0] for one in found[0]] == ["1", "2", "2", "standard deviation"]


def _headed(array: np.ndarray, **header: object) -> bytes:
    file = io.BytesIO()
    told = np.lib.format.header_data_from_array_1_0(array) | header
    np.lib.format.write_array_header_1_0(file, told)
    return file.getvalue() + array.tobytes(order="F" if told["fortran_order"] else "C")


def test_an_array_is_as_large_as_its_bytes_whatever_its_header_says() -> None:
    whole = np.asfortranarray(ROWS)
    assert np.array_equal(copies.array_in(_headed(whole)), whole)
    assert np.array_equal(copies.array_in(_headed(ROWS[:0])), ROWS[:0])
    tracemalloc.start()
    for shape in ((2_000_000_000,), (-60, -12), (1 << 62, 1 << 62), (60, 11), ("x",)):
        assert copies.array_in(_headed(ROWS, shape=shape)) is None
    assert copies.array_in(_headed(ROWS, descr="|O")) is None
    assert copies.array_in(b"\x93NUMPY\x09\x00" + bytes(64)) is None
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
