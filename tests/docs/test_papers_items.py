"""Each item of the papers names a place that is there, its status follows from facts, each command composes."""

import datetime
import importlib
import os
import random
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


def test_nothing_stands_twice_and_no_table_speaks_for_two_items(docs: Any) -> None:
    every = docs("paper_items").load_items()
    for name, (_, items) in every.items():
        names = [item.item for item in items]
        assert len(set(names)) == len(names), name
        for item in items:
            assert item.was in (None, "unlike", "missing")
            assert all(why is None or len(why) > 10 for why in (item.why, item.open, item.fails)), item.item
            assert not item.fails or item.test, item.item
    tables = [place for _, items in every.values() for item in items if not item.why for place in item.places]
    tables = [place for place in tables if place.startswith("table:")]
    assert sorted(set(tables)) == sorted(tables)


def test_no_reason_holds_a_figure_that_no_row_gives(docs: Any) -> None:
    reasons = [item.why or item.open or "" for _, items in docs("paper_items").load_items().values() for item in items]
    measured = re.compile(r"\d ?(dB|%|s\b)|\b(dozen|hundred|thousand|million)s? times|\d times")
    assert [reason for reason in reasons if measured.search(reason)] == []


def test_every_judged_table_says_how_ours_differs(docs: Any) -> None:
    kept = docs("kept_rows").Kept()
    judged = [(p.name, t) for p in docs("paper_tables").load_papers() if p.name in PAPERS for t in p.tables]
    silent = [(paper, t.name) for paper, t in judged if (found := t.judged(kept)) and found.measured and not t.ours]
    assert silent == []


def test_ten_drawn_items_have_the_status_that_their_facts_give(docs: Any) -> None:
    """Other items are drawn every day; FL_PRIVACY_ITEMS_SEED draws those of another one."""
    paper_items, settings, kept = docs("paper_items"), docs("paper_settings"), docs("kept_rows").Kept()
    drawn = random.Random(os.environ.get("FL_PRIVACY_ITEMS_SEED") or datetime.date.today().isoformat())
    every = [(name, item) for name, (_, items) in paper_items.load_items().items() for item in items]
    tables = {f"table:{p.name}/{t.name}": t for p in docs("paper_tables").load_papers() for t in p.tables}
    for paper, item in drawn.sample(every, 10):
        status = str(paper_items.derive(paper, item, kept).status)
        if item.why:
            assert status == "not here", item
        elif item.open:
            assert status == "not run", item
        elif (item.place or "").startswith("table:"):
            verdicts = [tables[place].judged(kept) for place in item.places]
            whole = all(v and v.outcome == "reproduced" and v.measured == v.total for v in verdicts)
            differing = any(tables[p].differences(kept) or not tables[p].compared(kept) for p in item.places)
            assert (status == "as published") == (whole and not differing), item
            assert (status == "reproduced, in other settings") == (whole and differing), item
            assert (status == "not reproduced") == any(v and v.outcome == "not reproduced" for v in verdicts), item
        elif item.test:
            assert paper_items.body_of_test(item.test, ROOT), item
            if item.place:
                module, _, attribute = item.place.partition(":")
                assert hasattr(importlib.import_module(module), attribute), item
                assert re.search(rf"\b{attribute}\b", (ROOT / item.test.partition("::")[0]).read_text()), item
            assert status == ("not reproduced" if item.fails else "by option" if item.named else "as published"), item
        elif "=" in item.place:
            assert settings.resolve(paper, item.place) == settings.resolved_settings()[paper][item.place], (
                "run `make results`"
            )
            published, differing = settings.of_place(paper, item.place)
            preset = all((ROOT / "conf" / f"{token.replace('=', '/')}.yaml").is_file() for token in item.place.split())
            equal = preset and bool(published) and not differing
            assert (status == "as published") == (equal and not settings.unnamed_numbers(item.claim, published)), item
        else:
            text = " ".join((ROOT / item.place[5:]).read_text().split()) if item.values else ""
            assert (status == "as published") == (bool(item.values) and all(v in text for v in item.values)), item


@pytest.mark.long
def test_settings_are_kept_as_they_compose(docs: Any) -> None:
    settings = docs("paper_settings")
    for paper, places in settings.resolved_settings().items():
        for place, kept in places.items():
            assert settings.resolve(paper, place) == kept, "run `make results`"
    for paper, (_, items) in docs("paper_items").load_items().items():
        assert {p for item in items for p in item.places if "=" in p} == set(settings.resolved_settings()[paper])


