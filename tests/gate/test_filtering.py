"""What passes the engine and what does not, as functions of records."""

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.common.serde import config_record_from_proto, config_record_to_proto
from hypothesis import given, settings, strategies as some

from fl_privacy.errors import UserError
from fl_privacy.site.gate import protecting
from fl_privacy.site.gate.filtering import NUMPY, RawArray, Records, admit, array_values, raw_array, release
from fl_privacy.site.gate.policy import SitePolicy, parse_policy
from fl_privacy.site.gate.protecting import Noising, clipped, noised
from fl_privacy.site.gate.rules import REASONS, RefusedError, Rule
from fl_privacy.site.gate.sentences import rules_in_words, warnings_of

PLAIN = """
version: 1
receives:
  records: {arrays: [arrays], config: {allow: {lr: {exact: true, at_most: 1}, mode: {one_of: [a]}}}}
sends:
  train:
    arrays: {like: received, dtype: float32}
    metrics: {allow: {num-examples: {integer: true, at_least: 32, round_to: 32}, train_loss: {digits: 3}}}
  evaluate: {metrics: {allow: {accuracy: {digits: 3}}}}
"""
NOISED = (
    PLAIN
    + """
protect: {clip_norm: 1.0, noise: {noise_multiplier: 0.5}}
budget: {ledger: ledger}
"""
)


def policy(text: str = PLAIN) -> SitePolicy:
    return parse_policy(text.encode(), "site.yaml", Path())


def model(**more: Any) -> dict[str, RawArray]:
    rng = np.random.default_rng(0)
    arrays = {"w": rng.normal(size=(4, 3)).astype(np.float32), "b": np.zeros(3, np.float32), "n": np.array(7)}
    return {name: raw_array(values) for name, values in (arrays | more).items()}


RECEIVED = Records(arrays={"arrays": model()}, config={"config": {"lr": 0.1}})


def replied(arrays: dict[str, RawArray] | None = None, **metrics: Any) -> Records:
    held = {"num-examples": 100, "train_loss": 0.123456} | metrics
    return Records(arrays={"arrays": model() if arrays is None else arrays}, metrics={"metrics": held})


def refused(reply: Records, text: str = PLAIN, kind: str = "train") -> str:
    with pytest.raises(RefusedError) as error:
        release(policy(text), kind, RECEIVED, reply)
    assert error.value.reason in REASONS
    return error.value.reason


def test_an_honest_reply_leaves_to_the_byte_with_rounded_numbers() -> None:
    trained = model(w=np.ones((4, 3), np.float32))
    left = release(policy(), "train", RECEIVED, replied(trained))
    assert left.arrays == {"arrays": trained}
    assert left.metrics == {"metrics": {"num-examples": 96, "train_loss": 0.123}}


def test_bytes_are_those_of_numpy_and_flower() -> None:
    from flwr.app import Array  # noqa: PLC0415

    for values in (np.arange(6.0), np.float32(3), np.ones((2, 3), "f4", order="F"), np.zeros((0, 2), "f2")):
        made = Array.from_numpy_ndarray(np.asarray(values))
        raw = RawArray(made.dtype, tuple(made.shape), made.stype, made.data)
        assert np.array_equal(array_values("x", raw), values)
        fortran = np.ndim(values) > 1 and not np.asarray(values).flags.c_contiguous
        assert raw_array(np.asarray(values), fortran=fortran) == raw


W = model()["w"]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Records(arrays={"arrays": model(), "more": model()}), "record"),
        (Records(arrays={"other": model()}), "record"),
        (replied({**model(), "x": W}), "arrays"),
        (replied({"w": W}), "arrays"),
        (replied(model(w=np.ones((4, 3)))), "dtype"),
        (replied(model(w=np.ones((4, 3), np.int32))), "dtype"),
        (replied(model(w=np.ones((4, 4), np.float32))), "shape"),
        (replied(model(w=np.full((4, 3), np.nan, np.float32))), "finite"),
        (replied({**model(), "w": RawArray("float32", (4, 3), "zip", W.data)}), "bytes"),
        (replied({**model(), "w": RawArray("float32", (4, 3), NUMPY, W.data + b"x")}), "bytes"),
        (replied({**model(), "w": RawArray("float32", (4, 3), NUMPY, W.data[:-4])}), "bytes"),
        (replied({**model(), "w": RawArray("float32", (-4, -3), NUMPY, W.data)}), "shape"),
        (replied({**model(), "w": RawArray("object", (4, 3), NUMPY, W.data)}), "dtype"),
        (replied(secret=1.0), "key"),
        (replied(train_loss="text"), "text"),
        (replied(train_loss=[1.0, 2.0]), "type"),
        (replied({}), "arrays"),
        (Records(arrays={"arrays": model()}, metrics={"m2": {"a": 1}}), "record"),
        (Records(arrays={"arrays": model()}, config={"config": {"a": "x"}}), "record"),
    ],
)
def test_what_the_policy_does_not_name_does_not_leave(reply: Records, reason: str) -> None:
    assert refused(reply) == reason


