"""Full disks, lost folders and too little memory end in one line, and what was written stays readable."""

import errno
import sys
from pathlib import Path

import pytest

from fl_privacy.cli.faults import in_a_line
from fl_privacy.cli.main import run_command_line
from fl_privacy.report import write_report
from fl_privacy.runs.config.building import locate_target
from fl_privacy.runs.folder import read_run
from fl_privacy.runs.folder.records import RecordWriter

TINY = ("federation.clients=2", "federation.rounds=3", "victims=1", "attack=idlg")
TINY += ("attack.iterations=2", "intercept.when=during")


def _error(capfd: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.long
def test_a_disk_that_fills_up_during_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = RecordWriter.append

    def append(self: RecordWriter, record: dict[str, object]) -> None:
        if record.get("round") == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))
        whole(self, record)

    monkeypatch.setattr(RecordWriter, "append", append)
    assert run_command_line(["run", *TINY, f"out={tmp_path}"]) == 2
    assert "Room to write" in _error(capfd)
    (folder,) = tmp_path.glob("[!.]*")
    recorded = read_run(folder)
    assert not recorded.finished
    assert [r["round"] for r in recorded.of_kind("round")] == [1]
    assert write_report([folder]).is_file()
    monkeypatch.undo()
    assert run_command_line(["run", *TINY, f"out={tmp_path}"]) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process")
def test_a_file_that_may_not_grow(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As a disk that is full, but true: the system refuses every write beyond 30 KiB of a file, here the model."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30 << 10, hard))
    try:
        status = run_command_line(["run", *TINY[:2], "attack=none", f"out={tmp_path}"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capfd.readouterr().err
    assert status == 2
    assert "Traceback" not in said
    assert [line for line in said.splitlines() if line.startswith("error: ")] == [said.splitlines()[-1]]
    (folder,) = tmp_path.glob("[!.]*")
    assert read_run(folder).of_kind("round")


NO_MEMORY = (
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ImportError("libc10.so: cannot allocate memory in static TLS block"),
)


@pytest.mark.parametrize("error", NO_MEMORY)
def test_too_little_memory(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("fl_privacy.runs.run.build_setup", refuse)
    assert run_command_line(["run", *TINY, f"out={tmp_path}"]) == 2
    assert "memory" in _error(capfd)


@pytest.mark.parametrize("error", NO_MEMORY)
def test_too_little_memory_to_load_what_is_named(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise ImportError(f"Error loading {path}") from error

    monkeypatch.setattr("fl_privacy.runs.config.building.hydra.utils.get_object", refuse)
    with pytest.raises(MemoryError):
        locate_target({"_target_": "fl_privacy.attacks.idlg"}, "attack")


def test_other_runtime_errors_are_defects_and_stay_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr("fl_privacy.runs.run.build_setup", refuse)
    with pytest.raises(RuntimeError, match="shapes differ"):
        run_command_line(["run", *TINY, f"out={tmp_path}"])


def test_the_traceback_is_there_for_who_asks(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["run", "attack=idgl", "--debug"]) == 2
    assert "Traceback" in capfd.readouterr().err
    assert run_command_line(["run", "attack=idgl"]) == 2
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/a/b"), "Room to write is expected for /a/b"),
        (OSError(errno.EROFS, "Read-only file system", "/a/b"), "/a/b is expected to be usable"),
        (OSError("odd"), "odd"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit"),
        (MemoryError(), "memory"),
    ],
)
def test_faults_in_a_line(error: BaseException, expected: str) -> None:
    line = in_a_line(error)
    assert expected in line
    assert "\n" not in line
