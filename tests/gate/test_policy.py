"""A policy is read, said in sentences, and refused in a line where it says something else."""

import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from fl_privacy.errors import UserError
from fl_privacy.site.gate.policy import READY, parse_policy, read_policy
from fl_privacy.site.gate.rules import Rule
from fl_privacy.site.gate.sentences import course_of, replies_within, rules_in_words, warnings_of

SPEC = """
version: 1
receives:
  records: {arrays: {parameters: true}, config: {allow: [lr, epochs, server-round]}}
  guard: on
sends:
  train:
    arrays: {like: received, finite: true, dtype: float32}
    metrics: {allow: {num-examples: {integer: true, at_least: 32, round_to: 32}, train_loss: {digits: 3}}}
  evaluate: {metrics: {allow: {num-examples: {}, accuracy: {digits: 3}}}}
  query: refuse
protect:
  clip_norm: 1.0
  noise: {mechanism: gaussian, noise_multiplier: 1.1, unit: client}
budget: {epsilon: 8, delta: 1e-5, per: data, ledger: /var/lib/fl-privacy/ledger}
rounds_per_day: 50
"""


def test_the_policy_of_the_documentation_is_one() -> None:
    policy = parse_policy(SPEC.encode(), "site.yaml", Path("/etc"))
    assert policy.reply("train.default") is policy.reply("train") is not None
    assert policy.reply("query") is None
    assert policy.receives.arrays == ("parameters",)
    assert policy.rho("train") == pytest.approx(0.5 / 1.21)
    assert policy.rho("evaluate") == 0
    said = rules_in_words(policy)
    assert all(sentence[0].isupper() and sentence.endswith(".") and "\n" not in sentence for sentence in said)
    assert any("num-examples leaves as a whole number from 32 to 1e+06, rounded to multiples of 32" in s for s in said)
    assert any("does not cover the numbers" in warning for warning in warnings_of(policy))
    replies = replies_within(policy)
    assert course_of(policy, replies) <= 8 < course_of(policy, replies + 1)


@pytest.mark.parametrize("name", READY)
def test_policies_that_come_along_are_read(name: str) -> None:
    policy = read_policy(name)
    assert any("8192 MiB of memory and 128 processes in all" in sentence for sentence in rules_in_words(policy))
    assert (policy.noising is None) == any("Nothing bounds what the weights carry" in w for w in warnings_of(policy))


def test_what_protects_nothing_says_so() -> None:
    policy = parse_policy(b"version: 1\nsends: {train: {arrays: {like: received}}}", "x", Path())
    assert any(sentence.startswith("Nothing bounds what the weights carry") for sentence in warnings_of(policy))
    assert policy.rho("train") is None


