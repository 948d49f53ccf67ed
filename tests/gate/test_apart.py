"""Code that tries to get out of a sandbox, or to take more than there is: each way of it ends at its wall."""

import json
import os
import resource
import secrets
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fl_privacy.files import remove_untrusted, temporary_folder
from fl_privacy.site.gate.apart import GIVEN, Apart
from fl_privacy.site.gate.isolation import Wishes
from fl_privacy.site.gate.rules import RefusedError
from tests.gate import probes

ROOT = str(Path(__file__).resolve().parents[2])
MODULE = "tests.gate.probes"
MOST = 200 << 20
"""Bytes that a process of these tests may have; it loads nothing."""

OWN_VARIABLES = "HOME", "TMPDIR", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "FL_PRIVACY_DATA", "GRPC_VERBOSITY"
"""Variables that a process has of its own; the last is set by gRPC."""

SEEN = (
    "socket_in_a_file",
    "socket_in_the_apps_folder",
    "socket_without_a_file",
    "socket_of_the_internet",
    "pipe_in_the_apps_folder",
    "files_of_the_user",
    "pages_of_other_audits",
    "attributes_are_changed",
    "files_of_the_app_are_changed",
    "files_are_linked_out",
    "processes_outside",
    "memory_that_is_counted_nowhere",
)
"""Probes that find something where nothing keeps them, and leave the machine as it is but for files of the test."""


def seconds(number: float) -> float:
    return time.monotonic() + number


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with made_world(tmp_path_factory.mktemp("w")) as found:
        yield found


@contextmanager
def made_world(folder: Path) -> Iterator[dict[str, Any]]:
    """Make what a user has: secrets, sockets in files and without, an app, a page of another audit."""
    name = f"fl-probe-{secrets.token_hex(3)}"
    (folder / "home").mkdir(parents=True)
    (folder / "home" / "secret").write_text("the key")
    app = folder / "app"
    page = app / "audit" / "audit-first" / "report.html"
    page.parent.mkdir(parents=True)
    page.write_text("everything was read")
    (app / "own.txt").write_text("own")
    os.mkfifo(app / "fifo")
    families = [(socket.AF_UNIX, str(folder / "s")), (socket.AF_UNIX, str(app / "s")), (socket.AF_UNIX, f"\0{name}")]
    listeners = [socket.socket(family) for family, _ in families]
    for listener, (_, where) in zip(listeners, families, strict=True):
        listener.bind(where)
    listeners.append(socket.create_server(("127.0.0.1", 0)))
    listeners.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    listeners[-1].bind(listeners[-2].getsockname())
    for listener in listeners[:-1]:
        listener.listen()
    os.environ["SECRET_TOKEN"] = "a variable of the user"
    yield {
        "secret": str(folder / "home" / "secret"),
        "socket": str(folder / "s"),
        "app_socket": str(app / "s"),
        "abstract": name,
        "port": listeners[-1].getsockname()[1],
        "app": str(app),
        "fifo": str(app / "fifo"),
        "page": str(page),
        "package": ROOT + "/fl_privacy",
        "process": os.getpid(),
        "variables": sorted(os.environ.keys() - {*GIVEN, *OWN_VARIABLES}),
        "name": name,
        "core": int(resource.getrlimit(resource.RLIMIT_CORE)[1] != 0),
        "most": MOST,
        "listeners": listeners,
    }
    del os.environ["SECRET_TOKEN"]
    for listener in listeners:
        listener.close()


def apart(world: dict[str, Any], **more: Any) -> Apart:
    from fl_privacy.cli.sandbox import openings  # noqa: PLC0415

    wishes = Wishes(
        temporary="",
        reads=(world["app"],),
        hidden=(str(Path(world["app"], "audit")), *openings(world["app"])),
        most_bytes=MOST,
        most_processes=16,
        internet=True,
        **more,
    )
    return Apart(MODULE, wishes, {"PYTHONPATH": ROOT})


def test_probes_find_what_is_there_where_nothing_keeps_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    with made_world(tmp_path_factory.mktemp("u")) as world:
        process = Apart(MODULE, Wishes(temporary=""), {"PYTHONPATH": ROOT, probes.UNBOUND: "1"})
        try:
            process.begin({}, seconds(60))
            assert [name for name in SEEN if not tried(process, name, world)] == []
        finally:
            process.close()


def begun(process: Apart, without: str = "") -> Apart:
    held = process.begin({}, seconds(60))
    assert without in held.in_words()
    assert ("core dumps" in held.in_words()) == (resource.getrlimit(resource.RLIMIT_CORE)[1] == 0)
    if not held.is_all:
        process.close()
        pytest.skip(held.in_words())
    return process


