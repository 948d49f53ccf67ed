"""The command's side of ``audit --sandbox``: what it believes of a process in which somebody else's code runs."""

import json
import os
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_privacy.auditing.app.environment import remedies, with_remedies
from fl_privacy.cli import sandbox
from fl_privacy.cli.sandbox import Allowed, Bounds, Sandbox, bounds_of, caches, openings
from fl_privacy.errors import UserError
from fl_privacy.measure.answer import Answer, Kind, Scenario, Shown
from fl_privacy.measure.counts import Counts
from fl_privacy.measure.roc import Estimate
from fl_privacy.report.audit_file import record_of_json, record_to_json, terminal_line, write_audit
from fl_privacy.report.audit_page import AuditRecord, render_audit
from fl_privacy.report.audit_parts import CountedLeak, Line, Volume
from fl_privacy.site.gate.apart import Apart
from fl_privacy.site.gate.isolation import Isolation
from tests.gate import probes
from tests.gate.test_apart import MODULE, ROOT


def step(kind: Kind, shown: list[Shown]) -> Answer:
    return Answer(
        scenario=Scenario(name="one", title="One example", uploads="2 uploads"),
        kind=kind,
        counts=Counts(exact=1, nothing=1, groups=2, candidates=99),
        control=Counts(nothing=2, groups=2),
        labels=(1, 2),
        seconds=0.5,
        shown=shown,
    )


def page() -> AuditRecord:
    rng = np.random.default_rng(0)
    pictures = [
        Shown(original=rng.random((3, 4, 5)), guess=rng.random((3, 4, 5)), reconstructed=True),
        Shown(original=rng.random((1, 2, 2)), guess=None, reconstructed=False),
    ]
    finding = CountedLeak(severity="facts", what="a sum", where="m/a", why="few", kind="train", times=1, of=2)
    line = {"direction": "up", "kind": "train", "record": "m", "key": "a", "what": "number", "example": "1"}
    return AuditRecord(
        app="app",
        lede="An app.",
        findings=[finding],
        answers=[
            step("image", pictures),
            step("row", [Shown(original=[0.25, float("nan")], guess=None, reconstructed=False)]),
            step("text", [Shown(original=[1, 2], guess=[2, 7], reconstructed=True)]),
            Answer(question="classes", estimate=Estimate(value=0.5, low=0.1, high=0.9, chance=0.0)),
        ],
        lines=[Line(**line, size=8.0, messages=1, rounds=(1,))],
        volumes=[Volume(direction="up", kind="train", messages=1, bytes=9)],
        facts=[("Network", "Net")],
        stated={"epsilon": [1.0, float("inf")]},
        problems=["\x1b[2Jone"],
        notes=["a note"],
        environment=[("torch", "2")],
        nodes=2,
        rounds=1,
        models={"Net": 2},
        seconds={"all": 1.0},
    )


def test_a_page_is_the_same_on_the_other_side() -> None:
    found = record_of_json(record_to_json(page()))
    assert render_audit(found) == render_audit(page())
    for name in ("nodes", "rounds", "models", "seconds", "findings", "lines", "volumes"):
        assert list(np.atleast_1d(getattr(found, name))) == list(np.atleast_1d(getattr(page(), name)))


@pytest.mark.parametrize("chance", [None, 0.0, 0.5])
def test_probabilities_are_no_counts(chance: float | None) -> None:
    text = changed("answers.0.counts.chance", chance)
    counts = record_of_json(text).steps[0].counts
    assert counts is not None and counts.chance == chance


def told() -> dict[str, Any]:
    return dict(json.loads(record_to_json(page())))