def test_arrays_leave_in_answer_to_training_alone() -> None:
    assert refused(Records(arrays={"arrays": model()}), kind="evaluate") == "record"
    assert refused(replied(), kind="query") == "kind"


def test_what_is_dropped_does_not_leave_either() -> None:
    dropping = PLAIN.replace("sends:\n", "sends:\n  unnamed: drop\n")
    reply = Records(
        arrays={"arrays": model()},
        metrics={"metrics": {"secret": 1.0, "num-examples": 64}, "m2": {"a": 1}},
        config={"c": {"t": "x"}},
    )
    left = release(policy(dropping), "train", RECEIVED, reply)
    assert left.metrics == {"metrics": {"num-examples": 64}}
    assert left.config == {}
    assert refused(Records(arrays={"arrays": model(), "more": model()}), dropping) == "record"


def test_counters_leave_as_they_came_and_the_order_is_the_coordinator_s() -> None:
    counted = {name: model(n=np.array(1234567))[name] for name in ("n", "b", "w")}
    left = release(policy(), "train", RECEIVED, replied(counted))
    assert list(left.arrays["arrays"]) == ["w", "b", "n"]
    assert left.arrays["arrays"]["n"] == model()["n"]
    sent = PLAIN.replace("dtype: float32}", "dtype: float32, counters: sent}")
    assert (
        array_values("n", release(policy(sent), "train", RECEIVED, replied(counted)).arrays["arrays"]["n"]) == 1234567
    )


def test_the_memory_order_of_an_array_says_nothing() -> None:
    turned = replied({**model(), "w": raw_array(array_values("w", W), fortran=True)})
    assert release(policy(), "train", RECEIVED, turned).arrays["arrays"]["w"] == W


def test_a_fixed_number_leaves_whatever_the_app_says() -> None:
    fixed = PLAIN.replace("{integer: true, at_least: 32, round_to: 32}", "{value: 5}").replace(
        ", train_loss: {digits: 3}", ""
    )
    for metrics in ({}, {"metrics": {}}, {"metrics": {"num-examples": 7}}):
        left = release(policy(fixed), "train", RECEIVED, Records(arrays={"arrays": model()}, metrics=metrics))
        assert left.metrics == {"metrics": {"num-examples": 5}}
    assert policy(fixed).reply("train").bits == 0  # type: ignore[union-attr]


def test_whether_a_record_is_there_is_counted_or_said_by_the_policy() -> None:
    empty = Records(metrics={"metrics": {}}, config={"config": {}})
    bare = PLAIN.replace("{metrics: {allow: {accuracy: {digits: 3}}}}", "{}")
    for reply in (empty, Records()):
        assert release(policy(bare), "evaluate", RECEIVED, reply) == Records()
    one = PLAIN.replace("accuracy: {digits: 3}", "accuracy: {one_of: [1]}")
    held = ({}, {"metrics": {}}, {"metrics": {"accuracy": 1}})
    left = {str(release(policy(one), "evaluate", RECEIVED, Records(metrics=each)).metrics) for each in held}
    assert len(left) <= 2 ** policy(one).reply("evaluate").bits  # type: ignore[union-attr]


@pytest.mark.parametrize("rule", ["1", "1.0", "false", "{exact: true, records: []}"])
def test_a_number_is_no_rule(rule: str) -> None:
    with pytest.raises(UserError, match="accuracy"):
        policy(PLAIN.replace("accuracy: {digits: 3}", f"accuracy: {rule}"))


def test_records_without_a_name_are_none() -> None:
    with pytest.raises(UserError, match="records is expected to list names"):
        policy(PLAIN.replace("evaluate: {metrics: {", "evaluate: {metrics: {records: [], "))


def test_true_is_no_number_in_bounds() -> None:
    one = policy(PLAIN.replace("accuracy: {digits: 3}", "accuracy: {exact: true, integer: true}"))
    with pytest.raises(RefusedError, match="bool"):
        release(one, "evaluate", RECEIVED, Records(metrics={"metrics": {"accuracy": True}}))


