"""Uploads of clients that fit: what is noted, what is attacked, and beside what it is judged."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge, SGDRegressor
from sklearn.naive_bayes import GaussianNB

from fl_privacy.auditing.fitted_uploads import FittedUploads, _optimum
from fl_privacy.auditing.instrument.fitted import Fitted, FittedBy
from fl_privacy.measure.counts import Counts

MODELS = Path(__file__).parents[1] / "trees" / "models"


def trees() -> tuple[FittedUploads, list[str]]:
    rows, labels = load_breast_cancer(return_X_y=True)
    rows = rows[:, [0, 1, 4, 5, 6]].astype(np.float32)
    kept, told = FittedUploads(), []
    for number in range(3):
        sent, reply = (
            {"arrays/0": np.frombuffer((MODELS / f"bagging_{number}_{way}.json").read_bytes(), np.uint8)}
            for way in ("sent", "reply")
        )
        fit = Fitted(kind="trees", rows=rows[:120], labels=labels[:120].astype(float))
        told += [leak.what for leak in kept.note(0, sent, reply, [fit])]
    return kept, told


def test_trees_give_exact_facts_and_rows_beside_guesses() -> None:
    kept, told = trees()
    assert sum("numbers of rows and labels" in each for each in told) == 1
    assert "120 rows" in next(each for each in told if "numbers of rows" in each)
    (answer,) = kept.attack_all(clients=2, seed=0, seconds=60.0)
    assert answer.scenario.title.startswith("Rows behind")
    assert answer.counts is not None and answer.control is not None
    assert answer.counts.judged == answer.control.judged == 120
    assert not answer.above_chance or answer.counts.read > answer.control.read
    assert "never saw the trees" in answer.notes[0]


def test_clients_of_the_same_data_are_no_guess_without_the_trees() -> None:
    kept, _ = trees()
    kept.fits |= {
        1: kept.fits[0],
        2: [replace(one, rows=one.rows[::-1], labels=one.labels[::-1]) for one in kept.fits[0]],
    }
    (beside,) = kept.attack_all(clients=1, seed=0, seconds=60.0)
    (alone,) = trees()[0].attack_all(clients=1, seed=0, seconds=60.0)
    assert beside.control == alone.control and beside.counts == alone.counts


def test_a_model_that_is_none_is_a_problem_and_no_end() -> None:
    kept = FittedUploads()
    bad = {"arrays/0": np.frombuffer(b'{"learner": 3}', np.uint8)}
    assert kept.note(0, {}, bad, []) == []
    assert kept.problems
    (answer,) = kept.attack_all(clients=1, seed=0, seconds=60.0)
    assert answer.counts is None
    assert answer.reason


def fitted(kind: type, rows: np.ndarray, labels: np.ndarray, **options: object) -> tuple[object, Fitted]:
    looking = FittedBy()
    owner = next(each for each in kind.__mro__ if "fit" in vars(each))
    original = vars(owner)["fit"]
    with looking.looking():
        model = kind(**options).fit(rows, labels)
    assert vars(owner)["fit"] is original
    (fit,) = looking.fits
    assert np.array_equal(fit.rows, rows)
    return model, fit


def test_a_fit_on_a_sparse_matrix_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, labels = load_iris(return_X_y=True)
    for most, known in ((1 << 20, 1), (100, 0)):
        monkeypatch.setattr("fl_privacy.auditing.instrument.fitted.MOST_BYTES", most)
        looking = FittedBy()
        with looking.looking():
            LogisticRegression(max_iter=5).fit(csr_matrix(rows), labels)
        assert [np.array_equal(each.rows, rows) for each in looking.fits] == [True] * known


def test_an_optimum_gives_a_row_to_who_knows_the_others_and_a_stopped_fit_does_not() -> None:
    rows, labels = load_iris(return_X_y=True)
    order = np.random.default_rng(0).permutation(150)[:90]
    found = {}
    for name, options in (("optimum", {"tol": 1e-10, "max_iter": 10_000}), ("stopped", {"max_iter": 1})):
        kept = FittedUploads()
        model, fit = fitted(LogisticRegression, rows[order], labels[order], **options)
        sent = {"a/0": np.zeros((3, 4)), "a/1": np.zeros(3)}
        kept.note(0, sent, {"a/0": model.coef_, "a/1": model.intercept_}, [fit])
        kept.note(0, sent, {}, [fit])  # asked to evaluate, it fits in its constructor again
        (found[name],) = kept.attack_all(clients=1, seed=0, seconds=60.0)
    assert found["optimum"].counts.exact == 20
    assert found["optimum"].control.exact == 0
    assert found["optimum"].above_chance
    assert found["stopped"].counts.exact == 0
    assert "not the optimum" in found["stopped"].notes[0]


@pytest.mark.parametrize(
    ("kind", "options", "exact"),
    [(Ridge, {"alpha": 2.0}, 20), (LinearRegression, {}, 20), (SGDRegressor, {"max_iter": 1}, 0)],
)
@pytest.mark.filterwarnings("ignore:Maximum number of iteration")
def test_an_optimum_of_a_linear_regression_gives_a_row(kind: type, options: dict[str, object], exact: int) -> None:
    rows, targets = load_diabetes(return_X_y=True, scaled=False)
    model, fit = fitted(kind, rows[:90, 2:], targets[:90], **options)
    for intercept in (np.array(model.intercept_), np.reshape(model.intercept_, 1)):
        kept = FittedUploads()
        kept.note(0, {"a/0": np.zeros(8), "a/1": np.zeros(())}, {"a/0": model.coef_, "a/1": intercept}, [fit])
        (answer,) = kept.attack_all(clients=1, seed=0, seconds=60.0)
        assert (answer.counts.exact, answer.counts.judged, answer.above_chance) == (exact, 20, exact > 0)
        assert ("not the optimum" in answer.notes[0]) == (exact == 0)


def test_a_regression_without_penalty_is_attacked_as_such() -> None:
    rows, targets = load_diabetes(return_X_y=True, scaled=False)
    for options, inverse in (({"penalty": None}, np.inf), ({"alpha": 0.01}, 1 / 0.9)):
        _, fit = fitted(SGDRegressor, rows[:90], targets[:90], **options)
        assert _optimum([np.zeros(10), np.zeros(1)], fit).inverse_penalty == pytest.approx(inverse)


@pytest.mark.parametrize("beside", [(), ("classes_",), ("class_prior_", "classes_")])
def test_a_row_between_two_rounds_of_sums(beside: tuple[str, ...]) -> None:
    rows, labels = load_iris(return_X_y=True)
    kept = FittedUploads()
    for chosen in (np.arange(149), np.arange(150)):
        model, fit = fitted(GaussianNB, rows[chosen], labels[chosen])
        told = [*(getattr(model, name) for name in beside), model.theta_, model.var_, model.class_count_]
        arrays = {f"a/{place}": array for place, array in enumerate(told)}
        kept.note(0, arrays, arrays, [fit])
    (answer,) = kept.attack_all(clients=1, seed=0, seconds=60.0)
    assert (answer.counts.exact, answer.counts.judged) == (1, 1)


def _sums(kept: FittedUploads, rows: np.ndarray, labels: np.ndarray) -> None:
    model, fit = fitted(GaussianNB, rows, labels)
    arrays = {"a/0": model.theta_, "a/1": model.var_, "a/2": model.class_count_}
    kept.note(0, arrays, arrays, [fit])


def test_a_row_for_another_and_a_row_alone_are_read_of_sums() -> None:
    rows, labels = load_breast_cancer(return_X_y=True)
    swapped, alone = FittedUploads(), FittedUploads()
    same = np.flatnonzero(labels == labels[0])
    for first in same[:2]:
        chosen = np.append(first, np.setdiff1d(np.arange(100), same[:2]))
        _sums(swapped, rows[chosen][:, :4], labels[chosen])
    chosen = np.append(np.flatnonzero(labels == 1)[:30], np.flatnonzero(labels == 0)[:1])
    _sums(alone, rows[chosen], labels[chosen])
    partly, other = FittedUploads(), rows.copy()
    other[same[1], 0] = other[same[0], 0]  # which no round tells then
    for first in same[:2]:
        chosen = np.append(first, np.setdiff1d(np.arange(100), same[:2]))
        _sums(partly, other[chosen][:, :4], labels[chosen])
    (answer,) = partly.attack_all(clients=1, seed=0, seconds=60.0)
    assert (answer.counts.exact, answer.counts.recognizable, answer.counts.judged) == (0, 2, 2)
    assert answer.above_chance
    for kept, number in ((swapped, 2), (alone, 1)):
        (answer,) = kept.attack_all(clients=1, seed=0, seconds=60.0)
        assert (answer.counts.exact, answer.counts.judged) == (number, number)
        assert answer.above_chance and answer.scenario.source.startswith("means and variances")


def test_a_row_of_values_that_many_have_is_in_a_table_by_chance() -> None:
    rng = np.random.default_rng(0)
    binary, numbers = rng.integers(0, 2, (60, 4)).astype(float), rng.normal(size=(60, 6))
    mixed = np.column_stack([binary[:, :3], numbers[:, 0].round()])

    def last_row(table: np.ndarray, other: float = 0.0) -> Counts:
        """Return the counts of the attack on the last of 60 rows, which is not the one that came if ``other``."""
        kept = FittedUploads()
        for last in (59, 60):
            _sums(kept, table[:last], binary[:last, 0].astype(int))
        kept.fits[0][-1].rows[-1] += other
        (answer,) = kept.attack_all(clients=1, seed=0, seconds=60.0)
        assert answer.counts is not None and answer.above_chance == (table is numbers and not other)
        return answer.counts

    assert last_row(binary).chance > 0.5 and last_row(binary).read == 1
    assert last_row(numbers).chance < 0.001 and last_row(numbers).exact == 1
    assert last_row(numbers, other=1.0).chance == 1.0 and last_row(numbers, other=1.0).read == 0
    shuffled = np.mean([(rng.permuted(mixed, axis=0) == mixed[-1]).all(1).any() for _ in range(500)])
    assert shuffled - 0.06 < last_row(mixed).chance and shuffled > 0.1


def test_values_that_are_none_are_a_reason_on_their_own_answer() -> None:
    rows, labels = load_iris(return_X_y=True)
    kept = FittedUploads()
    for number, (kind, arrays) in enumerate(
        (
            (LogisticRegression, {"a/0": np.full((3, 4), np.nan), "a/1": np.zeros(3)}),
            (GaussianNB, {"a/0": np.full((3, 4), np.inf), "a/1": np.ones((3, 4)), "a/2": np.full(3, np.inf)}),
        )
    ):
        _, fit = fitted(kind, rows, labels)
        for _ in range(2):
            kept.note(number, arrays, arrays, [fit])
    answers = list(kept.attack_all(clients=2, seed=0, seconds=60.0))
    assert [answer.scenario.name for answer in answers] == ["logistic", "sums"]
    assert all(answer.counts is None and answer.reason for answer in answers)


def test_an_attack_that_fails_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, _ = trees()
    monkeypatch.setattr("fl_privacy.auditing.fitted_uploads._trees", lambda *given, **named: 1 / 0)
    (answer,) = kept.attack_all(clients=1, seed=0, seconds=60.0)
    assert answer.reason == "the attack failed (ZeroDivisionError: division by zero)"


def test_another_site_takes_the_other_s_trees_from_the_growing_model() -> None:
    rows, labels = load_breast_cancer(return_X_y=True)
    rows = rows[:, [0, 1, 4, 5, 6]].astype(np.float32)
    models = [
        (MODELS / f"bagging_{number}_{way}.json").read_bytes() for number in range(4) for way in ("sent", "reply")
    ]
    kept = FittedUploads()
    for number, (sent, reply, after) in enumerate(zip(models[:-2:2], models[1:-2:2], models[2::2], strict=True)):
        told = json.loads(after)
        new = told["learner"]["gradient_booster"]["model"]
        new["trees"] = [tree for tree in new["trees"][-2:] if not _is_of(tree, reply)]
        new |= {"tree_info": [0], "iteration_indptr": [0, 1]}
        kept.exchanges.setdefault(1, []).append((sent, json.dumps(told).encode()))
        kept.exchanges.setdefault(0, []).append((sent, reply))
        assert len(new["trees"]) == 1, number
    kept.exchanges[0].append((models[6], models[7]))
    for client, part in ((1, slice(120, 240)), (0, slice(0, 120))):
        kept.fits[client] = [Fitted(kind="trees", rows=rows[part], labels=labels[part].astype(float))]
    server, site = kept.attack_all(clients=1, seed=0, seconds=60.0)
    assert not site.reason
    assert (server.observer, site.observer) == ("server", "another_site")
    assert (
        site.notes[0] == "Of 3 new trees of 1 other sites, 3 are divided to the site of its first tree, the only other."
    )
    assert any("120 rows" in note for note in site.notes)
    assert site.counts is not None and site.counts.judged == 120


def _is_of(tree: dict[str, object], model: bytes) -> bool:
    own = json.loads(model)["learner"]["gradient_booster"]["model"]["trees"]
    return tree["split_conditions"] in [each["split_conditions"] for each in own]
