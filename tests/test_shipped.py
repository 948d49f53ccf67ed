"""Tables that the package keeps in data files."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from fl_privacy.auditing.scenarios import SCENARIOS, scenario_of
from fl_privacy.data.transformations import KINDS, LEVELS, OPERATIONS
from fl_privacy.measure.answer import QUESTIONS, QuestionName
from fl_privacy.measure.registry import METRICS, NOT_METRICS
from fl_privacy.report.headline import VERDICTS
from fl_privacy.report.inferred import AXES, HEADINGS, MEASURES
from fl_privacy.runs.folder.defense_choice import HEADLINE
from fl_privacy.runs.folder.verdict import Ground
from tests.test_shape import ROOT


def used() -> Iterator[Path]:
    for file in (ROOT / "fl_privacy").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "shipped(" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "shipped":
                yield file.with_name(ast.literal_eval(node.args[1]))


USED = sorted(set(used()))


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    assert len(keys) == len(set(keys)), f"a key is there twice among {keys}"
    return dict(pairs)


def keys_of(node: yaml.Node) -> None:
    """Fail if a mapping has a key twice, of which PyYAML would drop the first."""
    if isinstance(node, yaml.MappingNode):
        without_repeats([(key.value, value) for key, value in node.value])
    for child in node.value if isinstance(node, yaml.CollectionNode) else ():
        for part in child if isinstance(child, tuple) else (child,):
            keys_of(part)


@pytest.mark.parametrize("file", USED, ids=lambda file: file.name)
def test_a_table_has_no_key_twice(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        assert json.loads(text, object_pairs_hook=without_repeats)
    else:
        keys_of(yaml.compose(text))


def test_a_key_that_is_there_twice_is_found() -> None:
    with pytest.raises(AssertionError, match="twice"):
        keys_of(yaml.compose("a: {b: 1, c: 2, b: 3}"))
    with pytest.raises(AssertionError, match="twice"):
        json.loads('{"a": [{"b": 1, "b": 3}]}', object_pairs_hook=without_repeats)


def test_each_reason_for_a_verdict_has_its_meaning_and_next_step() -> None:
    assert VERDICTS.keys() == set(Ground)
    assert {ground for ground in Ground if "to_do" not in VERDICTS[ground]} == {Ground.READ}
    for words in VERDICTS.values():
        said = words["meaning"].format(kind="image", learned="who took part", inferred="", care="Protect them.")
        assert said.endswith(".")
        assert "{" not in said


def test_each_question_has_its_words() -> None:
    assert list(QUESTIONS) == list(get_args(QuestionName))
    assert HEADINGS.keys() == HEADLINE.keys()
    assert AXES.keys() <= HEADINGS.keys()
    assert {*HEADLINE.values()} <= MEASURES.keys()


def test_the_figures_of_tables_are_the_published_ones() -> None:
    assert len(OPERATIONS) == 50
    assert all(one.name in KINDS and one.level in range(LEVELS) and 0 <= one.probability < 1 for one in OPERATIONS)
    thresholds = {name: (metric.bound, metric.side) for name, metric in METRICS.items() if metric.threshold}
    assert thresholds == {
        "psnr": (15.0, "above"),
        "transformed_psnr": (15.0, "above"),
        "ssim": (0.5, "above"),
        "lpips": (0.05, "below"),
        "mse": (0.05, "below"),
        "noise_ratio": (0.4, "below"),
        "token_f1": (0.5, "above"),
        "word_f1": (0.5, "above"),
    }
    assert not NOT_METRICS & METRICS.keys()


def test_all_scenarios_but_bare_gradients_leave_a_client() -> None:
    assert [name for name in SCENARIOS if not scenario_of(name).leaves] == ["evaluation", "gradient"]