@pytest.mark.parametrize(
    ("message", "kind", "reason"),
    [
        (RECEIVED, "query", "kind"),
        (RECEIVED, "train.secret", "kind"),
        (Records(arrays={"other": model()}), "train", "record"),
        (Records(arrays={"arrays": model(w=np.full((4, 3), np.inf, np.float32))}), "train", "finite"),
        (Records(metrics={"m": {"a": 1}}), "train", "record"),
        (Records(config={"config": {"path": 1}}), "train", "key"),
        (Records(config={"config": {"lr": 2.0}}), "train", "range"),
        (Records(config={"config": {"mode": "b"}}), "train", "text"),
        (Records(config={"config": {"lr": "/etc/passwd"}}), "train", "text"),
    ],
)
def test_what_the_app_is_not_given(message: Records, kind: str, reason: str) -> None:
    with pytest.raises(RefusedError) as error:
        admit(policy(), kind, message)
    assert error.value.reason == reason


def test_what_the_app_is_given_is_what_came() -> None:
    came = Records(arrays={"arrays": model()}, config={"config": {"lr": 0.123456789, "mode": "a"}})
    assert admit(policy(), "train", came) == came


def test_noise_is_on_all_floats_and_bounded_change_within() -> None:
    far = model(w=np.full((4, 3), 1e30, np.float32))
    left = release(policy(NOISED), "train", RECEIVED, replied(far)).arrays["arrays"]
    change = np.concatenate(
        [np.ravel(array_values(n, left[n]).astype(float) - array_values(n, RECEIVED.arrays["arrays"][n])) for n in "wb"]
    )
    assert 0 < np.linalg.norm(change) < 1.0 + 0.5 * 10 * np.sqrt(15)
    assert left["n"] == model()["n"]
    again = release(policy(NOISED), "train", RECEIVED, replied(far)).arrays["arrays"]
    assert left["b"] != again["b"]


@settings(max_examples=60, deadline=None)
@given(
    some.lists(some.floats(-(2.0**126), 2.0**126, width=32), min_size=1, max_size=30),
    some.floats(0.001, 1000),
    some.floats(0.01, 100),
)
def test_the_clipped_change_is_never_longer_than_said(values: list[float], clip: float, multiplier: float) -> None:
    noising = Noising(clip_norm=clip, noise_multiplier=multiplier)
    steps = clipped([(np.zeros(len(values)), np.array(values))], noising)
    assert sum(int(step) ** 2 for step in steps) <= noising.longest
    assert noising.longest * noising.step**2 <= clip**2 * (1 + 1e-12)
    if np.linalg.norm(values) <= 0.99 * clip:
        assert np.abs(steps * noising.step - values).max() <= 0.51 * noising.step
    else:
        assert np.linalg.norm(steps * noising.step) > 0.98 * min(clip, np.linalg.norm(values)) - noising.step * 6


def test_without_noise_the_change_is_the_clipped_one() -> None:
    noising = Noising(clip_norm=1.0, noise_multiplier=1.0)
    before, after = np.ones(100, np.float32), np.full(100, 3.0, np.float32)
    (moved,) = noised([before], [after], noising, draw=lambda n: np.zeros(n, np.int64))
    assert np.allclose(moved, 1.1, atol=1e-5)


def test_a_variance_is_not_made_negative() -> None:
    received = Records(arrays={"arrays": {"bn.running_var": raw_array(np.zeros(1000, np.float32))}})
    left = release(policy(NOISED), "train", received, received).arrays["arrays"]["bn.running_var"]
    assert array_values("x", left).min() == 0


def test_refusals_are_user_errors() -> None:
    with pytest.raises(UserError):
        release(policy(), "query", RECEIVED, replied())


def test_a_change_beyond_the_largest_number_is_clipped_too() -> None:
    noising = Noising(clip_norm=1.0, noise_multiplier=0.001)
    made = noised([np.full(4, -1.7e308)], [np.full(4, 1.7e308)], noising, draw=lambda n: np.zeros(n, np.int64))
    assert np.isfinite(made[0]).all()
    moved = noised([np.array([-1e308, 0.0])], [np.array([1e308, 0.0])], noising, draw=lambda n: np.zeros(n, np.int64))
    assert moved[0][1] == 0.0


