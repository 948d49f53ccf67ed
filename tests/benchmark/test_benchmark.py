"""A benchmark ranks by the worst attacker, comes to the same however often it is killed, and takes one's own entry."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fl_privacy.cli import studies
from fl_privacy.cli.main import run_command_line
from fl_privacy.measure import aggregate
from fl_privacy.report.benchmark_page import SCHEMA
from fl_privacy.runs.config.study import AttackCell
from fl_privacy.runs.folder import Attacker, LeakageResult, is_finished
from fl_privacy.runs.folder.study import StudyEntry, StudyRow, Threat
from fl_privacy.runs.study import Job
from tests.benchmark.tracks import OWN, write_defense, write_track
from tests.experiment.runs import run, stamps, wait_until
from tests.report.browser import Browser, find_chromium
from tests.report.test_in_browser import BROAD_PAPER, DESK, FAULTS, PHONE, RAW

MINE = "mostly_sent"


def figures(page: Path) -> Any:
    """Load the figures that do not depend on the clock."""
    found = json.loads(page.with_name("benchmark.json").read_text())
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(found)
    del found["clock"]
    return found


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[None]:
    """Jobs start no workers, which take seconds to start; those of a benchmark that is killed do."""

    def run_here(jobs: Sequence[Job], processes: int, *, on_done: Callable[[Job, str | None], None]) -> None:
        for job in jobs:
            on_done(job, studies._do(job))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(studies, "run_in_processes", run_here)
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("benchmark")


@pytest.fixture(scope="module")
def track(place: Path) -> str:
    return write_track(place)


@pytest.fixture(scope="module")
def page(track: str, place: Path) -> Path:
    done = run("benchmark", track, out=place / "runs")
    assert done.status == 0
    return done.path


@pytest.mark.long
def test_every_defense_is_trained_and_attacked_in_every_cell(page: Path) -> None:
    found = figures(page)
    assert found["jobs"] == {"planned": 3 * (1 + 3), "finished": 12}
    assert not list(page.parent.glob("*/report.html")), "page=false"
    undefended, weak, strong = found["settings"]
    assert undefended["accuracy_loss"] == 0 and [s["strength"] for s in (weak, strong)] == ["rate 0.5", "rate 0.99"]
    for setting in (undefended, weak, strong):
        assert {reading["cell"] for reading in setting["readings"]} == {c["title"] for c in found["track"]["cells"]}
        assert setting["incomplete"] is None
        attackers = {reading["attacker"] for reading in setting["readings"]}
        assert attackers == ({"plain"} if setting is undefended else {"plain", "adaptive"})
    assert len(found["code"]) == 1 and set(found["data"]) == {"mnist_mini"}
    assert found["track"]["left_out"] == {"ats": "for the test"}


@pytest.mark.long
def test_boards_rank_by_what_the_worst_attacker_read(page: Path) -> None:
    found = figures(page)
    by_name = {(s["defense"], s["strength"]): s for s in found["settings"]}
    assert [(b["threat"], b["accuracy_loss"]) for b in found["boards"]] == [
        (threat, loss) for threat in ("honest", "adaptive", "malicious") for loss in (5.0, 100.0)
    ]
    for board in found["boards"]:
        ranked = [by_name[place["defense"], place["strength"]] for place in board["ranked"]]
        worst = [s["worst"][board["threat"]] for s in ranked]
        leaks = [
            ((w["read"] + w["unjudged"]) / (w["images"] + w["unjudged"]), w["exact"], _number(w["mean_at_most"]))
            for w in worst
        ]
        assert leaks == sorted(leaks) and len(ranked) + len(board["beyond"]) == 2
        assert all(s["accuracy_loss"] <= board["accuracy_loss"] for s in ranked)
        for setting in ranked:
            means = [_number(r["metrics"]["psnr"]["mean"]) for r in setting["readings"] if "psnr" in r["metrics"]]
            assert _number(setting["worst"]["malicious"]["mean"]) == max(means)
    for setting in found["settings"]:
        worst = [_number(setting["worst"][threat]["mean"]) for threat in ("honest", "adaptive", "malicious")]
        assert worst == sorted(worst), "attackers that can do more read no less"


class Page(HTMLParser):
    """Tags that are open, and what stands outside of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text.append(data)


