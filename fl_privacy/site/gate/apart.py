"""Isolated process for third-party code, and the pipes to it."""

import atexit
import errno
import fcntl
import json
import logging
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from fl_privacy.errors import say, visible
from fl_privacy.files import make_temporary, remove_temporary
from fl_privacy.site.gate.framing import framed
from fl_privacy.site.gate.isolation import Isolation, Wishes
from fl_privacy.site.gate.rules import RefusedError
from fl_privacy.site.gate.warden import ENDED

logger: logging.Logger = logging.getLogger(__name__)

PIECE = 1 << 20  # most bytes that are written or received at once
MOST_PARTS = 100_000  # most parts of a message
LONGEST_LINE = 1000  # most bytes of a line printed by an app; longer lines are split

LINES_AT_ONCE, LINES_EACH_SECOND = 1000, 1.0
"""Most lines that an app prints at once, and lines that it may print in addition each second."""

LARGEST_WORD = 1 << 16  # most bytes of a process's report on its isolation

GIVEN = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Environment variables that are passed to the process."""


_open = set["Apart"]()


class Apart:
    """Process that gives up its access to files and network, and then runs third-party code.

    The process has no terminal and no file descriptor of its parent; the parent must call ``close``. Deadlines are
    those of ``time.monotonic``. ``OSError`` if no process, thread, folder or pipe is available.

    Args:
        module: module to run, which reports its ``Isolation`` in reply to the first message.
        wishes: resources that the process may use; ``wishes.temporary`` is replaced by a new folder.
        variables: environment variables in addition to those in ``GIVEN``, which the parent passes on.
    """

    def __init__(self, module: str, wishes: Wishes, variables: Mapping[str, str]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: list[int] = []
        self._folder: Path | None = make_temporary("fl-privacy-cell-")
        theirs: list[int] = []
        _open.add(self)
        try:
            work = self._folder / "work"
            for folder in (work, self._folder / "root"):
                folder.mkdir(mode=0o700)
            for mine in (0, 1):  # read, written
                ends = os.pipe()
                self._pipes.append(ends[mine])
                theirs.append(ends[1 - mine])
                os.set_blocking(ends[mine], False)
                with suppress(OSError, AttributeError):  # as large as allowed, so that weights take fewer turns
                    fcntl.fcntl(ends[mine], fcntl.F_SETPIPE_SZ, PIECE)
            given = {name: os.environ[name] for name in GIVEN if name in os.environ}
            if paths := given.get("PYTHONPATH"):  # the process has another working folder
                absolute = [str(Path(one).absolute()) for one in paths.split(os.pathsep) if one]
                given["PYTHONPATH"] = os.pathsep.join(absolute)
            own = {"HOME": str(work), "TMPDIR": str(work), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=theirs[1],
                stdout=theirs[0],
                stderr=subprocess.PIPE,
                cwd=work,
                env={**given, **own, **variables},
                start_new_session=True,
            )
            threading.Thread(target=_relay, args=(self._process.stderr,), daemon=True).start()
        except BaseException as error:
            if self._process is not None and self._process.stderr is not None:
                self._process.stderr.close()
            self.close()
            if isinstance(error, RuntimeError):
                raise OSError(errno.EAGAIN, str(error)) from error
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self.wishes = replace(wishes, temporary=str(work))

    def begin(self, asked: Mapping[str, Any], deadline: float) -> Isolation:
        """Send the request ``asked``; return the isolation that the process reports before it loads an app's code."""
        self.send([json.dumps({**asked, "wishes": asdict(self.wishes)}).encode()], deadline)
        (answer,) = self.receive(LARGEST_WORD, deadline)
        return Isolation(**json.loads(answer))

    @property
    def is_quiet(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            return False
        poll = select.poll()
        poll.register(self._pipes[0], select.POLLIN)
        return not poll.poll(0)

    def end(self) -> None:
        """Kill the process with its children; any thread may call this."""
        if (process := self._process) is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.end()
        _open.discard(self)
        process, pipes, folder = self._process, self._pipes, self._folder
        self._process, self._pipes, self._folder = None, [], None
        if process is not None:
            process.wait()
        for descriptor in pipes:
            os.close(descriptor)
        if folder is not None:
            remove_temporary(folder)

    def send(self, parts: Sequence[bytes], deadline: float) -> None:
        """Send ``parts`` as one message; ``RefusedError`` if the process has not received it by ``deadline``."""
        for part in framed(parts):
            content = memoryview(part)
            while content:
                self._wait(1, select.POLLOUT, deadline)
                try:
                    content = content[os.write(self._pipes[1], content[:PIECE]) :]
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise self._ended() from error

    def receive(self, most: int, deadline: float) -> list[bytes]:
        """Return the parts of the app's next message; ``RefusedError`` after ``deadline``, or beyond ``most`` bytes."""
        (number,) = struct.unpack(">Q", self._bytes(8, deadline))
        if not 0 < number <= MOST_PARTS:
            raise RefusedError("size", f"the app replied {number} parts, and at most {MOST_PARTS} are read; send fewer")
        sizes = struct.unpack(f">{number}Q", self._bytes(8 * number, deadline))
        if sum(sizes) > most:
            raise RefusedError("size", f"the app replied {sum(sizes)} bytes, and at most {most} are read; send fewer")
        return [self._bytes(size, deadline) for size in sizes]

    def _ended(self) -> RefusedError:
        why = ""
        with suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                code = self._process.wait(10.0)
                why = f": it went beyond {ENDED[code]}" if code in ENDED else f" with status {code}"
        return RefusedError("app", f"the app's process has ended{why}; mend the app, or start it again")

    def _bytes(self, size: int, deadline: float) -> bytes:
        found = bytearray(size)
        rest = memoryview(found)
        while rest:
            self._wait(0, select.POLLIN, deadline)
            try:
                length = os.readv(self._pipes[0], [rest[:PIECE]])
            except BlockingIOError:
                continue
            if not length:
                raise self._ended()
            rest = rest[length:]
        return bytes(found)

    def _wait(self, pipe: int, event: int, deadline: float) -> None:
        if self._process is None:
            raise RefusedError("app", "the app's process has ended; start the app again")
        poll = select.poll()
        poll.register(self._pipes[pipe], event)
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise RefusedError("time", "the app did not answer in time; make it faster, or give it more time")


@atexit.register
def close_all() -> None:
    """Close all isolated processes, before this process ends."""
    for apart in list(_open):
        apart.close()


def _relay(said: IO[bytes]) -> None:
    left, since, dropped = float(LINES_AT_ONCE), time.monotonic(), 0
    with said, suppress(OSError, ValueError):
        while True:
            line, now = said.readline(LONGEST_LINE), time.monotonic()
            left, since = min(LINES_AT_ONCE, left + (now - since) * LINES_EACH_SECOND), now
            if line and left < 1:
                dropped += 1
                continue
            left -= 1
            if dropped:
                say(f"app: ({dropped} lines were left out)", aside=True)
                dropped = 0
            if not line:
                return
            say(f"app: {visible(line.decode(errors='replace').rstrip())}", aside=True)