def test_a_change_in_many_pieces_is_the_one_in_few(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    before = [np.asfortranarray(rng.normal(size=(7, 5))), rng.normal(size=()).astype(np.float32), rng.normal(size=0)]
    after = [rng.normal(size=array.shape).astype(array.dtype) for array in before]
    noising = Noising(clip_norm=1.0, noise_multiplier=0.5)
    steps = np.arange(36) << 10
    whole = noised(before, after, noising, draw=lambda n: steps.copy())
    monkeypatch.setattr(protecting, "_BLOCK", 4)
    pieces = noised(before, after, noising, draw=lambda n: steps.copy())
    for one, other, came in zip(whole, pieces, before, strict=True):
        assert one.shape == came.shape
        assert one.dtype == came.dtype
        assert np.abs(one - other).max(initial=0.0) <= 2 * noising.step + 1e-6
    change = np.concatenate([(b - a).ravel() for a, b in zip(before, after, strict=True)])
    expected = change / np.linalg.norm(change) + steps * noising.step
    found = np.concatenate([(one - came).ravel() for one, came in zip(whole, before, strict=True)])
    assert np.allclose(found, expected, atol=1e-6)


LISTS = """
version: 1
receives: {records: {config: {allow: {stage: {one_of: [keys]}, "*": {most_bytes: 4, length: 2}}}}}
sends:
  query:
    arrays: {lists: {T: 3, E: 3}, record: survival, dtype: [float64, uint8]}
    config: {allow: {pk1: {most_bytes: 4}}}
"""
T, E = raw_array(np.array([1.5, 2.5])), raw_array(np.array([1, 0], np.uint8))


def test_lists_of_the_app_s_choice_leave_in_the_policy_s_order_and_sizes() -> None:
    reply = Records(arrays={"survival": {"E": E, "T": T}}, config={"config": {"pk1": b"key"}})
    left = release(policy(LISTS), "query", Records(), reply)
    assert list(left.arrays["survival"].items()) == [("T", T), ("E", E)]
    assert left.config == {"config": {"pk1": b"key"}}
    for none in ({}, {"survival": {}}):
        assert release(policy(LISTS), "query", Records(), Records(arrays=none)).arrays == none


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"other": {"T": T, "E": E}}, "record"),
        ({"survival": {"T": T, "E": E}, "more": {}}, "record"),
        ({"survival": {"T": T}}, "key"),
        ({"survival": {"T": T, "E": E, "x": E}}, "key"),
        ({"survival": {"T": raw_array(np.ones(2, np.float32)), "E": E}}, "dtype"),
        ({"survival": {"T": raw_array(np.ones(4)), "E": E}}, "size"),
        ({"survival": {"T": raw_array(np.ones((0, 1 << 20))), "E": E}}, "size"),
        ({"survival": {"T": raw_array(np.array([np.nan])), "E": E}}, "finite"),
        ({"survival": {"T": RawArray("float64", (2,), NUMPY, T.data + b"x"), "E": E}}, "bytes"),
    ],
)
def test_what_is_no_list_of_the_policy_does_not_leave(arrays: dict[str, dict[str, RawArray]], reason: str) -> None:
    with pytest.raises(RefusedError) as error:
        release(policy(LISTS), "query", Records(), Records(arrays=arrays))
    assert error.value.reason == reason


EDGES = [edge + more for edge in (-(1 << 63), 1 << 63, 1 << 64) for more in (-1, 0, 1)]
WHOLE = some.one_of(some.integers(-(1 << 65), 1 << 65), some.sampled_from(EDGES))


@given(value=some.one_of(WHOLE, some.lists(WHOLE, max_size=3)), digits=some.integers(1, 15))
def test_whole_numbers_that_pass_are_those_that_flower_writes(value: Any, digits: int) -> None:
    shape = {"length": 3, "shorter": True} if isinstance(value, list) else {}
    several = value if isinstance(value, list) else [value]
    most = 1 << (63 if min(several, default=0) < 0 else 64)  # of a list with signs, and of one without
    fits = all(-(1 << 63) <= one < most for one in several)
    for rule in (Rule(exact=True, **shape), Rule(digits=digits, at_least=-1e30, at_most=1e30, **shape)):
        try:
            passed = rule.apply("x", value)
        except RefusedError:
            assert not fits
            continue
        assert fits or not rule.exact  # 2^63 is rounded to a smaller number
        if rule.exact:
            assert passed == value
        assert config_record_from_proto(config_record_to_proto(ConfigRecord({"x": passed}))) == {"x": passed}


