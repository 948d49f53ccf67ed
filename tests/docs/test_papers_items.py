"""Each item of the papers names a place that is there, each command composes, nothing is without a reason."""

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_privacy.runs.config import compose_file, compose_run, expand_sweep
from fl_privacy.runs.config.study import load_grid
from tests.docs.published_commands import PAPERS, ROOT, expanded_calls


@pytest.fixture
def docs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a module of ``docs/``."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module


@cache
def composes(overrides: str) -> bool:
    return bool(compose_run(overrides.split()))


def found(place: str, tables: set[str]) -> bool:
    """Say whether ``place`` exists; settings raise where they do not compose."""
    kind, _, name = place.partition(":")
    match kind:
        case "file":
            return (ROOT / name).is_file()
        case "rows":
            return (ROOT / "experiments" / "rows" / name / "rows.jsonl").is_file()
        case "table":
            return name in tables
        case _ if place.startswith(("fl_privacy.", "experiments.")):
            return not name or hasattr(importlib.import_module(kind), name)
        case _:
            return composes(place)


@pytest.mark.long
def test_each_item_names_a_place_that_is_there(docs: Any) -> None:
    items, tables = docs("paper_items").load_items(), docs("paper_tables").load_papers()
    known = {f"{paper.name}/{table.name}" for paper in tables for table in paper.tables}
    assert list(items) == list(PAPERS)
    lost = [(item.item, p) for _, told in items.values() for item in told for p in item.places if not found(p, known)]
    assert lost == []


def test_what_is_not_here_has_a_reason_and_nothing_stands_twice(docs: Any) -> None:
    for name, (_, items) in docs("paper_items").load_items().items():
        names = [item.item for item in items]
        assert len(set(names)) == len(names), name
        for item in items:
            assert item.was in (None, "unlike", "missing")
            assert item.status != "not" or len(item.why) > 10, item.item


def test_an_item_with_two_answers_is_refused(docs: Any, tmp_path: Path) -> None:
    file = tmp_path / "items.yaml"
    file.write_text(yaml.safe_dump({"some": {"title": "S", "items": [{"item": "a", "equal": "x", "not": "y"}]}}))
    with pytest.raises(ValueError, match="one of equal, option and not"):
        docs("paper_items").load_items(file)


def test_no_table_of_a_paper_is_without_a_reason(docs: Any) -> None:
    kept = docs("kept_rows").Kept()
    for paper in docs("paper_tables").load_papers():
        for table in paper.tables:
            verdict = table.judged(kept)
            if paper.name in PAPERS and verdict and verdict.outcome in ("not run", "not reproduced"):
                assert table.why.get(verdict.outcome) or verdict.reason, (paper.name, table.name)
                said = verdict.outcome == "not run" or table.settled in docs("paper_tables").SETTLED
                assert said, (paper.name, table.name)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """List every call that the commands of the papers make, as a shell expands them."""
    return expanded_calls(tmp_path_factory.mktemp("shell"))


def test_there_are_commands(calls: list[list[str]]) -> None:
    assert len(calls) > 100 and {call[0] for call in calls} >= {"fl-privacy", "python"}


@pytest.mark.long
def test_settings_of_every_command_compose(calls: list[list[str]]) -> None:
    for name, *words in calls:
        if name != "fl-privacy":
            continue
        command, given = words[0], [word for word in words[1:] if "=" in word]
        match command:
            case "run" | "attack":
                assert composes(" ".join(expand_sweep(given)[0])), words
            case "trade-off":
                grid = words[1] if (ROOT / "fl_privacy" / "grids" / f"{words[1]}.yaml").is_file() else ROOT / words[1]
                assert load_grid(str(grid), given).points, words
            case "train-evaluator" | "train-generator" | "search-policies":
                base = {"train-evaluator": "evaluator", "train-generator": "generator"}.get(command, "policy_search")
                assert compose_file(base, given) is not None, words
            case _:
                raise AssertionError(f"{command} is no command that results come from")


def test_scripts_know_the_options_that_they_are_given(calls: list[list[str]]) -> None:
    for name, *words in calls:
        if name == "python":
            script = ROOT / words[0]
            helpers = re.findall(r"^(?:from|import) (\w+)", script.read_text(), re.MULTILINE)
            files = [script, *(script.with_name(f"{module}.py") for module in helpers)]
            text = "".join(file.read_text() for file in files if file.is_file())
            unknown = [w for w in words[1:] if re.match(r"--\w", w) and f'"{w.split("=")[0]}"' not in text]
            assert unknown == [], words
