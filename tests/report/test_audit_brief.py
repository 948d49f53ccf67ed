"""The brief of an app's audit, and ``verify``, which recomputes it."""

import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fl_privacy.cli.main import run_command_line
from fl_privacy.errors import UserError
from fl_privacy.files.foreign import files_digest
from fl_privacy.measure.answer import Answer, Scenario
from fl_privacy.measure.counts import Counts
from fl_privacy.measure.roc import Estimate
from fl_privacy.report import write_brief
from fl_privacy.report.audit_file import APP_DIGEST, MOST_VALUES, RECORD, WHOLE, read_audit, write_audit
from fl_privacy.report.audit_page import AuditRecord
from fl_privacy.report.audit_parts import CountedLeak, Line
from fl_privacy.report.brief import verified
from tests.report import kinds
from tests.report.browser import Browser, find_chromium

LINE = Line(
    direction="client to server", kind="train", record="arrays", key="w", what="array 3 float32",
    size=12.0, messages=2, rounds=[1],
)  # fmt: skip


def step(name: str, title: str, read: int | None, *, leaves: bool = True, reason: str = "") -> Answer:
    counts = None if read is None else Counts(exact=read, nothing=8 - read, groups=8, candidates=999)
    scenario = Scenario(name=name, title=title, uploads="8 uploads", leaves=leaves)
    control = None if read is None else Counts(nothing=8, groups=8, candidates=999)
    return Answer(scenario=scenario, kind="image", counts=counts, control=control, reason=reason, seconds=1.04)


def audit(
    folder: Path,
    *,
    read: int = 4,
    low: float = 0.7,
    digest: str = "ab" * 32,
    more: Sequence[Answer] = (),
    **fields: Any,
) -> Path:
    found = Estimate(value=0.8123456, low=low, high=0.9, chance=0.5)
    answers = [
        step("gradient", "The gradient of one example", 8, leaves=False),
        step("one", "One example in one step", read),
        step("all", "All its examples in all its steps", None, reason="this is what the training uploads"),
        Answer(question="members", scenario=Scenario(uploads="the training's own uploads"), estimate=found,
               control=Estimate(value=0.5, low=0.4, high=0.6, chance=0.5)),
        Answer(question="classes", scenario=Scenario(uploads="the training's own uploads"), reason="one class only"),
    ]  # fmt: skip
    environment = [("fl-privacy", "1"), ("flwr", "1.41"), ("Date", "2026-11-28"), (APP_DIGEST, digest)]
    record = AuditRecord(
        app="an-app", lede="an-app ran unmodified.", answers=[*answers, *more], lines=[LINE],
        nodes=2, rounds=1, environment=[*environment, ("Attack", "auto, budget quick, seed 0")], **fields,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_audit(folder, record)
    return folder


def words_of(page: Path) -> str:
    return html.unescape(" ".join(re.sub(r"<style.*?</style>|<[^>]*>", " ", page.read_text(), flags=re.S).split()))


def test_an_audit_has_a_page_for_an_impact_assessment(tmp_path: Path) -> None:
    folder = audit(tmp_path / "audit")
    page = write_brief(folder)
    words = words_of(page)
    assert page == folder / "brief.html" and "<img" not in page.read_text() and str(tmp_path) not in page.read_text()
    assert "The server reconstructed 4 of 8 images from uploads of one example in one step" in words
    plain = words.replace("\N{NO-BREAK SPACE}", " ")
    assert "Upload of one example, one step 4 of 8 16 to 84 %; control 0 %" in plain
    assert "(share of pairs ranked correctly (AUC)) 0.81 0.70 to 0.90; control 0.50" in plain
    assert "All its examples in all its steps: this is what the training uploads." in words
    assert "Which client has more of which class than others: one class only." in words
    for place in ("EDPB Opinion 28/2024, 3.2, paragraph 43", "3.2.2.4", "SATRE 2.0, 3.3.07"):
        assert place in words
    assert "contradict a claim that uploads are anonymous" in words
    for name in (RECORD, WHOLE, "report.html"):
        assert f"SHA-256 of {name} {hashlib.sha256((folder / name).read_bytes()).hexdigest()}" in words
    assert "ab" * 32 in words and "Name Date Signature" in words


def test_a_brief_of_a_network_alone_claims_nothing_of_the_apps_training(tmp_path: Path) -> None:
    words = words_of(write_brief(audit(tmp_path / "audit", network_alone="Net (model.py) alone", drawn=True)))
    assert "own training was not audited. Figures are those of its network alone" in words
    assert "secure aggregation, were not tested" in words
    assert "can learn this from clients" not in words and "contradict a claim" not in words


def test_nothing_above_chance_is_no_clearance(tmp_path: Path) -> None:
    words = words_of(write_brief(audit(tmp_path / "audit", read=0, low=0.3)))
    assert "This describes these attacks, not a protection" in words and "prove no anonymity" in words
    assert "Share of images reconstructed from the worst uploads: 0 to 37 % (95 % interval)" in words


def test_a_record_is_what_its_file_gives(tmp_path: Path) -> None:
    leak = CountedLeak(severity="data", what="8 rows", where="a", why="b", kind="train", times=1, of=2)
    folder = audit(tmp_path / "audit", findings=[leak], stated={"epsilon": [3.0]})
    record, told = read_audit(folder), json.loads((folder / RECORD).read_text())
    assert (
        isinstance(told, dict)
        and record.headline == told["headline"] == "Clients send data in the clear: 8 rows, in 1 of 2 replies"
    )
    assert verified(folder) == (RECORD, [])


def changed(file: Path, change: Any) -> None:
    told = json.loads(file.read_text())
    change(told)
    file.write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda told: told["rungs"][1]["counts"].update(read=1), """'"read": 1,' in line """),
        (lambda told: told["rungs"][1]["counts"].update(interval95=[0, 0.1]), "'0.1' in line "),
        (lambda told: told.update(tone="open"), """is expected to be '"tone": "leak",'"""),
        (lambda told: told.update(headline="All is well"), """'"headline": "All is well",' in line """),
        (lambda told: told["survivors"][0].update(told=False), """'"told": false,' in line """),
        (lambda told: told.update(rungs=[]), " more"),
    ],
)
def test_a_figure_that_does_not_follow_is_named(tmp_path: Path, change: Any, line: str, capsys: Any) -> None:
    folder = audit(tmp_path / "audit")
    changed(folder / RECORD, change)
    assert any(one.startswith(f"{RECORD}: ") and line in one for one in verified(folder)[1])
    assert run_command_line(["verify", str(folder)]) == 1
    assert line in capsys.readouterr().out


