"""``fl-privacy supernode``: what it hands on and refuses; ``tests/deploy/test_real_nodes.py`` shows that it works."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fl_privacy.cli import node_worker, supernode
from fl_privacy.cli.node_worker import installed_app
from fl_privacy.errors import UserError
from fl_privacy.flower.inside.supernode import Ended

APP = "fl_privacy.cli.flower_app:client"


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replace the SuperNode by one that ends at once with the next status; return its arguments."""
    calls: list[list[str]] = []
    hidden: list[bool] = []

    def run(arguments: list[str], *, holds: bool) -> Ended:
        assert hidden, "no other process reads the secret and the node's key"
        calls.append(arguments)
        secret = Path(arguments[arguments.index("--superexec-auth-secret-file") + 1])
        assert len(secret.read_bytes()) == supernode.SECRET_BYTES
        assert secret.stat().st_mode & 0o077 == 0
        return Ended(1, not_admitted="--strange" in arguments)

    monkeypatch.setattr("fl_privacy.flower.inside.supernode.run_supernode", run)
    monkeypatch.setattr(supernode, "hide_memory", lambda: hidden.append(True))
    monkeypatch.setattr(supernode, "_keep_alive", lambda worker, command, secret: None)
    monkeypatch.setattr(supernode, "_started", lambda command, secret: None)
    monkeypatch.setattr(supernode, "_expect_loaded", lambda app, worker, told: None)
    monkeypatch.setattr(supernode, "AGAIN_SECONDS", 0.01)
    return calls


def test_options_are_handed_on(ends: list[list[str]]) -> None:
    status = supernode.run_node(["--superlink", "a:1", "--port", "9"], app=APP, patience=9)

    assert status == 1
    assert ends[0][:4] == ["--superlink", "a:1", "--port", "9"]
    assert ends[0][4:6] == ["--isolation", "process"]
    assert not Path(ends[0][-1]).exists(), "the secret goes with the node"


@pytest.mark.parametrize("option", ["--isolation=process", "--ssl-keyfile", "--superexec-auth-secret-file"])
def test_what_it_sets_itself_is_refused(ends: list[list[str]], option: str) -> None:
    with pytest.raises(UserError, match=r"sets --.* itself"):
        supernode.run_node([option, "x"], app=APP, patience=9)
    assert not ends


def test_a_node_that_is_not_admitted_is_started_again_until_patience_ends(
    ends: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda program, command, environment: started.append(command))

    assert supernode.run_node(["--strange"], app=APP, patience=0) == 1
    assert not started
    supernode.run_node(["--strange", "--port", "9"], app=APP, patience=30)

    (command,) = started
    assert command[1:6] == ["-m", "fl_privacy", "supernode", "--app", APP]
    assert 29 < float(command[command.index("--patience") + 1]) <= 30
    assert command[-3:] == ["--strange", "--port", "9"]


def test_a_node_whose_superlink_failed_is_started_again_or_ends_in_a_line(
    ends: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Ended(1, not_admitted=False, lost="Server error '500 Internal Server Error'")
    monkeypatch.setattr("fl_privacy.flower.inside.supernode.run_supernode", lambda arguments, *, holds: lost)
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda program, command, environment: started.append(command))
    with pytest.raises(UserError, match=r"gets no more messages \(Server error '500.*; look at the SuperLink's log"):
        supernode.run_node([], app=APP, patience=0)
    assert not started

    with pytest.raises(UserError):  # where execve returns, as only here
        supernode.run_node([], app=APP, patience=30)
    assert started[0][-2:] == ["--patience", "30.0"], "it may have run for days"


def test_an_app_that_is_not_installed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_app.py").write_text("1 / 0")
    (tmp_path / "leaving_app.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    for reference in (
        "nowhere.at.all:app",
        "fl_privacy.cli.flower_app:none",
        "nothing",
        "broken_app:app",
        "leaving_app:app",
    ):
        with pytest.raises(UserError, match=r"--app is expected as package\.module:attribute"):
            installed_app(reference)
    with pytest.raises(UserError, match="is a str"):
        installed_app("os:name")


