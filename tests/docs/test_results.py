"""The page of results and the findings are what kept rows give, and no figure in them is written by hand."""

import importlib
import json
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fl_privacy.runs.config import compose_run
from tests.docs.published_commands import published

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "experiments" / "rows"
PUBLISHED = ROOT / "docs" / "published"


@pytest.fixture
def docs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a module of ``docs/``."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module


@pytest.fixture
def results(docs: Any) -> ModuleType:
    return docs("results")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Copy the kept rows."""
    return Path(shutil.copytree(ROWS, tmp_path / "rows"))


@cache
def given_pages(results: ModuleType) -> dict[Path, str]:
    """Of the kept rows, made once."""
    return results.pages()


def section(page: str, head: str) -> str:
    """Of the page, up to the next."""
    return page.split(f"### {head}", 1)[1].split("\n### ", 1)[0]


def test_the_committed_pages_are_what_the_rows_give(results: ModuleType) -> None:
    for path, content in given_pages(results).items():
        assert path.read_text() == content, "run `make results`"


@pytest.mark.long
def test_without_its_rows_a_table_is_not_run(results: ModuleType, rows: Path) -> None:
    head = "Table 7: PSNR over alpha"
    whole = given_pages(results)[results.PAGES["RESULTS.md"]]
    assert "**Ordering reproduced.**" in section(whole, head)
    shutil.rmtree(rows / "refiner_rows")
    pages = results.pages(rows)
    page, findings = (pages[results.PAGES[name]] for name in ("RESULTS.md", "findings.md"))
    lines = [line for line in section(page, head).splitlines() if line.startswith("| 0.5")]
    assert lines == ["| 0.5 | 13.2 | not run |", "| 0.5, the defense as printed | | not run |"]
    assert "**Not run.**" in section(page, head)
    assert "Commands as for *PSNR over beta, the weight of privacy*." in section(page, head)
    assert "fl-privacy trade-off" in section(page, "Table 5: PSNR over beta")
    assert "knows_the_defense.png" in (ROOT / "docs" / "findings.md").read_text()
    assert "knows_the_defense.png" not in findings and "A stronger attacker matters" not in findings
    assert "*Not run:* `fl-privacy train-evaluator" in findings


@pytest.mark.long
def test_another_number_in_a_row_is_another_number_on_the_page(results: ModuleType, rows: Path) -> None:
    path = rows / "refiner_rows" / "rows.jsonl"
    told = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [row for row in told if row["settings"].get("defense.alpha") == 0.9 and row["attack"] != "none"]
    assert len(changed) == 1
    changed[0]["psnr"] |= {"mean": 3.25, "ci95": [3.125, 3.375], "n": 77}
    path.write_text("".join(json.dumps(row) + "\n" for row in told))
    page = results.pages(rows)[results.PAGES["RESULTS.md"]]
    assert "| 0.9 | 10.52 | 3.2 [3.1, 3.4] | 77 |" in section(page, "Table 7: PSNR over alpha")


def test_prose_holds_no_figure() -> None:
    """What is said of ours is said with slots that rows fill; settings stand in code."""
    prose = [
        why for paper in published().values() for table in paper["tables"] for why in table.get("why", {}).values()
    ]
    prose.append((PUBLISHED / "findings.md").read_text())
    for text in prose:
        plain = re.sub(r"\{\{.*?\}\}|```.*?```|`[^`]*`|\]\([^)]*\)|\((?:19|20)\d\d\)", "", text, flags=re.DOTALL)
        plain = re.sub(r"\b(?:Tables?|Figures?|Theorem|Lemma) [\dIVX.]+(?: (?:and|to) [\dIVX.]+)?", "", plain)
        assert re.findall(r"(?<![A-Za-z])\d\S*", plain.replace("95 %", "")) == [], text


def test_rows_are_small_and_name_no_place() -> None:
    paths = list(ROWS.rglob("*"))
    assert sum(path.stat().st_size for path in paths if path.is_file()) < 20 << 20
    assert {path.name for path in paths if path.is_file()} == {"rows.jsonl"}
    for path in ROWS.rglob("rows.jsonl"):
        for line in path.read_text().splitlines():
            assert not re.search(r'"/[a-z]', line), path
            json.loads(line)


CASES: Sequence[tuple[Mapping[str, Any], Sequence[tuple[float | None, float | None]], str]] = [
    ({"within": 1}, [(10, 10.5), (20, 19.5)], "reproduced"),
    ({"within": 1}, [(10, 12), (20, 19.5)], "ordering reproduced"),
    ({"within": 1}, [(10, 19), (20, 12)], "not reproduced"),
    ({"within": 1}, [(10, None), (20, None)], "not run"),
    ({"within": 1}, [(10, 10.2), (20, None)], "reproduced, 1 of 2 measured"),
    ({"within": 1}, [(10, 12), (20, 19.5), (30, None)], "ordering reproduced, 2 of 3 measured"),
    ({"within": 1}, [(10, 12), (None, None), (20, None)], "not reproduced, 1 of 2 measured"),
    ({"within": 100}, [(10, 19), (20, 12)], "not reproduced"),
    ({"within": 1, "apart": 50}, [(10, 13), (20, 19)], "not reproduced"),
    ({"factor": 10}, [(1e-4, 5e-4), (1e-1, 2e-1)], "reproduced"),
    ({"factor": 2}, [(1e-4, 5e-4), (1e-1, 2e-1)], "ordering reproduced"),
    ({"side": 0.05}, [(0.01, 0.04), (0.3, 0.06)], "ordering reproduced"),
    ({"side": 0.05}, [(0.0045, 2.7e-7)], "ordering reproduced"),
    ({"side": 0.05}, [(0.03, 0.01), (0.097, 0.03)], "not reproduced"),
    ({"within": 2, "apart": 1}, [(13.2, 14.1), (13.4, 14.1)], "not reproduced"),
    ({"within": 0.2}, [(0.3, 0.13)], "not reproduced"),
    ({"factor": 10}, [(1.0, 5), (4.0, 4)], "not reproduced"),
    ({"least": True}, [(70, 130)], "reproduced"),
    ({"least": True}, [(70, 69)], "not reproduced"),
    ({"above": [["1", "0"]]}, [(None, 1), (None, 2)], "ordering reproduced"),
    ({"above": [["0", "1"]]}, [(None, 1), (None, 2)], "not reproduced"),
    ({"above": [["0", "1"]]}, [(None, 1), (None, None)], "not run"),
    ({"within": 1, "alike": [["0", "1"]]}, [(None, 1), (None, 2)], "reproduced"),
    ({"within": 1, "alike": [["0", "1"]]}, [(None, 1), (None, 2.5)], "not reproduced"),
    ({"within": 1, "alike": [["0", "1"]]}, [(None, 1), (None, None)], "not run"),
    ({"above": [["1", "0"], ["2", "0"]]}, [(None, 1), (None, 2), (None, None)], "ordering reproduced, 2 of 3 measured"),
]


@pytest.mark.parametrize(("rule", "figures", "outcome"), CASES)
def test_verdicts(
    docs: Any, rule: Mapping[str, Any], figures: Sequence[tuple[float | None, float | None]], outcome: str
) -> None:
    verdicts, measured = docs("verdicts"), docs("kept_rows").Measured
    lines = [
        verdicts.Line(name=str(n), published=theirs, ours=None if ours is None else measured(mean=ours))
        for n, (theirs, ours) in enumerate(figures)
    ]
    assert verdicts.judge([verdicts.Column(lines=lines, rule=verdicts.rule_of(rule, ""))], "").told == outcome


@pytest.mark.long
def test_what_was_measured_in_part_counts_apart(results: ModuleType, rows: Path) -> None:
    def counts(pages: Mapping[Path, str]) -> tuple[Mapping[str, int], str]:
        page = pages[results.PAGES["RESULTS.md"]]
        heads = next(line for line in page.splitlines() if line.startswith("| tables and figures"))
        last = next(line for line in page.splitlines() if line.startswith("| **all**"))
        names, numbers = ([cell.strip() for cell in line.split("|")[2:-1]] for line in (heads, last))
        return dict(zip(names, map(int, numbers), strict=True)), section(page, "SPEAR (Dimitrov et al. 2024)")

    whole, told = counts(given_pages(results))
    assert told.count("**Reproduced.**") == 1
    path = rows / "exact_batches" / "rows.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["batch"] != 20))
    part, told = counts(results.pages(rows))
    assert "**Reproduced, 1 of 2 measured.**" in told
    assert part["reproduced"] == whole["reproduced"] - 1
    assert part["reproduced, in part measured"] == whole["reproduced, in part measured"] + 1
    assert sum(part.values()) == sum(whole.values())


def test_overlapping_intervals_decide_nothing(docs: Any) -> None:
    verdicts, measured = docs("verdicts"), docs("kept_rows").Measured
    lines = [
        verdicts.Line(name="a", published=1.0, ours=measured(mean=5, low=1, high=9)),
        verdicts.Line(name="b", published=3.0, ours=measured(mean=6, low=2, high=10)),
    ]
    verdict = verdicts.judge([verdicts.Column(lines=lines, rule=verdicts.Rule(within=0.1))], "figure")
    assert verdict.outcome == "not reproduced" and "1 within our intervals" in verdict.reason


def test_an_interval_that_holds_the_other_figure_decides_nothing(docs: Any) -> None:
    verdicts, measured = docs("verdicts"), docs("kept_rows").Measured
    lines = [
        verdicts.Line(name="a", published=1.0, ours=measured(mean=5)),
        verdicts.Line(name="b", published=3.0, ours=measured(mean=6, low=2, high=10)),
    ]
    assert (
        verdicts.judge([verdicts.Column(lines=lines, rule=verdicts.Rule(within=0.1))], "").outcome == "not reproduced"
    )


def test_a_line_chooses_one_row(docs: Any) -> None:
    kept = docs("kept_rows")
    rows = [{"a": 1, "settings": {"b.c": 2}}, {"a": 1, "settings": {"b.c": 3}}]
    assert kept.choose(rows, {"a": 1, "b.c": 3}) == rows[1]
    assert kept.choose(rows, {"a": "any", "b.c": 2}) == rows[0]
    assert kept.choose(rows, {"a": 2}) is None
    with pytest.raises(ValueError, match="expected to choose one row, but chooses 2"):
        kept.choose(rows, {"a": 1})


def test_tables_with_heads_fit_their_rows(docs: Any) -> None:
    kept = docs("kept_rows")
    for name, stated in kept.yaml.safe_load(kept.TABLES.read_text()).items():
        lines = [line.strip("| ").split(" | ") for line in kept.rows_table(name).replace("| |", "|  |").splitlines()]
        assert lines[0] == list(stated["columns"]) and len(lines) == 2 + len(kept.read_rows(name))
        fields = re.findall(r"{(.+?)[:}]", " ".join(stated["columns"].values()))
        held = {field for field in fields if any(kept.value_of(row, field) is not None for row in kept.read_rows(name))}
        assert held == set(fields), name
    assert "| 86% of 132 |" in kept.rows_table("graph_apps")


def test_a_share_has_an_interval(docs: Any) -> None:
    found = docs("kept_rows").measured({"read": 1.0, "images": 4}, "read", share="images")
    assert found.mean == 1 and found.low == pytest.approx(0.40, abs=0.01) and found.high == 1 and found.n == 4


def test_audits_of_the_same_settings_are_summed_up(docs: Any, tmp_path: Path) -> None:
    (tmp_path / "audits").mkdir()
    settings = {"network": "net", "percentile": 10, "gamma": 0.01, "budget": "quick", "of": 2, "first_line": "Read 1"}
    rows = [{**settings, "first": k, "reconstructed": k, "control": 0} for k in (0, 1, 2)]
    rows[1] |= {"begin": 0, "convolutions": 120}
    (tmp_path / "audits" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    last = docs("kept_rows").audits_table("audits", tmp_path).splitlines()[-1]  # Clopper and Pearson
    assert (
        last == "| net | 10 | 0.01 | quick | 3 of 6 | 12 to 88 % | 0 of 6 | 0 of 120 | Read 1 |"
    )  # Clopper and Pearson
    assert docs("kept_rows").audits_table("none", tmp_path) == "Not run."


def test_the_table_of_attacks_says_what_its_rows_are(docs: Any, tmp_path: Path) -> None:
    cell = {"model": "MLP", "trained": False, "batch": 2, "victims": 7, "data": "digits", "recognizable_above": 19.5}
    read = {"psnr": 20.0, "recognizable": 0.5, "proven": 0.25, "seconds": 0.25}
    rows = [
        {**cell, **read, "attack": "exact", "failures": 3, "seconds": 9},
        {**cell, **read, "attack": "auto", "failures": 0},
        {**cell, **read, "attack": "analytic", "failures": 7},
    ]
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    told = docs("kept_rows").attacks_table("some", tmp_path)
    assert "`data=digits`" in told and "19.5 dB" in told
    assert "| | uploads | seconds | proven | `auto` | `exact` | `analytic` |" in told
    assert "| 7 | 0.2 | 25% | 20.0, 50% | 20.0, 50% (4 of 7) | does not apply |" in told


def test_commands_are_there_and_make_the_rows_that_are_shown() -> None:
    for name, paper in published().items():
        for table in paper["tables"]:
            commands = " ".join(table["command"])
            for script in re.findall(r"python (\S+\.py)", commands):
                assert (ROOT / script).is_file(), script
            for grid in re.findall(r"trade-off (\S+)", commands):
                assert (ROOT / grid).is_file() or (ROOT / "fl_privacy" / "grids" / f"{grid}.yaml").is_file(), grid
            assert f"experiments/rows/{table['rows']}" in commands, (name, table["name"])


def overrides_of(command: str) -> list[str]:
    """List the overrides of an ``fl-privacy run`` or ``attack`` command, with the first of several choices."""
    given = (word for word in shlex.split(command)[2:] if "=" in word)
    return [word if "[" in word else word.split(",")[0] for word in given]


def test_where_refiner_and_fdl_pp_are_measured_on_other_inputs_than_pixels_the_page_says_so() -> None:
    """Both papers feed pixels in [0, 1]."""
    compared = 0
    for name in ("1_refiner.yaml", "3_fdl_pp.yaml"):
        for table in published()[name]["tables"]:
            for command in table["command"]:
                if re.match(r"fl-privacy (run|attack) ", command):
                    model = compose_run(overrides_of(command)).model
                    raw = model["mean"] is None and model["std"] is None
                    assert raw or "inputs in [-2, 2]" in table.get("ours", ""), command
                    compared += 1
    assert compared >= 6


def test_the_page_says_how_batch_norm_ran_in_the_attacked_uploads(results: ModuleType) -> None:
    page = given_pages(results)[results.PAGES["RESULTS.md"]]
    assert "batch norm the attacked uploads ran it in evaluation mode" in " ".join(page.split())
    attacked = 0
    for path in ROWS.rglob("rows.jsonl"):
        for row in map(json.loads, path.read_text().splitlines()):
            told = row.get("settings")  # seconds, where commands are timed by their phases
            settings = told if isinstance(told, dict) else {}
            normed = settings.get("model.norm") == "batch" or row.get("model") == "mobilenet_v2"
            if normed and "psnr" in row:
                assert settings["intercept.uploads"] == "probe", path
                assert settings["federation.plan.probe_batch_norm"] == "eval", path
                attacked += 1
    assert attacked


def benchmark_in(folder: Path, *, finished: int) -> Path:
    """Write a folder with the page and the figures of a benchmark."""

    def setting(name: str, incomplete: str | None) -> dict[str, Any]:
        worst = {
            "metric": "psnr",
            "mean": 9.0,
            "mean_at_most": 11.25,
            "read": 1,
            "images": 8,
            "read_at_most": 0.5,
            "failures": 0,
            "by": "auto",
        }
        told = {"defense": name, "strength": "rate 1", "overrides": [f"defense={name}"], "incomplete": incomplete}
        return {**told, "accuracy_loss": 2.5, "worst": {"malicious": worst}}

    places = [{"defense": name, "strength": "rate 1"} for name in ("pruning", "ats")]
    figures = {
        "track": {"name": "laptop", "version": 7, "sha256": "0"},
        "jobs": {"planned": 9, "finished": finished},
        "settings": [setting("pruning", None), setting("ats", "one image, trained")],
        "boards": [{"threat": "malicious", "accuracy_loss": 5.0, "ranked": places, "beyond": [{"defense": "dm"}]}],
    }
    folder.mkdir()
    (folder / "benchmark.html").write_text("<html>")
    (folder / "benchmark.json").write_text(json.dumps(figures))
    return folder


def test_the_page_of_a_benchmark_is_kept_with_its_board(docs: Any, tmp_path: Path) -> None:
    leaderboard, kept = docs("leaderboard"), tmp_path / "kept"
    assert leaderboard.leaderboard("laptop", kept).startswith("Withdrawn until it is measured again")
    assert leaderboard.keep(benchmark_in(tmp_path / "run", finished=5), kept).read_text() == "<html>"
    told = leaderboard.leaderboard("laptop", kept)
    assert "5 of 9 jobs are done; what is not" in told and "(benchmarks/laptop.html)" in told
    assert "| 1 | pruning (rate 1) | 1 of 8 | 11.2 | auto | 2.5 |" in told
    assert "| | ats (rate 1), in part not run | 1 of 8 | 11.2" in told and "not measured: dm" in told
    with pytest.raises(SystemExit, match="--only-report"):
        leaderboard.keep(tmp_path, kept)


def test_kept_boards_get_the_style_sheet_of_today_and_keep_their_figures(docs: Any, tmp_path: Path) -> None:
    leaderboard, body = docs("leaderboard"), "</head><body><style>5 of 9</style></body>"
    (tmp_path / "laptop.html").write_text(f"<head><style>\nh1 {{ color: red }}\n</style>{body}")
    for _ in range(2):
        [page] = leaderboard.restyle(tmp_path)
        assert page.read_text() == f"<head><style>\n{leaderboard.STYLE.read_text()}\n\n</style>{body}"


def test_a_board_of_rows_speaks_of_cells_and_of_the_attackers_it_had(docs: Any, tmp_path: Path) -> None:
    leaderboard, kept, folder = docs("leaderboard"), tmp_path / "kept", tmp_path / "run"
    benchmark_in(folder, finished=9)
    told = (folder / "benchmark.json").read_text()
    for old, new in (("malicious", "adaptive"), ("psnr", "cells_right"), ("laptop", "table"), ("11.25", "0.625")):
        told = told.replace(old, new)
    (folder / "benchmark.json").write_text(told)
    leaderboard.keep(folder, kept)
    told = leaderboard.leaderboard("table", kept)
    assert "| rows reconstructed | cells right at most |" in told
    assert "| 1 | pruning (rate 1) | 1 of 8 | 62% | auto | 2.5 |" in told
    assert "alicious" not in told and "Attackers that know the defense count too" in told