def test_a_policy_that_says_nothing_answers_nothing() -> None:
    policy = parse_policy(b"version: 1", "x", Path())
    assert [policy.reply(kind) for kind in ("train", "evaluate", "query", "train.other")] == [None] * 4
    assert policy.app.required
    assert (policy.app.most_bytes, policy.app.most_processes) == (8192 << 20, 128)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "version is expected"),
        ("version: 2", "version is expected to be one of 1"),
        ("[1]", "expected to be a mapping"),
        ("version: 1\nsend: {}", "got 'send'"),
        ("version: 1\nsends: {trane: {}}", "got 'trane'"),
        ("version: 1\nsends: {train: {arrays: {like: sent}}}", "like is expected"),
        ("version: 1\nsends: {train: {arrays: {like: received, finite: false}}}", "finite is expected"),
        ("version: 1\nsends: {train: {arrays: {like: received, dtype: int64}}}", "dtype is expected"),
        ("version: 1\nsends: {train: {metrics: {allow: {a: {digit: 3}}}}}", "got 'digit'"),
        ("version: 1\nsends: {train: {metrics: {allow: {a: {digits: 0}}}}}", "digits is expected"),
        ("version: 1\nsends: {train: {metrics: {allow: {a: {exact: true, value: 3}}}}}", "got several"),
        ("version: 1\nsends: {train: {metrics: {allow: {a: {one_of: abc}}}}}", "one_of is expected"),
        ("version: 1\nsends: {train: {metrics: {allow: {a: {one_of: [.inf]}}}}}", "one_of is expected"),
        ("version: 1\nsends: {train: {metrics: {allow: {a: {one_of: [1, true]}}}}}", "one_of is expected"),
        ("version: 1\nprotect: {clip_norm: 1}", "noise_multiplier is expected"),
        ("version: 1\nprotect: {clip_norm: -1, noise: {noise_multiplier: 1}}", "clip_norm is expected"),
        ("version: 1\nprotect: {clip_norm: 1, noise: {noise_multiplier: 0}}", "noise_multiplier is expected"),
        ("version: 1\nprotect: {clip_norm: 1, noise: {noise_multiplier: 1, unit: x}}", "unit is expected"),
        ("version: 1\nprotect: {clip_norm: 1, noise: {noise_multiplier: 1}}", "with a budget"),
        ("version: 1\nbudget: {epsilon: 8, ledger: l}", "epsilon is expected with protect.noise"),
        ("version: 1\nbudget: {}", "ledger is expected"),
        ("version: 1\nrounds_per_day: 5", "with a budget"),
        ("version: 1\nbudget: {ledger: l, anchor: ./l}", "anchor of .* is expected elsewhere"),
        ("version: 1\nbudget: {ledger: l, anchor: l/a}", "anchor of .* is expected elsewhere"),
        ("version: 1\nsends: {train: refuse, train.default: {}}", "name train once"),
        ("version: 1\nsends: {train.default.default: {}}", "got 'train.default.default'"),
        ("version: 1\napp: {network: open}", "network is expected"),
        ("version: 1\napp: {memory_mib: 511}", "memory_mib is expected"),
        ("version: 1\napp: {memory_mib: .inf}", "memory_mib is expected"),
        ("version: 1\napp: {processes: 0}", "processes is expected"),
        ("version: 1\napp: {reads: /data}", "reads is expected to be a list"),
        ('version: 1\nreceives: {run_config: ["*"]}', r"run_config is expected to list names, but got '\*'"),
        ('version: 1\nreceives: {records: {arrays: {"*": true}}}', r"arrays is expected to list names, but got '\*'"),
        ('version: 1\nsends: {train: {metrics: {records: ["*"]}}}', r"records is expected to list names, but got '\*'"),
        ("a: [", "expected to be YAML"),
        ("version: !!python/name:os.system 1", "expected to be YAML"),
        ("version: 1\nreceives: {guard: maybe}", "guard is expected"),
        ("[" * 5000, "expected to be YAML"),
        ("version: 1\nsends: {train: {metrics: {allow: {17: {}, '17': {digits: 9}}}}}", "'17' stands twice"),
        ("version: 1\nsends: {train: {metrics: {allow: {true: {}, 'True': {digits: 9}}}}}", "'True' stands twice"),
        ("version: 1\nsends: {train: {metrics: {allow: {1: {}, 1.0: {digits: 9}}}}}", "1.0 stands twice"),
    ],
)
def test_what_is_no_policy_is_one_line(text: str, line: str) -> None:
    with pytest.raises(UserError, match=line) as error:
        parse_policy(text.encode(), "site.yaml", Path())
    assert str(error.value).startswith("site.yaml: ") or str(error.value).startswith("site.yaml is")
    assert "\n" not in str(error.value)


def test_a_policy_that_others_may_write_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "site.yaml"
    place.write_text("version: 1")
    place.chmod(0o664)
    with pytest.raises(UserError, match="others may write; chown"):
        read_policy(place)
    place.chmod(0o644)
    assert read_policy(place).digest
    with pytest.raises(UserError, match="strict, research, dp"):
        read_policy(tmp_path / "none.yaml")
    os.mkfifo(tmp_path / "pipe.yaml", 0o600)
    for place in (tmp_path, tmp_path / "pipe.yaml"):
        with pytest.raises(UserError, match="ordinary file"):
            read_policy(place)


