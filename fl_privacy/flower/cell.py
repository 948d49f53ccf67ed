"""An app in a process of its own, which has no network, no key, no ledger, and answers to the gate alone."""

import fcntl
import json
import logging
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from flwr.app import Context, Message

from fl_privacy.errors import UserError, say
from fl_privacy.federation.replies import printable
from fl_privacy.flower.inside.serialized import context_bytes, context_of, message_from_parts, message_parts
from fl_privacy.gate.framing import framed
from fl_privacy.gate.isolation import Held, Wishes
from fl_privacy.gate.policy import AppLimits
from fl_privacy.gate.rules import RefusedError

logger = logging.getLogger(__name__)

LOAD_SECONDS = 600.0
PIECE = 1 << 20
"""Bytes that are written or read at once."""

MOST_PARTS = 100_000
"""Arrays of a message, and what is beside them."""

LONGEST_LINE = 1000
"""Bytes of a line that an app prints; a longer one goes on in another."""

LARGEST_WORD = 1 << 16
"""Bytes of what a cell says of itself."""

MORE = 64 << 20
"""Bytes that a reply and the app's state may have beyond twice the message."""

GIVEN = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Variables of the environment that an app is given."""


class Cell:
    """An installed ``ClientApp``, called as one, in a process that is started when it is needed.

    Args:
        app: ``package.module:attribute``.
        limits: what its process may do.
    """

    def __init__(self, app: str, limits: AppLimits) -> None:
        self.app, self.limits = app, limits
        self.held: Held | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._pipes: tuple[int, int] = (-1, -1)

    def start(self) -> Held:
        """Start the process and have it load the app; return what keeps it apart.

        Raises:
            UserError: it can't be kept apart as the policy requires, or the app can't be loaded.
        """
        self.close()
        self._folder = Path(tempfile.mkdtemp(prefix="fl-privacy-cell-")).resolve()
        work = self._folder / "work"
        work.mkdir(mode=0o700)
        (self._folder / "root").mkdir(mode=0o700)
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fl_privacy.cli.gated_app"],
            stdin=theirs_in,
            stdout=theirs_out,
            stderr=subprocess.PIPE,
            cwd=work,
            env=self._environment(work),
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        threading.Thread(target=_relay, args=(self._process.stderr,), daemon=True).start()
        self._pipes = ours_in, ours_out
        _enlarge(ours_in, ours_out)
        os.set_blocking(ours_in, False)
        os.set_blocking(ours_out, False)
        wishes = Wishes(
            temporary=str(work),
            reads=tuple(map(str, self.limits.reads)),
            writes=tuple(map(str, self.limits.writes)),
            most_bytes=self.limits.most_bytes,
        )
        try:
            return self._loaded(wishes)
        except RefusedError as error:
            self.close()
            raise UserError(f"--app is expected to be loaded, but {self.app} does not answer: {error}.") from error
        except UserError:
            self.close()
            raise
        except (ValueError, TypeError) as error:  # the app's code has written between the two answers
            self.close()
            raise UserError(
                f"--app is expected to be loaded, but {self.app} said something else; repair it."
            ) from error

    def _loaded(self, wishes: Wishes) -> Held:
        deadline = time.monotonic() + LOAD_SECONDS
        self._send([json.dumps({"app": self.app, "wishes": wishes.as_plain()}).encode()], deadline)
        (told,) = self._receive(LARGEST_WORD, deadline)  # before the app's code runs
        held = Held(**json.loads(told))
        logger.warning("%s", held.in_words())
        if self.limits.required and not held.is_enough:
            raise UserError(
                f"app.isolation is expected to be had, but is not: {held.in_words()} Say isolation: where_possible to"
                " run the app all the same."
            )
        (reason,) = self._receive(LARGEST_WORD, deadline)
        if reason:
            raise UserError(reason.decode(errors="replace"))
        self.held = held
        return held

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the app's reply, and put its state into ``context``.

        A process that ended, took too long or said anything else than one answer is ended; the next message starts
        another one.

        Raises:
            RefusedError: it failed, took too long, or said what is no reply.
        """
        self._expect_running()
        asked = [context_bytes(context), *message_parts(message)]
        deadline = time.monotonic() + self.limits.seconds
        try:
            self._send(asked, deadline)
            most = 2 * sum(map(len, asked)) + MORE
            failed, state, *reply = self._receive(most, deadline)
            answer = None if failed else message_from_parts(reply)
            kept = context_of(state).state
        except RefusedError:
            self.close()
            raise
        except Exception as error:  # whatever bytes that are no message raise
            self.close()
            raise RefusedError("app", f"it replied what is no message: {type(error).__name__}: {error}") from error
        context.state = kept
        if answer is None:
            raise RefusedError("app", failed.decode(errors="replace")[:1000])
        return answer

    def _expect_running(self) -> None:
        """Start the process where it has ended, or has said something that nobody asked for."""
        if self._process is not None and self._process.poll() is None and not self._has_said_more():
            return
        try:
            self.start()
        except UserError as error:
            raise RefusedError("isolation", str(error)) from error

    def _has_said_more(self) -> bool:
        poll = select.poll()
        poll.register(self._pipes[0], select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """End the process of the cell, with all that it has started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for descriptor in self._pipes:
            if descriptor >= 0:
                os.close(descriptor)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._process, self._folder, self._pipes = None, None, (-1, -1)

    def _environment(self, work: Path) -> dict[str, str]:
        names = (*GIVEN, *self.limits.environment)
        given = {name: os.environ[name] for name in names if name in os.environ}
        if paths := given.get("PYTHONPATH"):  # it works elsewhere
            given["PYTHONPATH"] = os.pathsep.join(str(Path(one).absolute()) for one in paths.split(os.pathsep) if one)
        return {**given, "HOME": str(work), "TMPDIR": str(work), "PYTHONDONTWRITEBYTECODE": "1"}

    def _send(self, parts: Sequence[bytes], deadline: float) -> None:
        for part in framed(parts):
            content = memoryview(part)
            while content:
                content = content[self._written(content[:PIECE], deadline) :]

    def _written(self, content: memoryview, deadline: float) -> int:
        while True:
            self._wait(self._pipes[1], select.POLLOUT, deadline)
            try:
                return os.write(self._pipes[1], content)
            except BlockingIOError:
                continue
            except OSError as error:
                raise RefusedError("app", f"its process has ended{self._status()}") from error

    def _receive(self, most: int, deadline: float) -> list[bytes]:
        (number,) = struct.unpack(">Q", self._bytes(8, deadline))
        if not 0 < number <= MOST_PARTS:
            raise RefusedError("size", f"the app replied {number} parts, and at most {MOST_PARTS} are read")
        sizes = struct.unpack(f">{number}Q", self._bytes(8 * number, deadline))
        if sum(sizes) > most:
            raise RefusedError("size", f"the app replied {sum(sizes)} bytes, and at most {most} are read")
        return [self._bytes(size, deadline) for size in sizes]

    def _bytes(self, size: int, deadline: float) -> bytes:
        found = bytearray(size)
        rest = memoryview(found)
        while rest:
            self._wait(self._pipes[0], select.POLLIN, deadline)
            try:
                length = os.readv(self._pipes[0], [rest[:PIECE]])
            except BlockingIOError:
                continue
            if not length:
                raise RefusedError("app", f"its process has ended{self._status()}")
            rest = rest[length:]
        return bytes(found)

    def _status(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                return f" with status {self._process.wait(1.0)}"
        return ""

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise RefusedError("time", f"the app did not answer within {self.limits.seconds:g} s")


def _relay(said: IO[bytes]) -> None:
    """Print what the app says on this process's standard error, without what would move a terminal's cursor."""
    with said, suppress(OSError, ValueError):
        while line := said.readline(LONGEST_LINE):
            say(f"app: {printable(line.decode(errors='replace').rstrip())}", aside=True)


def _enlarge(*pipes: int) -> None:
    """Let pipes hold as much as the system allows a user, so that weights take fewer turns."""
    for pipe in pipes if hasattr(fcntl, "F_SETPIPE_SZ") else ():
        with suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIECE)