def test_a_line_of_the_brief_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = audit(tmp_path / "audit")
    page = folder / "brief.html"
    assert run_command_line(["report", str(folder), "--brief"]) == 0
    assert capsys.readouterr().out.split("\n")[:2] == [f"brief of the audit in {folder}", str(page)]
    assert run_command_line(["verify", str(page)]) == 0
    assert "audit.json and brief.html: as their records say" in capsys.readouterr().out
    page.write_text(page.read_text().replace("4 of 8", "0 of 8", 1))
    compared, wrong = verified(page)
    assert compared == "audit.json and brief.html" and len(wrong) == 1 and "0 of 8" in wrong[0] and "4 of 8" in wrong[0]
    write_brief(folder)
    page.write_text(page.read_text().replace("</style>", ".tone-leak { color: green }</style>"))
    assert ["but not its markup" in line for line in verified(page)[1]] == [True]
    write_brief(folder)
    (folder / "report.html").write_text("another")
    assert hashlib.sha256(b"another").hexdigest() in verified(page)[1][0]


def test_the_files_of_the_app_are_compared(tmp_path: Path) -> None:
    app = tmp_path / "app"
    (app / "__pycache__").mkdir(parents=True)
    (app / "pyproject.toml").write_text("a")
    digest = files_digest(app)
    (app / "__pycache__" / "x.pyc").write_text("x")
    assert files_digest(app) == digest
    folder = audit(tmp_path / "audit", digest=digest)
    assert verified(folder, app=app) == ("audit.json and the app's files", [])
    (app / "pyproject.toml").write_text("b")
    assert digest in verified(folder, app=app)[1][0]


def test_a_run_is_verified(tmp_path: Path) -> None:
    folder = kinds.attack(tmp_path)
    page = write_brief(folder)
    assert verified(folder) == ("summary.json and brief.html", [])
    stored = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**stored, "verdict": {**stored["verdict"], "tone": "open"}}))
    assert any('summary.json: \'"tone": "open"' in line for line in verified(page)[1])


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"command": "audit APP"}', '{"command": "other"}', "[" * 100_000, "[0," * (MOST_VALUES + 1)],
)
def test_a_damaged_record_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / WHOLE).write_text(text)
    with pytest.raises(UserError, match="is expected to be as"):
        verified(tmp_path)


def test_a_figure_beyond_what_can_be_is_refused(tmp_path: Path) -> None:
    folder = audit(tmp_path / "audit")
    changed(folder / WHOLE, lambda told: told["answers"][1]["counts"].update(exact=-1))
    with pytest.raises(UserError, match="contradict each other"):
        write_brief(folder)


@pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium")
def test_the_brief_of_an_audit_is_one_sheet(tmp_path: Path) -> None:
    long = " ".join(["what is uploaded was not understood: by values, names and places"] * 4)
    more = [step(f"more {n}", "As many examples as in a batch", 3 if n % 2 else None, reason=long) for n in range(4)]
    asked = [Answer(question="words", scenario=Scenario(uploads="the last round's uploads"), reason=long)] * 3
    leak = CountedLeak(severity="facts", what="8 rows", where="a", why="b", kind="train", times=1, of=2)
    page = write_brief(audit(tmp_path / "audit", more=[*more, *asked], findings=[leak] * 3))
    with Browser(tmp_path / "profile") as browser:
        browser.open(page)
        assert len(re.findall(rb"/Type\s*/Page\b", browser.pdf())) == 1
        browser.open(page, width=400)
        assert browser.evaluate("document.documentElement.scrollWidth") <= 400