@pytest.mark.parametrize(
    ("rule", "value", "passed"),
    [
        ({"digits": 3}, 0.123456789, 0.123),
        ({}, 2.3456e-9, 0.0),
        ({}, -123456.7, -123000.0),
        ({"integer": True, "round_to": 32, "at_least": 32}, 1001, 992),
        ({"integer": True, "round_to": 32, "at_least": 32}, 33, 32),
        ({"exact": True}, 0.123456789, 0.123456789),
        ({"integer": True}, 12345, 12300),
        ({"one_of": ["a", "b"]}, "a", "a"),
        ({"one_of": [1, 0.0]}, -0.0, 0.0),
        ({"one_of": [-0.0, 0.0]}, 0.0, -0.0),
        ({"exact": True}, -0.0, 0.0),
        ({"exact": True}, (1 << 64) - 1, (1 << 64) - 1),
        ({"exact": True}, -(1 << 63), -(1 << 63)),
        ({"exact": True, "length": 2}, [0, 1 << 63], [0, 1 << 63]),
        ({"digits": 4, "at_most": 1e30}, (1 << 64) - 1, (1 << 64) - 1),
        ({"digits": 5, "at_most": 1e30}, (1 << 63) - 1, (1 << 63) - 1),
        ({"integer": True, "digits": 4, "at_most": 1e30}, 1e19, 10**19),
        ({"round_to": 0.5}, -0.1, 0.0),
        ({"length": 2, "one_of": [0.0]}, [0.0, -0.0], [0.0, 0.0]),
        ({"digits": 2, "at_most": 1}, 0.999, 1.0),
        ({"most_bytes": 3}, b"abc", b"abc"),
        ({"most_bytes": 3, "length": 2}, [b"", b"abc"], [b"", b"abc"]),
        ({"most_letters": 3}, "änd", "änd"),
        ({"most_letters": 3, "length": 2}, ["", "abc"], ["", "abc"]),
        ({"exact": True}, True, True),
        ({"exact": True, "length": 2}, [True, False], [True, False]),
    ],
)
def test_numbers_pass_as_the_rule_says(rule: dict[str, object], value: object, passed: object) -> None:
    found = Rule.read("x", rule).apply("x", value)
    assert repr(found) == repr(passed), "-0.0 equals 0.0"


@pytest.mark.parametrize(
    ("rule", "value", "reason"),
    [
        ({}, "text", "text"),
        ({}, b"text", "text"),
        ({}, [1, 2], "type"),
        ({}, True, "type"),
        ({}, float("nan"), "finite"),
        ({}, float("inf"), "finite"),
        ({}, 1e7, "range"),
        ({"at_least": 32}, 31, "range"),
        ({"integer": True}, 1.5, "type"),
        ({"integer": True, "exact": True}, 2.0**64, "range"),
        ({"exact": True}, 10**400, "range"),
        ({"one_of": ["a"]}, "b", "text"),
        ({"one_of": [1]}, 1.0, "range"),
        ({"exact": True}, "a", "text"),
        ({"exact": True}, 1 << 64, "range"),
        ({"exact": True}, -(1 << 63) - 1, "range"),
        ({"integer": True, "at_most": 1e30}, 1e20, "range"),
        ({"most_bytes": 3}, b"abcd", "size"),
        ({"most_bytes": 3}, "abc", "type"),
        ({"most_bytes": 3, "length": 2}, [b"abc"], "type"),
        ({"most_letters": 3}, "abcd", "size"),
        ({"most_letters": 3}, b"abc", "type"),
        ({"most_letters": 3}, 1, "type"),
        ({"most_letters": 3, "length": 2}, ["a"], "type"),
        ({"length": 2}, [True, False], "type"),
        ({"exact": True, "length": 2, "at_most": 1}, [True, False], "type"),
        ({"exact": True, "length": 2, "integer": True}, [True, False], "type"),
    ],
)
def test_what_a_rule_does_not_let_pass(rule: dict[str, object], value: object, reason: str) -> None:
    with pytest.raises(UserError) as error:
        Rule.read("x", rule).apply("x", value)
    assert error.value.reason == reason  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "rule",
    [
        {"most_bytes": 3, "exact": True},
        {"most_bytes": 3, "most_letters": 3},
        {"exact": True, "digits": 3},
        {"round_to": 0.1, "digits": 1},
        {"one_of": [1], "digits": 3},
    ],
)
def test_a_rule_that_would_do_nothing_is_none(rule: dict[str, object]) -> None:
    with pytest.raises(UserError, match="but got several"):
        Rule.read("x", rule)
    with pytest.raises(UserError, match="x: round_to is expected to be larger between these bounds"):
        Rule.read("x", {"round_to": 1e-310})