def changed(place: str, value: object) -> str:
    """Put ``value`` at the place ``answers.0.kind`` of a record."""
    found: Any = told()
    here, *_ = [found]
    *way, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    for part in way:
        here = here[part]
    here[last] = value
    return json.dumps(found)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("app", None),
        ("answers", None),
        ("captured", None),
        ("captured", {}),
        ("more", 1),
        ("app", 1),
        ("more", ""),
        ("answers", {}),
        ("answers.0", "step"),
        ("answers.0.kind", "unknown"),
        ("answers.0.kind", ["image"]),
        ("answers.0.counts.exact", -1),
        ("answers.0.counts.exact", 10**9),
        ("answers.0.counts.exact", 10**400),
        ("answers.0.counts.exact", 1.5),
        ("answers.0.counts.groups", 3),
        ("answers.0.counts.luck", 2.0),
        ("answers.0.counts.luck", None),
        ("answers.0.counts.chance", 2.0),
        ("answers.0.counts.chance", float("nan")),
        ("answers.0.counts.identified_by_chance", -0.5),
        ("answers.0.counts.words", None),
        ("answers.0.labels", [1]),
        ("answers.0.scenario.leaves", "yes"),
        ("answers.0.shown.0.original.shape", [3, 4, 6]),
        ("answers.0.shown.0.original.shape", [3, -4, -5]),
        ("answers.0.shown.0.original.shape", [60]),
        ("answers.0.shown.0.original.levels", "data:text/html,<script>"),
        ("answers.0.shown.0.original", "x"),
        ("answers.1.shown.0.original", ["<script>"]),
        ("answers.3.question", "other"),
        ("answers.3.estimate", {"value": 1.0}),
        ("answers.3.estimate.value", float("nan")),
        ("findings.0.severity", "none"),
        ("findings.0.what", ""),
        ("findings.0.what", None),
        ("findings.0.times", "1"),
        ("findings.0", {}),
        ("lines.0.size", "1"),
        ("lines.0.rounds", "1"),
        ("volumes.0.bytes", None),
        ("facts", {"a": "b"}),
        ("facts", [["a"]]),
        ("stated", [1.0]),
        ("nodes", "2"),
        ("models", None),
        ("seconds", 1.0),
    ],
)
def test_what_is_no_page_is_refused(place: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        record_of_json(changed(place, value))


@pytest.mark.parametrize("text", ["", "[" * 100_000, "{}", "[]", '{"app": 1}', "nul", b"\xff\xfe", "[1e999]"])
def test_what_is_no_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        record_of_json(text)


@pytest.mark.parametrize("piece", ["[],", '{"a":1},', "0,", '"a",'])
def test_a_page_of_too_many_values_is_refused_before_it_takes_memory(piece: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than 2097152 values"):
            record_of_json(b"[" + piece.encode() * (8 << 20) + b"0]")
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()


def test_text_of_an_app_stays_text(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>\x1b[2J" + "x" * 100_000
    found = record_of_json(changed("findings.0.what", bad))
    write_audit(tmp_path, found)
    html = (tmp_path / "report.html").read_text()
    assert "<script>alert" not in html
    assert json.loads((tmp_path / "audit.json").read_text())["findings"][0]["what"] == bad
    assert len(terminal_line(found, tmp_path)) < 5000


@pytest.fixture
def lying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run a process that is kept apart and says what it likes, in place of an audit; give its end and its pages."""
    monkeypatch.setattr(sandbox, "MODULE", MODULE)
    monkeypatch.setenv("PYTHONPATH", ROOT)
    app = tmp_path / "app"
    app.mkdir()
    (tmp_path / "out" / "audit-other").mkdir(parents=True)
    (tmp_path / "out" / "audit-other" / "report.html").write_text("another page")

    def run(lie: str, seconds: float = 60.0) -> tuple[str, list[str]]:
        given = Allowed(bounds=Bounds(memory_mib=512, seconds=seconds))
        try:
            Sandbox(app, {"lie": lie}, tmp_path / "out", given).audit(heard.append)
        except UserError as error:
            said = str(error)
            if "expected to find the means to isolate an app" in said:
                pytest.skip(said)
            return said, heard
        raise AssertionError("it was believed")

    heard: list[str] = []
    yield run
    assert (tmp_path / "out" / "audit-other" / "report.html").read_text() == "another page"


@pytest.mark.parametrize(
    ("lie", "line"),
    [
        ("say_nothing", "process has ended with status 0; mend the app, or start it again; nothing was written"),
        ("say_too_much", "at most 67108864 are read"),
        ("say_no_page", "page should have app"),
        ("say_another_place", "page should have app"),
    ],
)
def test_who_says_no_page_has_none(lie: str, line: str, lying: Any, tmp_path: Path) -> None:
    said, _ = lying(lie)
    assert line in said
    assert not list((tmp_path / "out").glob("*/audit.json"))
    assert {path.name for path in tmp_path.iterdir()} == {"app", "out"}
    assert len(list((tmp_path / "out").iterdir())) == 2, "the first name is the folder's, whatever is said later"


def test_an_audit_ends_with_its_time(lying: Any) -> None:
    said, heard = lying("say_it_goes_on", 1.0)
    assert "did not answer in time" in said
    assert set(heard) == {" [2Jtraining "}


def test_what_an_app_prints_is_bounded_and_moves_no_cursor(lying: Any, capfd: pytest.CaptureFixture[str]) -> None:
    lying("print_without_end")
    printed = capfd.readouterr().err
    assert len(printed) < 2_000_000
    assert "\x1b" not in printed
    assert "\x07" not in printed


def test_a_page_that_can_not_be_shown_is_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Sandbox(tmp_path, {}, tmp_path / "out", Allowed())
    one.name, one.folder = "app", tmp_path
    monkeypatch.setattr("fl_privacy.report.audit_file.render_audit", lambda page: {}["a figure that is not there"])
    with pytest.raises(ValueError, match="what it said is no page"):
        one._write(record_to_json(page()).encode())


def test_a_page_does_not_say_by_itself_that_more_than_chance_was_found() -> None:
    shown = record_of_json(changed("answers.0.counts", None))
    assert not shown.answers[0].above_chance and shown.answers[0].counts is None


def test_an_audit_that_was_cut_says_so_on_its_page(tmp_path: Path) -> None:
    one = Sandbox(tmp_path, {}, tmp_path / "out", Allowed())
    one.name, one.held, one.folder = "app", "walls", tmp_path
    one._write(record_to_json(AuditRecord(app="other", lede="x", going_on="The app trains")).encode())
    assert "its process has ended; " in one._ended("its process has ended")
    html = (tmp_path / "report.html").read_text()
    assert "This audit did not end" in html
    assert "The audit did not end: the result is not known" in html
    assert "goes on" not in html
    assert "walls" in html
    assert json.loads((tmp_path / "audit.json").read_text())["app"] == "app"


def test_pages_within_the_app_s_folder_are_covered_however_it_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    """Its folder may be named by a link, its pages by the place, and there may be none yet."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setenv("PYTHONPATH", ROOT)
    for app, out in (("link", "real"), ("real", "link")):
        one = Sandbox(tmp_path / app, {}, tmp_path / out / "audit", Allowed())
        process = Apart(MODULE, one._wishes(), {})
        try:
            if not process.begin({}, time.monotonic() + 60).is_all:
                pytest.skip("nothing keeps it apart here")
            (tmp_path / "real" / "audit" / "page").write_text("of another audit")
            places = [str(tmp_path / name / "audit") for name in ("real", "link")]
            process.send([b"folders_are_listed", json.dumps(places).encode()], time.monotonic() + 60)
            assert process.receive(1000, time.monotonic() + 60) == [b""]
            (tmp_path / "real" / "audit" / "page").unlink()
        finally:
            process.close()


def test_what_may_be_read_is_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--reads is expected"):
        Sandbox(tmp_path, {}, tmp_path / "out", Allowed(reads=[tmp_path / "none"])).audit(print)


def test_where_nothing_keeps_an_app_apart_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held = Isolation(network=["seccomp"], files=["Landlock 7"], missing=["namespaces (Operation not permitted)"])
    monkeypatch.setattr(Apart, "begin", lambda self, asked, deadline: held)
    monkeypatch.setattr(sandbox, "MODULE", MODULE)
    with pytest.raises(UserError, match=r"namespaces \(Operation not permitted\)\. Run the audit in a virtual machine"):
        Sandbox(tmp_path / "app", {}, tmp_path / "out", Allowed()).audit(print)
    assert not (tmp_path / "out").exists()


def test_a_folder_is_looked_at_whole_or_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        (tmp_path / f"{number}").touch()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(sandbox, "MOST_LOOKED_AT", 4)
    assert list(openings(str(tmp_path))) == [str(tmp_path / "pipe")]
    (tmp_path / "one more").touch()
    with pytest.raises(UserError, match="more than 4 files and folders; name a smaller one"):
        list(openings(str(tmp_path)))


def test_limits_are_read() -> None:
    assert bounds_of("") == Bounds()
    assert bounds_of("memory_mib=512 seconds=3") == Bounds(memory_mib=512, seconds=3)


OTHER_LIMITS = "memory=1", "memory_mib", "memory_mib=-1", "memory_mib=x", "processes=0", "seconds=0", "memory_mib=1"


@pytest.mark.parametrize("text", OTHER_LIMITS)
def test_other_limits_are_a_line(text: str) -> None:
    with pytest.raises(UserError, match="--limits"):
        bounds_of(text)


def test_caches_of_a_fresh_machine_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*sandbox.CACHES, "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert caches() == {}
    (tmp_path / ".cache" / "huggingface" / "datasets").mkdir(parents=True)
    assert caches() == {"HF_DATASETS_CACHE": str(tmp_path / ".cache" / "huggingface" / "datasets")}
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    assert caches() == {"HF_DATASETS_CACHE": str(tmp_path)}


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        ("ConnectionError: Couldn't reach 'uoft-cs/cifar10' on the Hub", "no network"),
        ("gaierror: [Errno -3] Temporary failure in name resolution", "no network"),
        ("OfflineModeIsEnabled: Cannot reach https://huggingface.co", "no network"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/a.csv'", "--reads DIR, and no other file"),
        ("ValueError: Data files for client 1 not found in ./data", "--reads DIR, and no other file"),
        ("OSError: [Errno 30] Read-only file system: '/data/a.lock'", "write its temporary folder alone"),
        ("PermissionError: [Errno 13] Permission denied: '/etc/x'", "write its temporary folder alone"),
        ("RuntimeError: can't start new thread", "limits memory, files and processes"),
        ("OSError: [Errno 28] No space left on device", "limits memory, files and processes"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "limits memory"),
    ],
)
def test_an_error_that_the_sandbox_makes_says_so(problem: str, sentence: str) -> None:
    assert [one for one in remedies([problem]) if sentence in one]


def test_a_refused_port_is_no_refused_file() -> None:
    problem = "PermissionError: [Errno 13] Permission denied (socketserver.py, line 472, called in server.py, line 40)"
    assert remedies([problem]) == ["The sandbox opens no port, so that nothing is served there."]
    assert len(remedies([problem, "PermissionError: [Errno 13] Permission denied: '/etc/x'"])) == 2


def test_what_the_sandbox_did_stands_beside_the_error_once() -> None:
    found = with_remedies(["ConnectionError: no hub (2 replies)", "KeyError: 'lr'", "ConnectionError: no hub"])
    assert found[0].startswith("ConnectionError: no hub (2 replies). The sandbox has no network: name a folder of data")
    assert found[1:] == ["KeyError: 'lr'", "ConnectionError: no hub"]


def test_other_errors_are_the_app_s_own() -> None:
    assert remedies(["ValueError: Expected more than 1 value per channel", "KeyError: 'lr' (3 replies)"]) == []
    assert remedies(["ValueError: assignment destination is read-only (utils.py, line 60)"]) == []
    assert remedies(["OSError: [Errno 30] Read-only file system: '/content'"]) != []
    assert (
        remedies(["KeyError: \"['timestamp'] not found in axis\"", "ValueError: the network has 10 fully connected"])
        == []
    )
    assert remedies(["ValueError: Input X contains NaN. See https://scikit-learn.org/stable/modules/impute.html"]) == []


def test_probes_are_named() -> None:
    assert len({**probes.PROBES, **probes.ENDLESS, **probes.LIES}) >= 39
