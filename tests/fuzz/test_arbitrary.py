"""Whatever a file or a command line holds: it is read, or refused in a line, and never a traceback."""

import json
from pathlib import Path

import pytest

from fl_privacy.data.transformations import read_policies
from fl_privacy.errors import UserError
from fl_privacy.runs.config.compose import parse_overrides
from fl_privacy.runs.config.untrusted import expect_plain, read_settings
from fl_privacy.runs.folder.records import parse_json, wrong_identity, wrong_partition, wrong_record

hypothesis = pytest.importorskip("hypothesis")
given, strategies = hypothesis.given, hypothesis.strategies
quick = hypothesis.settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
)

plain = strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats() | strategies.text()
nested = strategies.recursive(
    plain, lambda inner: strategies.lists(inner) | strategies.dictionaries(strategies.text(), inner), max_leaves=8
)
yaml_like = strategies.text(alphabet="ab_:-[]{}&*!?|>#'\"${}\n\t 01.~%@`", max_size=80)
override_like = strategies.text(alphabet="abseed_model=.,[]{}()'\"${}+~@:\\ 019-", max_size=40)


def one_line(act) -> None:
    try:
        act()
    except UserError as error:
        assert str(error).strip() and "\n" not in str(error).strip()


@quick
@given(yaml_like | strategies.text(max_size=80))
def test_text_for_settings(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file: Path = tmp_path_factory.getbasetemp() / "arbitrary.yaml"
    file.write_text(text, encoding="utf-8", errors="replace")
    one_line(lambda: read_settings(file))


@quick
@given(strategies.binary(max_size=80))
def test_bytes_for_settings(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file: Path = tmp_path_factory.getbasetemp() / "arbitrary.yaml"
    file.write_bytes(content)
    one_line(lambda: read_settings(file))


@quick
@given(override_like | strategies.text(max_size=40))
def test_text_for_overrides(text: str) -> None:
    one_line(lambda: parse_overrides([text]))
    one_line(lambda: expect_plain([text], (), where="Arbitrary text"))


@quick
@given(nested)
def test_values_for_records(value: object) -> None:
    value = parse_json(json.dumps(value))
    for judge in (wrong_identity, wrong_partition):
        assert judge(value)
    wrong_record({"kind": value})
    for kind in ("round", "image", "tracing", "privacy"):
        assert wrong_record({"kind": kind, "round": value})


@quick
@given(nested)
def test_values_for_policies(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    file: Path = tmp_path_factory.getbasetemp() / "arbitrary.json"
    for content in (value, {"policies": value}, {"policies": [value]}):
        file.write_text(json.dumps(content))
        one_line(lambda: read_policies(str(file)))