def test_numbers_that_become_whole_are_those_that_flower_writes() -> None:
    rule = Rule(integer=True, exact=True, length=2)
    for sent, left in (([-1.0, 2.0], [-1, 2]), ([1.0, 1e19], [1, 10**19])):
        assert rule.apply("x", sent) == left
        assert config_record_to_proto(ConfigRecord({"x": left}))
    with pytest.raises(RefusedError, match="no message holds"):
        rule.apply("x", [-1.0, 1e19])
    for value, left in ((2.0, 2), (0, 0), (0.5, 0.5), (1e30, 1e30), (10**30, 1e30), (-1e30, -1e30), (None, None)):
        assert repr(Rule(value=value).fixed) == repr(left)


def test_a_byte_of_true_or_false_holds_nothing_else() -> None:
    flags = policy(LISTS.replace("dtype: [float64, uint8]", "dtype: [float64, bool]"))
    for content, passes in ((b"\0\1", True), (b"\1\2", False), (b"PA", False)):
        made = raw_array(np.zeros(2, bool))
        reply = Records(arrays={"survival": {"T": T, "E": replace(made, data=made.data[:-2] + content)}})
        if passes:
            assert release(flags, "query", Records(), reply) == reply
        else:
            with pytest.raises(RefusedError, match="but holds other bytes"):
                release(flags, "query", Records(), reply)