def test_the_page_is_whole_and_runs_its_own_script_alone(page: Path) -> None:
    read = Page()
    read.feed(page.read_text())
    assert not read.open
    text = " ".join(read.text)
    assert not re.search(r"\{\{|\}\}|\{%|\bnan\b|\bNone\b(?! of)|&lt;|<", text), text
    assert [tag for tag, _ in read.found].count("script") == 1
    policy = next(a["content"] for t, a in read.found if t == "meta" and a.get("http-equiv"))
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy and "http" not in policy
    rows = [a for t, a in read.found if t == "tr" and "data-threat" in a]
    assert len(rows) == 3 * 2 * 2 and sum("hidden" not in a for a in rows) == 2
    assert {a["data-threat"] for a in rows} == {"honest", "adaptive", "malicious"}
    columns = sum(t == "button" for t, _ in read.found)
    cells = [t for t, a in read.found if "data-sort" in a]
    assert len(cells) == columns * len(rows), "every cell of the board can be sorted by"


@pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium")
def test_the_board_sorts_filters_and_keeps_within_the_page(page: Path, tmp_path: Path) -> None:
    shown = "[...document.querySelectorAll('#board tbody tr')].filter(r => !r.hidden)"
    with Browser(tmp_path / "profile") as browser:
        for width, media in ((PHONE, ""), (DESK, ""), (BROAD_PAPER, "print")):
            browser.open(page, width=width, media=media)
            assert browser.evaluate(FAULTS) == [], (width, media)
        browser.open(page)
        assert not RAW.search(browser.evaluate("document.body.innerText"))
        column = "document.querySelector('#board thead').querySelectorAll('button')"
        values = f"{shown}.map(r => r.cells[2].dataset.sort).map(Number)"
        for descending in (False, True):
            browser.evaluate(f"{column}[2].click()")
            found = browser.evaluate(values)
            assert len(found) == 2 and found == sorted(found, reverse=descending)
        assert browser.evaluate(f"{column}[2].closest('th').getAttribute('aria-sort')") == "descending"
        browser.evaluate("document.querySelector('[name=threat][value=honest]').click()")
        assert browser.evaluate(f"{shown}.map(r => r.dataset.threat)") == ["honest"] * 2
        browser.evaluate(
            "{ const e = document.querySelector('[name=words]'); e.value = 'PRUN rate';"
            " e.dispatchEvent(new Event('input', {bubbles: true})); }"
        )
        assert browser.evaluate(f"{shown}.map(r => r.querySelector('th').innerText.split('\\n')[0])") == ["Pruning"]


@pytest.mark.fuzz
def test_killed_it_ends_with_the_same_table(track: str, page: Path, tmp_path: Path) -> None:
    """``make kill`` kills it twenty times."""
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "fl_privacy", "benchmark", track, f"out={out}", "--jobs", "2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(
                lambda: process.poll() is not None or len(list(out.glob("*/summary.json"))) >= 4,
                seconds=240,
            )
            assert process.poll() is None, "it ended by itself"
        finally:
            os.kill(process.pid, signal.SIGKILL)
    before = {path: at for path, at in stamps(out).items() if is_finished(path.parent)}
    done = run("benchmark", track, "--jobs", "2", out=out)
    assert done.status == 0 and figures(done.path) == figures(page)
    assert {path: at for path, at in stamps(out).items() if path in before} == before


@pytest.fixture
def copied(page: Path, tmp_path: Path) -> Path:
    """Copy the folder; attacks on a training's model name its folder, hence differ there."""
    return Path(shutil.copytree(page.parent, tmp_path / "runs"))


@pytest.mark.long
def test_an_entry_stands_beside_the_shipped_ones(track: str, copied: Path) -> None:
    before = stamps(copied)
    mine = write_defense(copied.parent)
    done = run("benchmark", track, "--entry", mine, "defense.share=1", out=copied)
    assert done.status == 0
    found = figures(done.path)
    entered = [s for s in found["settings"] if s["entered"]]
    assert [(s["defense"], s["strength"]) for s in entered] == [("mostly_sent", "")]
    assert len(found["settings"]) == 4 and not any(s["incomplete"] for s in entered)
    assert {path: at for path, at in stamps(copied).items() if path in before} == before
    assert any(place["defense"] == MINE for place in found["boards"][-1]["ranked"])
    assert MINE in done.path.read_text() and ">entered<" in done.path.read_text()
    write_defense(copied.parent, OWN.replace("share * tensor", "-share * tensor"))
    assert run("benchmark", track, "--entry", mine, "defense.share=1", "--only-report", out=copied).status == 0
    (entered,) = [s for s in figures(copied / "benchmark.html")["settings"] if s["entered"]]
    assert entered["incomplete"], "other code is another run"