def tried(process: Apart, name: str, world: dict[str, Any], limit: float = 60) -> str:
    told = {key: value for key, value in world.items() if key != "listeners"}
    process.send([name.encode(), json.dumps(told).encode()], seconds(limit))
    (found,) = process.receive(1 << 16, seconds(limit))
    return found.decode()


@pytest.fixture(scope="module")
def inside(world: dict[str, Any]) -> Iterator[Apart]:
    process = begun(apart(world))
    yield process
    process.close()


@pytest.mark.parametrize("name", probes.PROBES)
def test_nothing_outside_is_reached(name: str, inside: Apart, world: dict[str, Any]) -> None:
    assert tried(inside, name, world) == ""


def test_the_world_outside_is_as_it_was(inside: Apart, world: dict[str, Any]) -> None:
    """After all probes: nobody called, no file is other or new, and what was left ends with the process."""
    for listener in world["listeners"]:
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept() if listener.type == socket.SOCK_STREAM else listener.recv(10)
    app, home = Path(world["app"]), Path(world["secret"]).parent
    assert {path.name for path in app.iterdir()} == {"audit", "own.txt", "fifo", "s"}
    assert ((app / "own.txt").read_text(), (app / "own.txt").stat().st_mtime > 1e9) == ("own", True)
    assert stat.S_IMODE((app / "own.txt").stat().st_mode) != 0o777
    assert Path(world["page"]).read_text() == "everything was read"
    assert [path.name for path in home.iterdir()] == ["secret"]
    assert not [place for place in ("/dev/shm", "/tmp") if Path(place, world["name"]).exists()]
    folder = inside._folder
    assert daemons(world["name"])
    inside.close()
    deadline = seconds(10)
    while daemons(world["name"]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not daemons(world["name"])
    assert folder is not None and not folder.exists()


def test_a_mount_within_a_folder_that_is_read_is_neither_changed_nor_called(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gate.submount", str(tmp_path)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    found = json.loads(told.stdout)
    if found is None:
        pytest.skip("nothing can be mounted here")
    assert found == []


def test_a_socket_in_a_folder_that_is_sealed_leads_nowhere_whenever_it_is_made(tmp_path: Path) -> None:
    data, aside, packages = tmp_path / "data", tmp_path / "aside", tmp_path / "packages"
    for folder in (data / "deeper", aside, packages):
        folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(data)
    (data / "own.txt").write_text("own")
    early, late, other = (socket.socket(socket.AF_UNIX) for _ in range(3))
    for listener, place in ((early, data / "s"), (other, packages / "s")):
        listener.bind(str(place))
        listener.listen()
    reads = (str(tmp_path / "link"), str(data / "own.txt"), str(tmp_path / "none"))
    for writes in ((), (str(aside),)):
        process = begun(
            Apart(MODULE, Wishes(temporary="", reads=reads, writes=writes), {"PYTHONPATH": f"{ROOT}:{packages}"})
        )
        try:
            if not writes:
                late.bind(str(data / "deeper" / "s"))
                late.listen()
            places = [str(place / name) for place in (tmp_path / "link", data) for name in ("s", "deeper/s")]
            places.append(str(packages / "s"))
            assert tried(process, "sockets_are_called", {"places": places}) == ""
            assert (
                tried(process, "files_are_read", {"places": [f"{tmp_path}/link/own.txt", f"{data}/own.txt"]})
                == "ownown"
            )
            made = tried(process, "sockets_are_made", {})
            assert made == ("" if writes else "made"), "a loader's workers talk by such"
        finally:
            process.close()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_sockets_are_not_made_where_a_folder_can_not_be_sealed(kind: socket.SocketKind, tmp_path: Path) -> None:
    place = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, kind) as listener:
        listener.bind(place)
        if kind == socket.SOCK_STREAM:
            listener.listen()
        unsealed = f"reads or writes ({place}; they can be had without mounts in these"
        process = begun(Apart(MODULE, Wishes(temporary="", reads=(place,)), {"PYTHONPATH": ROOT}), unsealed)
        try:
            assert tried(process, "sockets_are_called", {"places": [place]}) == ""
            assert tried(process, "sockets_are_made", {}) == ""
        finally:
            process.close()


def daemons(name: str) -> list[str]:
    """List the processes of the machine that a probe has named."""
    found = []
    for place in Path("/proc").glob("[0-9]*/comm"):
        try:
            found += [place.parent.name] if place.read_text().strip() == name[:15] else []
        except OSError:
            continue
    return found


@pytest.mark.parametrize("name", probes.ENDLESS)
def test_who_takes_more_than_there_is_gets_nothing_or_is_ended(name: str, world: dict[str, Any]) -> None:
    process = begun(apart(world))
    try:
        assert tried(process, name, world, 30) == ""
    except RefusedError as error:
        assert "it went beyond" in str(error)
    finally:
        process.close()


def deep(folder: Path, depth: int = 1500) -> None:
    """Nest folders deeper than calls of Python and names of the kernel reach, the lowest one locked."""
    folder.mkdir(parents=True)
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d" * 100, dir_fd=here)
        below = os.open("d" * 100, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.fchmod(here, 0)
    os.close(here)


def test_a_folder_is_removed_whatever_is_in_it(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("kept")
    folder = tmp_path / "cell"
    deep(folder / "work")
    deep(folder / "work" / "other" / "more", 3)
    (folder / "work" / "link").symlink_to(kept)
    (folder / "work" / "locked").mkdir()
    (folder / "work" / "locked" / "file").write_text("x")
    (folder / "work" / "locked").chmod(0)
    os.mkfifo(folder / "work" / "pipe")
    remove_untrusted(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (kept / "file").read_text() == "kept"


def test_a_folder_that_becomes_a_link_while_it_is_removed_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An app that still runs may exchange a folder of its own for a link."""
    (kept := tmp_path / "kept").mkdir()
    (kept / "file").write_text("kept")
    folder = tmp_path / "cell"
    (inner := folder / "work" / "inner").mkdir(parents=True)
    rename = os.rename

    def exchanged(source: str, *args: Any, **kwargs: Any) -> None:
        inner.rmdir()
        inner.symlink_to(kept)
        rename(source, *args, **kwargs)

    monkeypatch.setattr(os, "rename", exchanged)
    remove_untrusted(folder)
    assert (kept / "file").read_text() == "kept" and stat.S_IMODE(kept.stat().st_mode) != 0o700


def test_what_can_not_be_removed_is_a_line_and_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    remove_untrusted(tmp_path / "none")
    assert "could not be removed" in caplog.text


def test_a_closed_process_is_closed_once(world: dict[str, Any]) -> None:
    """The second time may not close descriptors that somebody else has got since, as a thread of a server does."""
    process = begun(apart(world))
    process.close()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
    process.close()
    for descriptor in others:
        os.close(descriptor)
    with pytest.raises(RefusedError, match="has ended"):
        process.send([b"x"], seconds(5))
    assert not process.is_quiet


def test_a_process_that_nobody_closed_is_closed_at_the_end(tmp_path: Path) -> None:
    code = f"from fl_privacy.site.gate.apart import Apart, Wishes; Apart({MODULE!r}, Wishes(temporary=''), {{}})"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}, check=True, timeout=60)
    assert not list(tmp_path.iterdir())


def test_a_thread_that_can_not_be_had_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none(self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("threading.Thread.start", none)
    before, started = len(list(Path("/proc/self/fd").iterdir())), list[Any]()
    popen = subprocess.Popen
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[0])
    with pytest.raises(OSError, match="new thread"):
        Apart(MODULE, Wishes(temporary=""), {})
    assert started[0].returncode is not None
    assert len(list(Path("/proc/self/fd").iterdir())) <= before, "others may be closed meanwhile"
    assert not list(tmp_path.iterdir())


def test_a_process_that_can_not_be_had_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: (_ for _ in ()).throw(OSError(11, "no more processes")))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="no more"):
        Apart(MODULE, Wishes(temporary=""), {})
    assert len(list(Path("/proc/self/fd").iterdir())) <= before, "others may be closed meanwhile"
    assert not list(tmp_path.iterdir())


def test_folders_that_killed_processes_left_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("fl_privacy.files.NEW_SECONDS", -1.0)
    kill = "import fl_privacy.files as f, os; f.write_private(f.make_temporary('fl-privacy-') / 'x', ''); os.abort()"
    variables = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": ROOT}
    subprocess.run([sys.executable, "-c", kill], env=variables, check=False)
    (left,) = tmp_path.iterdir()
    (tmp_path / "fl-privacy-other").mkdir()
    (tmp_path / "fl-privacy-link_locked").symlink_to(tmp_path / "fl-privacy-other")
    with temporary_folder("fl-privacy-") as used, temporary_folder("fl-privacy-"):
        assert used.is_dir() and not left.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"fl-privacy-other", "fl-privacy-link_locked"}


def test_a_folder_that_may_not_be_locked_yet_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    new = tmp_path / "fl-privacy-new_locked"
    new.mkdir()
    with temporary_folder("fl-privacy-"):
        assert new.is_dir()