def claimed(shape: tuple[int, ...]) -> RawArray:
    """Make an array whose header states ``shape``, with as many bytes, but at most 256 KiB."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return RawArray("float32", shape, NUMPY, header.getvalue() + bytes(4 * min(max(0, math.prod(shape)), 1 << 16)))


@given(shape=some.lists(some.integers(-3, 3) | some.sampled_from([1, 1 << 31]), max_size=70).map(tuple))
def test_an_array_of_any_shape_is_decoded_or_refused_by_name(shape: tuple[int, ...]) -> None:
    try:
        assert array_values("x", claimed(shape)).shape == shape
    except RefusedError as error:
        assert error.reason in {"shape", "bytes"}
        assert len(shape) > 32 or min(shape) < 0 or abs(math.prod(shape)) > 1 << 16 or max(shape) == 1 << 31


@pytest.mark.parametrize("shape", [(1,) * 65, (1,) * 30_000, (-1, -1), (0, 1 << 31, 1 << 31, 1 << 31)])
def test_a_shape_that_numpy_can_not_make_is_refused_by_name(shape: tuple[int, ...]) -> None:
    array = claimed(shape) if len(shape) < 1000 else RawArray("float32", shape, NUMPY, b"no header is as long")
    with pytest.raises(RefusedError, match="claims the shape") as error:
        array_values("x", array)
    assert error.value.reason == "shape"


def test_the_size_of_a_message_counts_what_lists_hold() -> None:
    large = Records(config={"config": {"17": [b"a" * (1 << 20)] * 2, "n": [1, 2], "x": 0.5}})
    assert large.size >= 2 << 20
    text = LISTS.replace("most_bytes: 4, length: 2", f"most_bytes: {1 << 20}, length: 2")
    text = text.replace("receives: {", "receives: {max_mib: 1, ")
    with pytest.raises(RefusedError, match="a message of"):
        admit(policy(text), "query", Records(config={"config": {"stage": "keys", "17": large.config["config"]["17"]}}))


def test_rows_leave_in_the_policy_s_shape_alone() -> None:
    rows = LISTS.replace("T: 3,", "T: [3, 2],")
    assert "T of at most 3 x 2 values and E of at most 3 values" in "".join(rules_in_words(policy(rows)))
    for shape in ((0, 2), (1, 2), (3, 2)):
        reply = Records(arrays={"survival": {"T": raw_array(np.ones(shape)), "E": E}})
        assert release(policy(rows), "query", Records(), reply).arrays["survival"]["T"].shape == shape
    for shape in ((), (2,), (4, 2), (3, 1), (2, 3), (0, 3), (3, 2, 1), (1, 3, 2)):
        reply = Records(arrays={"survival": {"T": raw_array(np.ones(shape)), "E": E}})
        with pytest.raises(RefusedError, match=r"T is of shape .*; send at most 3 rows of shape \(2,\)"):
            release(policy(rows), "query", Records(), reply)


def test_a_rule_of_all_other_settings_is_for_messages_alone() -> None:
    config = {"config": {"stage": "keys", "17": [b"a", b"bcde"]}}
    assert admit(policy(LISTS), "query", Records(config=config)).config == config
    for value, reason in (([b"a", b"bcdef"], "size"), ("a", "type")):
        with pytest.raises(RefusedError) as error:
            admit(policy(LISTS), "query", Records(config={"config": {"stage": "keys", "17": value}}))
        assert error.value.reason == reason
    text = LISTS.replace("stage: {one_of: [keys]}", "rate: {value: 0.1}")
    config = {"config": {"17": [b"a", b"b"]}}
    assert admit(policy(text), "query", Records(config=config)).config == {"config": config["config"] | {"rate": 0.1}}


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("{lists: {T", "{like: received, lists: {T", "one of like and lists"),
        ("record: survival", "record: 0", "record is expected to be a name, but got 0"),
        ("record: survival", "record: []", "record is expected to be a name"),
        ("{lists: {T", "{counters: received, lists: {T", "one of counters and lists"),
        ("{T: 3, E", "{T: 0, E", "lists.T is expected"),
        ("{T: 3, E", "{T: [3, 0], E", "lists.T is expected"),
        ("{T: 3, E", "{T: [], E", "lists.T is expected"),
        ("{T: 3, E", "{T: [[3]], E", "lists.T is expected"),
        ("    config: {allow: {pk1", "    metrics: {allow: {pk1", "write most_bytes under config"),
        ("sends:", "protect: {defense: pruning}\nsends:", "arrays like received"),
        ("{pk1: {most", '{"*": {most', r"query.config.allow is expected to list names, but got '\*'"),
        ("{pk1: {most_bytes: 4}}", '["*"]', r"query.config.allow is expected to list names, but got '\*'"),
        ("{T: 3,", '{"*": 3,', r"query.arrays.lists is expected to list names, but got '\*'"),
    ],
)
def test_a_policy_of_lists_that_is_none_is_one_line(before: str, after: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        policy(LISTS.replace(before, after))


def test_a_text_of_any_wording_is_received_and_never_leaves() -> None:
    free = policy(PLAIN.replace("mode: {one_of: [a]}", "mode: {one_of: [a]}, place: {most_letters: 20}"))
    given = Records(config={"config": {"place": "results/2026-01-01"}})
    assert admit(free, "train", given) == given
    for text in ("x" * 21, b"bytes", ["results"]):
        with pytest.raises(RefusedError):
            admit(free, "train", Records(config={"config": {"place": text}}))
    assert any("place as at most 20 letters, whatever they hold" in said for said in rules_in_words(free))
    assert any("By the texts of place, a coordinator can direct" in said for said in warnings_of(free))
    assert not any("can direct" in said for said in warnings_of(policy(PLAIN)))
    for kind in ("metrics", "config"):
        with pytest.raises(UserError, match=r"sends\.train is expected to list texts by one_of, but got most_letters"):
            policy(f"version: 1\nsends: {{train: {{{kind}: {{allow: {{note: {{most_letters: 9}}}}}}}}}}")


def test_lists_and_bytes_are_sentences_and_count_as_bits() -> None:
    said, open_ = rules_in_words(policy(LISTS)), warnings_of(policy(LISTS))
    lists = "T of at most 3 values and E of at most 3 values; finite, of float64 and uint8"
    assert f"In reply to query, lists of the app's choice leave: {lists}." in said
    assert "In reply to query, pk1 leaves as at most 4 bytes, whatever they hold." in said
    assert "Apart from arrays, an app can choose at most 35 bits of a reply to query." in said
    assert any("each other one as a list of 2, each as at most 4 bytes" in sentence for sentence in said)
    bounds = "An app can write examples into {} in reply to query; nothing bounds that."
    assert not any("pk1" in sentence for sentence in open_), "four bytes hold no example"
    more = "{few: {length: 3, exact: true}, many: {length: 9}, rate: {}, one: {exact: true}, pk1: {most_bytes: 300}}"
    open_ = warnings_of(policy(LISTS.replace("{pk1: {most_bytes: 4}}", more)))
    assert bounds.format("354 bytes of few, many, one, pk1 and rate") in open_
    twice = "{pk1: {most_bytes: 4}}}\n    metrics: {allow: {pk1: {length: 9}}"
    assert bounds.format("23 bytes of pk1") in warnings_of(policy(LISTS.replace("{pk1: {most_bytes: 4}}", twice)))
    many = f"[{', '.join(f'k{place}' for place in range(10, 20))}]"
    assert any(
        "bytes of k10, k11" in said for said in warnings_of(policy(LISTS.replace("{pk1: {most_bytes: 4}}", many)))
    )