PLAIN = """
import os, sys
from fl_privacy.site.gate.linux_calls import drop_capabilities
drop_capabilities()
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""
"""Runs Python code without privileges, even of root."""

WORKER = """
import time
from fl_privacy.cli import node_worker
node_worker.answerer = lambda *_: print("ready", flush=True) or time.sleep(60)
node_worker.serve_node("", "", "")
"""
OTHER = "print('ready', flush=True); input()"


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="memory is hidden on Linux alone")
@pytest.mark.parametrize(("code", "is_read"), [(WORKER, False), (OTHER, True)])
def test_other_processes_do_not_read_a_worker_s_memory(code: str, is_read: bool) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PLAIN, code], stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(bytes(supernode.SECRET_BYTES))
        process.stdin.flush()
        assert process.stdout.readline() == b"ready\n"
        reading = f"open('/proc/{process.pid}/environ', 'rb').read()"
        done = subprocess.run([sys.executable, "-c", PLAIN, reading], capture_output=True, text=True, check=False)
        process.kill()
    assert (done.returncode == 0) == is_read and ("PermissionError" in done.stderr) != is_read, done.stderr


@pytest.mark.long
def test_a_worker_ends_with_its_node(tmp_path: Path) -> None:
    told = str(tmp_path / "told")
    command = [sys.executable, "-m", "fl_privacy.cli.node_worker", "127.0.0.1:1", "json:dumps", told]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert worker.stdin is not None
    worker.stdin.write(bytes(supernode.SECRET_BYTES))
    worker.stdin.flush()
    time.sleep(0.5)
    assert worker.poll() is None

    worker.stdin.close()

    assert worker.wait(60) == 0


@pytest.mark.parametrize("is_there", [True, False])
def test_a_worker_ends_in_silence_whatever_fails(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that ends as usual has removed its folder by then."""
    ended, folder = threading.Event(), tmp_path / f"{supernode.FOLDER}x"
    monkeypatch.setattr(node_worker, "close_all", lambda: os.close(-1))
    monkeypatch.setattr(node_worker, "answerer", lambda *_: ended.wait(5) and sys.exit(3))
    monkeypatch.setattr(node_worker, "hide_memory", lambda: None)
    monkeypatch.setattr(os, "_exit", lambda status: ended.set())
    monkeypatch.setattr(os, "read", lambda _, most: bytes(most) if most > 1 else b"")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(node_worker, "write_private", lambda *_: None)
    if is_there:
        folder.mkdir()
    with pytest.raises(SystemExit):
        node_worker.serve_node("", "", str(folder / "told"))
    assert ended.is_set() and not folder.exists() and not caplog.records


GATED = """
version: 1
sends: {train: {metrics: {allow: [num-examples]}}}
app: {isolation: where_possible}
"""


@pytest.mark.long
@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, None])
def test_a_worker_that_is_interrupted_leaves_no_folder(ends: signal.Signals | None, tmp_path: Path) -> None:
    """``None`` is a node that was killed, whose folder the worker removes too."""
    (tmp_path / "site.yaml").write_text(GATED)
    (tmp_path / "site.yaml").chmod(0o600)
    temporary = tmp_path / "temporary"
    told = temporary / f"{supernode.FOLDER}of-a-test" / "told"
    told.parent.mkdir(parents=True)
    app = ["tests.gate.apps:honest", str(told), str(tmp_path / "site.yaml")]
    command = [sys.executable, "-m", "fl_privacy.cli.node_worker", "127.0.0.1:1", *app]
    variables = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(Path(__file__).parents[2])}
    # also where a shell, or nohup, has this process ignore the signal
    code = "import os, sys; from signal import *; [signal(each, SIG_DFL) for each in (SIGINT, SIGHUP)]; "
    code += "os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", code, *command]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=variables) as worker:
        assert worker.stdin is not None
        worker.stdin.write(bytes(supernode.SECRET_BYTES))
        worker.stdin.flush()
        while not told.exists():
            assert worker.poll() is None
            time.sleep(0.1)
        assert told.read_text() == ""
        assert len(list(temporary.iterdir())) == 2
        if ends is None:
            worker.stdin.close()
        else:
            worker.send_signal(ends)
        assert worker.wait(60) == 0
    assert list(temporary.iterdir()) == [told.parent] * (ends is not None)


@pytest.mark.parametrize("app", ["nope:app", "fl_privacy.nope:app", "fl_privacy", ":app", "a b:c"])
def test_an_app_that_is_not_there_is_told_at_once(ends: list[list[str]], app: str) -> None:
    with pytest.raises(UserError, match="--app is expected"):
        supernode.run_node([], app=app, patience=9)
    assert not ends


@pytest.mark.long
@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("other = print", "has no attribute 'app'"),
        ("import os\nos._exit(4)", "ended its process"),
    ],
)
def test_an_app_that_can_not_be_loaded_is_told_before_the_server_hears_of_the_node(
    content: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "somebodys_app.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(
        "fl_privacy.flower.inside.supernode.run_supernode", lambda arguments, *, holds: pytest.fail("connected")
    )
    with pytest.raises(UserError, match=line) as error:
        supernode.run_node([], app="somebodys_app:app", patience=9)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mended", [True, False])
def test_a_site_hears_of_a_python_that_follows_links(
    mended: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr("tempfile._resetperms", raising=False)
    if mended:
        monkeypatch.setattr("tempfile._resetperms", str, raising=False)
    supernode._expect_policy("dp", None, "package.module:app")
    assert ("CVE-2023-6597" in caplog.text) == (not mended)