def test_bits_are_no_fewer_than_the_values_that_can_leave() -> None:
    rule = Rule(digits=1, at_least=0, at_most=1)
    values = {repr(rule.apply("x", kind(k / 1e7))) for k in range(0, 10_000_001, 50) for kind in (int, float)}
    assert len(values) <= 2**rule.bits < 6 * len(values)
    either = Rule(round_to=1, at_least=0, at_most=99)
    values = {repr(either.apply("x", kind(k))) for k in range(100) for kind in (int, float)}
    assert len(values) == 200 <= 2**either.bits < 1.1 * len(values)
    kept = Rule(most_bytes=1)
    assert 1 + 256 <= 2**kept.bits < 2.1 * (1 + 256)
    coarse = Rule(integer=True, round_to=32, at_least=32, at_most=4096)
    values = {coarse.apply("x", k) for k in range(32, 4097)}
    assert len(values) <= 2**coarse.bits < 1.1 * len(values)


@pytest.mark.parametrize(
    "rule", [{}, {"exact": True}, {"exact": True, "integer": True}, {"exact": True, "at_least": 0}, {"one_of": [1]}]
)
def test_a_policy_says_where_true_or_false_leaves(rule: dict[str, object]) -> None:
    read = Rule.read("metrics.x", rule)
    assert ("true or false" in read.in_words()) == (rule == {"exact": True})
    with nullcontext() if rule == {"exact": True} else pytest.raises(UserError):
        assert read.apply("x", True) is True


def test_a_list_is_of_so_many_numbers_and_each_is_as_the_rule_says() -> None:
    rule = Rule.read("metrics.x", {"length": 3, "digits": 2})
    assert rule.apply("x", [0.123, 4.56, 0.0]) == [0.12, 4.6, 0.0]
    assert rule.bits == 3 * Rule.read("metrics.x", {"digits": 2}).bits
    assert rule.in_words().startswith("as a list of 3, each as a number")
    for value in ([0.1, 0.2], [0.1] * 4, 0.1, "abc", [0.1, 0.2, "c"], [0.1, 0.2, float("nan")]):
        with pytest.raises(UserError):
            rule.apply("x", value)
    either = Rule(length=2, shorter=True, one_of=("a", "b"))
    values = [either.apply("x", value) for value in ([], ["a"], ["b"], *([one, two] for one in "ab" for two in "ab"))]
    assert len(values) == 7 <= 2**either.bits <= 12
    assert either.in_words() == "as a list of at most 2, each as one of a, b"
    with pytest.raises(UserError):
        either.apply("x", ["a"] * 3)
    with pytest.raises(UserError, match="shorter is expected with length"):
        Rule.read("metrics.x", {"shorter": True})
    with pytest.raises(UserError, match="one of value and length"):
        Rule.read("metrics.x", {"length": 3, "value": 1})
