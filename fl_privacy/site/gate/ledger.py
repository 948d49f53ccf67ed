"""Privacy ledger of a site: a chained file of all messages, written before the app gets them, with an anchor."""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fl_privacy.errors import UserError
from fl_privacy.files import PRIVATE_FILE, make_missing_private, write_private
from fl_privacy.files.foreign import open_regular
from fl_privacy.site.gate.entries import BEGINNING, DAY, YEARS, Account, Entry, Limits, Moment, moment_now

LARGEST_LEDGER = 1 << 30
LARGEST_LINE, LONGEST_LEFT = 1 << 12, 300
_DIGEST = re.compile("[0-9a-f]{64}")


class LedgerError(UserError):
    """Raised if the ledger can't be trusted or written; no reply leaves the site."""


class Ledger:
    """File that records each message to a site's apps and its privacy cost; several processes may share it.

    A second file, the anchor, has number and digest of the last entry, to notice if an older ledger takes the place of
    the current one. ``LedgerError`` if one path is inside the other.

    Args:
        path: ledger's file, private to its owner; created, unless the anchor shows that one was deleted.
        anchor: anchor's file, best in another folder.
        clock: function that returns the time as ``Moment`` or as seconds since 1970.
    """

    def __init__(self, path: Path, anchor: Path, *, clock: Callable[[], Moment | float] = moment_now) -> None:
        self.path, self.anchor, self._clock = path, anchor, clock
        real, other = Path(os.path.realpath(path)), Path(os.path.realpath(anchor))
        if real.is_relative_to(other) or other.is_relative_to(real):
            raise LedgerError(f"The anchor of {path} is expected elsewhere, but is {anchor}; take a folder of its own.")
        self._known = Account()
        self._looked = Moment(math.inf)
        self._time = YEARS[0]

    def account(self) -> Account:
        """Return the totals of all entries; ``LedgerError`` if the ledger or its anchor was altered."""
        with self._locked() as descriptor:
            return self._read(descriptor)

    def append(
        self,
        *,
        kind: str,
        outcome: str,
        rho: float | None,
        run: str,
        app: str,
        policy: str,
        limits: Limits | None = None,
        fab: str = "",
        approved_by: str = "",
    ) -> Account:
        """Write an entry before the app gets a message; return the totals of all entries.

        Arguments are fields of :class:`Entry`. ``ExhaustedError`` beyond ``limits``; ``LedgerError`` if writing fails,
        or if the ledger or its anchor was altered.
        """
        with self._locked() as descriptor:
            account = self._read(descriptor)
            parts = {"kind": kind, "outcome": outcome, "run": run[:64], "app": app[:200], "policy": policy}
            entry = self._next(account, **parts, fab=fab, approved_by=approved_by[:64], rho=rho)
            if limits is not None:
                limits.expect_room(account, rho, kind, entry.when)
            return self._write(descriptor, account, entry)

    def settle(self, number: int, outcome: str, rho: float | None, left: str = "") -> Account:
        """Write the outcome of the open entry ``number``, and return the totals of all entries.

        ``rho``: privacy cost (zCDP) of the entry; ``None`` if weights were sent without noise. ``left``: description of
        what was sent. ``LedgerError`` if the entry is not open, writing fails, or the files were altered.
        """
        with self._locked() as descriptor:
            account = self._read(descriptor)
            if (asked := account.open.get(number)) is None:
                raise LedgerError(f"{self.path} is expected to have entry {number} open, but it is not; settle once.")
            left = left if len(left) <= LONGEST_LEFT else f"{left[:LONGEST_LEFT]} and more"
            parts = {**vars(asked), "outcome": outcome, "rho": rho, "left": left}
            return self._write(descriptor, account, self._next(account, **parts))

    def mend(self, rho: float | None) -> bool:
        """Replace an incomplete last line by an entry that costs ``rho`` (zCDP); return ``False`` if there is none."""
        with self._locked() as descriptor:
            size = os.fstat(descriptor).st_size
            torn = len(os.pread(descriptor, LARGEST_LINE, max(0, size - LARGEST_LINE)).rpartition(b"\n")[2])
            if not torn:
                return False
            account = self._read(descriptor, size - torn)
            os.ftruncate(descriptor, size - torn)
            parts = {"kind": "mended", "outcome": "sent", "run": "", "app": "", "policy": ""}
            self._write(descriptor, account, self._next(account, **parts, rho=rho))
            return True

    def entries(self) -> list[Entry]:
        found: list[Entry] = []
        with self._locked() as descriptor:
            self._read(descriptor)
            for line in _lines(descriptor, 0, os.fstat(descriptor).st_size):
                entry = Entry.read(line)
                found[entry.number - 1 :] = [entry, *found[entry.number :]]
        return found

    def _next(self, account: Account, **parts: Any) -> Entry:
        """Return the next entry, with fields ``parts``; it is dated by uptime, which nobody can set."""
        now = self._clock()
        moment = now if isinstance(now, Moment) else Moment(now)
        if not YEARS[0] <= moment.clock <= YEARS[1]:
            raise LedgerError(f"The clock is expected to say a date, but says {moment.clock} s since 1970; set it.")
        if not account.entries:
            self._time = moment.clock
        elif (passed := moment.since(account.moment)) is not None:
            self._time = account.when + passed
        else:
            self._time = max(self._time, account.when) + (moment.since(self._looked) or 0.0)
        self._looked = moment
        if self._time >= account.when + DAY:
            self._time = max(self._time, moment.clock)
        about = {"clock": moment.clock, "boot": moment.boot, "up": moment.up, "before": account.digest}
        return Entry(**{"number": account.entries + 1, **parts, **about, "when": self._time})

    def _write(self, descriptor: int, account: Account, entry: Entry) -> Account:
        line = entry.line
        if len(line) > LARGEST_LINE or account.size + len(line) > LARGEST_LEDGER:
            raise LedgerError(f"The ledger {self.path} is expected to have room, but is full; begin another one.")
        after = account.copy()
        try:
            after.add(Entry.read(line), line)  # an unreadable line would end the ledger
        except (ValueError, TypeError) as error:
            raise LedgerError(f"The ledger {self.path} is expected to be given an entry, but got {entry}.") from error
        anchored = False
        try:
            if (written := os.write(descriptor, line)) != len(line):
                raise OSError(None, f"only {written} of {len(line)} bytes fit")
            if after.entries > account.entries:
                os.fsync(descriptor)
                anchored = True
                self._drop_anchor(after)
        except OSError as error:
            with contextlib.suppress(OSError, LedgerError):
                if anchored and self._anchored(after.size)[0] > account.entries:
                    self._drop_anchor(account)  # otherwise the anchored entry stays, and counts
                os.ftruncate(descriptor, account.size)
                os.fsync(descriptor)
            said = error.strerror or error
            raise LedgerError(f"The ledger {self.path} can't be written: {said}; check space and rights.") from error
        self._known = after
        return after

    def _drop_anchor(self, account: Account) -> None:
        write_private(self.anchor, json.dumps({"entries": account.entries, "digest": account.asked}))
        _sync_folder(self.anchor.parent)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        try:
            descriptor = self._opened()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                _expect_own(descriptor, self.path)
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as error:
            said = error.strerror or error
            raise LedgerError(f"The ledger {self.path} can't be opened: {said}; check its rights.") from error

    def _opened(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW
        begun = os.path.lexists(self.anchor)  # checked first: another process makes the ledger before the anchor
        with contextlib.suppress(FileNotFoundError):
            return _regular(self.path, flags)
        if begun:
            raise LedgerError(
                f"{self.path} is expected with its anchor {self.anchor}, but is missing; restore its newest copy."
            )
        for folder in (self.path.parent, self.anchor.parent):
            make_missing_private(folder)
        descriptor = _regular(self.path, flags | os.O_CREAT)
        _sync_folder(self.path.parent)
        return descriptor

    def _read(self, descriptor: int, size: int | None = None) -> Account:
        size = os.fstat(descriptor).st_size if size is None else size
        if size > LARGEST_LEDGER:
            raise LedgerError(f"{self.path} is expected to have at most 1024 MiB, but is larger; begin a new one.")
        entries, digest = self._anchored(size)
        known = self._known
        tail = os.pread(descriptor, min(known.size, LARGEST_LINE), max(0, known.size - LARGEST_LINE))
        last = hashlib.sha256(tail[:-1].rpartition(b"\n")[2] + b"\n").hexdigest()
        account = known.copy() if 0 < known.size <= size and last == known.digest else Account()
        seen = account.asked if account.entries == entries else None
        for line in _lines(descriptor, account.size, size):
            if not line.endswith(b"\n") and len(line) < LARGEST_LINE:
                raise LedgerError(
                    f"The ledger {self.path} ends in a torn line; `fl-privacy policy show-ledger SITE.yaml --mend`"
                    " counts it as one reply."
                )
            try:
                entry = Entry.read(line)
            except (ValueError, TypeError, RecursionError) as error:
                after = f"after {account.entries}"
                raise LedgerError(f"{self.path} has a line that is no entry, {after}; restore a sound copy.") from error
            try:
                account.add(entry, line)
            except ValueError as error:
                wrong = f"entry {entry.number} does not follow"
                raise LedgerError(f"The ledger {self.path} was changed: {wrong}; restore its newest copy.") from error
            seen = account.asked if account.entries == entries else seen
        if seen not in {None, digest}:
            raise LedgerError(
                f"The ledger {self.path} does not fit its anchor {self.anchor}: its past was changed; restore both."
            )
        if account.entries < (most := max(entries, known.entries)):
            raise LedgerError(
                f"The ledger {self.path} is older than it was: it has {account.entries} entries of the {most}"
                f" that {self.anchor} knows of; restore its newest copy."
            )
        self._known = account
        return account

    def _anchored(self, size: int) -> tuple[int, str]:
        try:
            with os.fdopen(_regular(self.anchor, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                _expect_own(file.fileno(), self.anchor)
                found = json.loads(file.read(LARGEST_LINE))
            entries, digest = found["entries"], found["digest"]
            if type(entries) is not int or entries < 0 or not _DIGEST.fullmatch(digest):
                raise ValueError("no anchor")
        except FileNotFoundError:
            if size:
                lost = f"The anchor {self.anchor} of the ledger {self.path} is missing"
                raise LedgerError(f"{lost}; restore its newest copy.") from None
            self._drop_anchor(Account())  # the ledger is new, or the process that began it was killed
            return 0, BEGINNING
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise LedgerError(f"The anchor {self.anchor} can't be read; restore its newest copy.") from error
        return entries, digest


def _lines(descriptor: int, start: int, end: int) -> Iterator[bytes]:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(start)
        while line := file.readline(min(LARGEST_LINE, end - start)):
            start += len(line)
            yield line


def _regular(path: Path, flags: int) -> int:
    try:
        return open_regular(path, flags, PRIVATE_FILE)
    except UserError as error:
        raise LedgerError(str(error)) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _expect_own(descriptor: int, path: Path) -> None:
    status = os.fstat(descriptor)
    if status.st_mode & 0o077 or status.st_uid != os.geteuid():
        raise LedgerError(f"{path} is expected to be private to its owner, but others own or read it; chmod 600 it.")
    if status.st_nlink != 1:
        raise LedgerError(f"{path} is expected to have one name, but has {status.st_nlink}; remove its hard links.")