def test_a_setting_that_is_not_the_papers_takes_the_item_from_it_and_is_said(
    docs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    items, settings = docs("paper_items"), docs("paper_settings")
    item = items.Item(item="some", place="defense=refiner_paper")
    assert items.derive("refiner", item, {}).status == "as published"
    rules = [
        {"at": "", "when": {"defense": ["refiner_paper"]}, "paper": {"defense.beta": [2, 3], "defense.alpha": None}}
    ]
    monkeypatch.setattr(settings, "load_rules", lambda: {"refiner": rules})
    told = items.derive("refiner", item, {})
    assert told.status == "by option"
    assert told.facts == ["ours: `defense.beta` 1.0 (published: 2 or 3), `defense.alpha` 0.5 (published: none)"]
    rules[0]["when"] = {"defense": "another"}
    assert items.derive("refiner", item, {}).facts == ["no setting is compared"]


def test_a_number_that_an_item_names_has_to_be_compared(docs: Any) -> None:
    items, settings = docs("paper_items"), docs("paper_settings")
    named, unnamed = (items.Item(item=f"5.2: beta 1, iota {n}", place="defense=refiner_paper") for n in (10, 12))
    assert items.derive("refiner", named, {}).status == "as published"
    told = items.derive("refiner", unnamed, {})
    assert (told.status, told.facts) == ("by option", ["not compared: 12"])
    assert settings.unnamed_numbers("8,000 rounds, U(-0.3, 0.3), ResNet-18 and VGG16", {"a": [8000], "b": "0.3"}) == []


def test_what_a_paper_sets_without_a_value_is_not_taken_for_one_of_ours(docs: Any) -> None:
    settings = docs("paper_settings")
    (missing,) = settings.differences({"a": "some", "b": "some"}, {"a": 0.1}.get)
    assert missing.told == "`b` unset (published: some)"


def test_every_statement_names_a_test_that_is_there(docs: Any) -> None:
    items = docs("paper_items")
    every = [item for _, told in items.load_items().values() for item in told]
    assert [item.item for item in every if item.test and not items.body_of_test(item.test, ROOT)] == []


def test_an_item_without_a_place_or_a_reason_is_refused(docs: Any, tmp_path: Path) -> None:
    file = tmp_path / "items.yaml"
    for wrong in ({"item": "a"}, {"item": "a", "place": "b", "status": "equal"}):
        file.write_text(yaml.safe_dump({"some": {"title": "S", "items": [wrong]}}))
        with pytest.raises(ValueError, match="a place or a reason"):
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


def test_no_tolerance_is_more_than_half_of_what_a_column_shows(docs: Any) -> None:
    verdicts, tables = docs("verdicts"), docs("paper_tables")
    for table in (t for paper in tables.load_papers() if paper.name in PAPERS for t in paper.tables if t.verdict):
        for name in table.judged_columns:
            figures = [f for line in table.lines if (f := table.published(line, name)) is not None]
            lines = [verdicts.Line(name=str(n), published=f, ours=None) for n, f in enumerate(figures)]
            rule = verdicts.Column(lines=lines, rule=verdicts.rule_of(table.verdict, name)).tolerance
            effect = (max(figures) - min(figures) or abs(max(figures))) if figures else 0
            if figures and rule.within is not None:
                assert rule.within <= effect / 2 + 1e-12, (table.name, name)
            if rule.factor is not None and len(set(figures)) > 1:
                assert rule.factor**2 <= max(figures) / min(figures) + 1e-9, (table.name, name)


def test_a_figure_that_misses_half_of_the_effect_does_not_agree(docs: Any) -> None:
    verdicts, rows = docs("verdicts"), docs("kept_rows")
    ours = [rows.Measured(mean=13.2), rows.Measured(mean=13.1)]
    lines = [verdicts.Line(name=str(p), published=p, ours=o) for p, o in zip((13.2, 13.4), ours, strict=True)]
    found = verdicts.judge([verdicts.Column(lines=lines, rule=verdicts.Rule(within=2.0))], "PSNR")
    assert found.outcome == "not reproduced"
    assert "1 of 2 measured figures (PSNR) are within 0.1 " in found.reason


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """List every call that the commands of the papers make, as a shell expands them."""
    return expanded_calls(tmp_path_factory.mktemp("shell"))


def test_there_are_commands(calls: list[list[str]]) -> None:
    assert len(calls) > 100 and {call[0] for call in calls} >= {"fl-privacy", "python"}


@pytest.mark.long
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.fuzz)])
def test_settings_of_commands_compose(calls: list[list[str]], every: int) -> None:
    """Of each fourth command; ``make fuzz`` starts all of them, too."""
    for name, *words in calls[::every]:
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