@pytest.mark.long
def test_what_was_not_measured_ranks_last_and_says_why(track: str, copied: Path) -> None:
    failing = OWN.replace("return {name", "raise ValueError('in vain')\n        return {name").replace(
        "mostly", "never"
    )
    path = write_defense(copied.parent, failing, "never_works.py")
    assert run("benchmark", track, "--entry", path, out=copied).status == 2
    found = figures(copied / "benchmark.html")
    (entered,) = [s for s in found["settings"] if s["entered"]]
    assert entered["incomplete"].startswith("training; one image, untrained; ") and "in vain" in entered["incomplete"]
    assert entered["worst"]["malicious"] is None
    assert all(place["defense"] != "never_sent" for board in found["boards"] for place in board["ranked"])
    assert all("never_sent" in {place["defense"] for place in board["beyond"]} for board in found["boards"])
    assert "settings are incomplete" in (copied / "benchmark.html").read_text()


def test_an_image_that_no_attack_read_makes_its_cell_unknown() -> None:
    """The images that are left may be those that leak least."""
    cell, read = AttackCell(uploads="one image", state="untrained"), aggregate([9.0, 10.0])
    assert read is not None
    entry = StudyEntry(family="x", overrides=("defense=ats",), trainings={}, attacks={cell: Path("a")})

    def missing(*failures: int, threat: Threat = "honest") -> list[AttackCell]:
        readings = tuple(
            LeakageResult(attacker=attacker, metrics={"psnr": read}, images=3, failures=failed)
            for attacker, failed in zip(Attacker, failures, strict=False)
        )
        return StudyRow(entry=entry, trainings={}, undefended={}, readings={cell: readings}).missing(threat)

    assert not missing(0)
    assert missing(1) == missing(1, 1) == [cell]
    assert not missing(1, 0), "the other attacker read all"
    assert missing(0, threat="adaptive") == [cell] and not missing(0, 0, threat="adaptive")


def test_a_page_of_half_of_the_jobs_says_which_half(track: str, copied: Path) -> None:
    assert run("benchmark", track, "--only-report", out=copied).status == 0
    page = copied / "benchmark.html"
    text = page.read_text()
    assert "Not finished: 6 of 12 jobs are done" in text and "<h1>No defense was measured to the end" in text
    assert "settings are incomplete" in text and "not run" in text and 'class="tag bounded"' not in text
    assert not (copied / "measured.json").exists(), "of the whole, which was in this folder"


def test_a_damaged_list_of_problems_is_one_line(track: str, copied: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (copied / "problems.json").write_text("[3]")
    assert run_command_line(["benchmark", track, f"out={copied}", "--only-report"]) == 2
    assert "is expected to name a reason for each job" in " ".join(capfd.readouterr().err.split())


def test_advise_reads_its_folder(page: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for threat in ("honest", "adaptive", "malicious"):
        asked = ["advise", "--table", str(page.parent), "accuracy_loss=100", f"threat={threat}", "psnr_below=90"]
        assert run_command_line(asked) == 0
        said = capfd.readouterr().out
        assert "Measured on data=mnist_mini model=lenet_dlg" in said and "2 defenses" in said
    assert run_command_line(["advise", "--table", str(page.parent / "none.json")]) == 2
    assert "fl-privacy benchmark" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["smoke", "--jobs", "0"], "--jobs is expected to be a whole number of at least 1"),
        (["smoke", "defense.rate=0.5"], "defense.rate=0.5 is expected with --entry"),
        (["smoke", "victims=2"], "fixes victims"),
        (["nothing"], "A track is expected"),
        (["smoke", "--entry", "nowhere.py"], "there is no"),
        (["smoke", "--entry", "json.dumps.more"], "can't be imported"),
        (["smoke", "--entry", "nodots"], "--entry is expected to be a file"),
    ],
)
def test_what_does_not_fit_is_one_line(arguments: list[str], line: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["benchmark", *arguments]) == 2
    said = [text for text in capfd.readouterr().err.splitlines() if text.strip()]
    assert len(said) == 1 and line in said[0]


def _number(value: float | str) -> float:
    return float(value)
