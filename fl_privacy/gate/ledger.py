"""The ledger of what has left a site: appended and synced before a reply leaves, chained, anchored elsewhere."""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fl_privacy.errors import UserError
from fl_privacy.files import PRIVATE_FILE, make_missing_private, write_private
from fl_privacy.gate.accounting import epsilon_of

LARGEST_LEDGER = 1 << 30
LARGEST_LINE = 1 << 12
DAY = 86_400.0
BEGINNING = "0" * 64
"""What the first entry follows."""


class LedgerError(UserError):
    """The ledger can't be trusted or written: nothing leaves."""


class ExhaustedError(UserError):
    """The budget or the rounds of a day are used up: nothing leaves."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry of the ledger.

    Attributes:
        number: from 1.
        when: seconds since 1970, never below those of an earlier entry.
        kind: of message: ``train``, ``evaluate``, ``query``; ``mended`` in place of a torn line.
        outcome: ``sent``, or why nothing of the app left: ``refused``, ``failed``.
        rho: of zCDP, of a change that is there or not; 0 of what carries no weights; ``None`` where no noise bounds it.
            With noise, a reply that was refused spends as one that was sent: an app may fail to say something.
        run: of Flower.
        app: that answered.
        policy: beginning of the SHA-256 of the policy's file.
        before: SHA-256 of the line before.
    """

    number: int
    when: float
    kind: str
    outcome: str
    rho: float | None
    run: str
    app: str
    policy: str
    before: str

    @property
    def line(self) -> bytes:
        """Return the entry as its line of the file, with the line's end."""
        return json.dumps(asdict(self), separators=(",", ":"), ensure_ascii=True).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> "Entry":
        """Parse a line that ``line`` has written.

        Raises:
            ValueError: it is no such line, to the byte.
        """
        found = json.loads(line)
        if not isinstance(found, dict) or found.keys() != cls.__dataclass_fields__.keys():
            raise ValueError("no entry")
        entry = cls(**found)
        rho = entry.rho
        if rho is not None and not (isinstance(rho, int | float) and 0 <= rho < math.inf):
            raise ValueError("no rho")
        if isinstance(entry.when, bool) or not isinstance(entry.when, int | float) or entry.line != line:
            raise ValueError("not as it was written")
        return entry


@dataclass(frozen=True)
class Account:
    """The sum of a ledger's entries.

    Attributes:
        entries: how many.
        digest: of the last line.
        when: of the last entry.
        rho: spent, of changes that are there or not.
        unbounded: weights that left without noise.
        recent: when messages reached the app in the last day, and of which kind.
        size: of the file, bytes.
    """

    entries: int = 0
    digest: str = BEGINNING
    when: float = 0.0
    rho: float = 0.0
    unbounded: int = 0
    recent: tuple[tuple[float, str], ...] = ()
    size: int = 0

    def plus(self, entry: Entry, line: bytes) -> "Account":
        """Add ``entry`` to the account."""
        recent = tuple(one for one in self.recent if one[0] > entry.when - DAY)
        return Account(
            entries=entry.number,
            digest=hashlib.sha256(line).hexdigest(),
            when=entry.when,
            rho=math.fsum((self.rho, entry.rho or 0.0)),
            unbounded=self.unbounded + (entry.rho is None),
            recent=(*recent, (entry.when, "train" if entry.kind == "mended" else entry.kind)),
            size=self.size + len(line),
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits that a ledger enforces.

    Attributes:
        epsilon: ``None`` counts only.
        delta: at which it is kept.
        factor: of the unit of protection, see ``accounting.FACTORS``.
        rounds_per_day: messages of each kind that reach the app; ``None`` are all.
    """

    epsilon: float | None = None
    delta: float = 1e-5
    factor: float = 1.0
    rounds_per_day: int | None = None

    def spent(self, account: Account) -> float:
        """Compute the epsilon of all that has left; infinite where weights left without noise."""
        return math.inf if account.unbounded else epsilon_of(self.factor * account.rho, self.delta)

    def expect_room(self, account: Account, rho: float | None, kind: str, when: float) -> None:
        """Refuse a message whose reply would go beyond.

        Raises:
            ExhaustedError: it would.
        """
        if self.epsilon is not None:
            after = replace(account, rho=account.rho + (rho or 0.0), unbounded=account.unbounded + (rho is None))
            if self.spent(after) > self.epsilon:
                raise ExhaustedError(
                    f"The budget of epsilon {self.epsilon:g} is used up: {self.spent(account):.4g} is spent and this"
                    " reply would go beyond."
                )
        if self.rounds_per_day is not None:
            recent = [one for one in account.recent if one[0] > when - DAY and one[1] == kind]
            if len(recent) >= self.rounds_per_day:
                raise ExhaustedError(f"The {self.rounds_per_day} rounds of this day are used up.")


class Ledger:
    """The file, which several processes may share.

    An entry is written in one piece, the file and then the anchor are synced, and only then does the caller's reply
    leave. The anchor, in another folder, has number and digest of the last entry: a ledger without that entry, put back
    from a copy, is noticed. It can't be noticed where both are put back together.

    Args:
        path: of the file; made for its owner alone where neither it nor the anchor exists.
        anchor: of the anchor.
        clock: seconds since 1970; one that is set back counts as standing still.
    """

    def __init__(self, path: Path, anchor: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.path, self.anchor, self._clock = path, anchor, clock
        self._known = Account()

    def account(self) -> Account:
        """Return the account of what has left so far.

        Raises:
            LedgerError: file or anchor is missing, torn, changed, older than the other, or not its owner's alone.
        """
        with self._locked() as descriptor:
            return self._read(descriptor)

    def expect_room(self, limits: Limits, rho: float | None, kind: str) -> Account:
        """Check that one more reply is within ``limits``, and return the account.

        Raises:
            ExhaustedError: it is not.
            LedgerError: see ``account``.
        """
        account = self.account()
        limits.expect_room(account, rho, kind, self._now(account))
        return account

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
    ) -> Account:
        """Write an entry that lasts, before the reply leaves; with ``limits`` only where it is within them.

        Raises:
            ExhaustedError: it is not.
            LedgerError: it can't be written, or see ``account``; what was written in part is taken back.
        """
        with self._locked() as descriptor:
            account = self._read(descriptor)
            when = self._now(account)
            if limits is not None:
                limits.expect_room(account, rho, kind, when)
            entry = Entry(
                number=account.entries + 1,
                when=when,
                kind=kind,
                outcome=outcome,
                rho=rho,
                run=run[:64],
                app=app[:200],
                policy=policy,
                before=account.digest,
            )
            return self._write(descriptor, account, entry)

    def mend(self, rho: float | None) -> bool:
        """Put an entry that spends ``rho`` in place of a torn last line; whether there was one.

        Raises:
            LedgerError: anything else is wrong with it.
        """
        with self._locked() as descriptor:
            content = _content(descriptor)
            whole = content.rpartition(b"\n")
            if not whole[2]:
                return False
            os.ftruncate(descriptor, len(content) - len(whole[2]))
            account = self._read(descriptor)
            entry = Entry(
                number=account.entries + 1,
                when=self._now(account),
                kind="mended",
                outcome="sent",
                rho=rho,
                run="",
                app="",
                policy="",
                before=account.digest,
            )
            self._write(descriptor, account, entry)
            return True

    def entries(self) -> list[Entry]:
        """Return all entries after checking their chain.

        Raises:
            LedgerError: see ``account``.
        """
        with self._locked() as descriptor:
            self._read(descriptor)
            return [Entry.read(line) for line in _content(descriptor).splitlines(keepends=True)]

    def _now(self, account: Account) -> float:
        return max(self._clock(), account.when)

    def _write(self, descriptor: int, account: Account, entry: Entry) -> Account:
        line = entry.line
        if len(line) > LARGEST_LINE or account.size + len(line) > LARGEST_LEDGER:
            raise LedgerError("The ledger is expected to stay within its size, but is full; begin another one.")
        try:
            _write_all(descriptor, line)
            os.fsync(descriptor)
            after = account.plus(entry, line)
            self._drop_anchor(after)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, account.size)
                os.fsync(descriptor)
            raise LedgerError(f"The ledger {self.path} can't be written: {error.strerror or error}.") from error
        self._known = after
        return after

    def _drop_anchor(self, account: Account) -> None:
        write_private(self.anchor, json.dumps({"entries": account.entries, "digest": account.digest}))
        _sync_folder(self.anchor.parent)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Open the ledger, make it if it is the first time, and lock it."""
        try:
            descriptor = self._opened()
        except OSError as error:
            raise LedgerError(f"The ledger {self.path} can't be opened: {error.strerror or error}.") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            _expect_own(descriptor, self.path)
            yield descriptor
        finally:
            os.close(descriptor)

    def _opened(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.suppress(FileNotFoundError):
            return os.open(self.path, flags)
        if self.anchor.exists():
            raise LedgerError(
                f"The ledger {self.path} is missing, but its anchor {self.anchor} says that it was begun; put it back."
            )
        for folder in (self.path.parent, self.anchor.parent):
            make_missing_private(folder)
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.close(os.open(self.path, flags | os.O_CREAT | os.O_EXCL, PRIVATE_FILE))
            _sync_folder(self.path.parent)
            self._drop_anchor(Account())
        return os.open(self.path, flags)

    def _read(self, descriptor: int) -> Account:
        """Compute the account of the whole file, reading only the lines that are new."""
        size = os.fstat(descriptor).st_size
        anchored = self._anchored(size)
        account = self._known if self._known.size <= size and self._is_known(descriptor) else Account()
        for line in _content(descriptor, account.size).splitlines(keepends=True):
            account = account.plus(self._checked(line, account), line)
            if account.entries == anchored[0] and account.digest != anchored[1]:
                raise LedgerError(
                    f"The ledger {self.path} is not the one that {self.anchor} knows: its past was changed."
                )
        if account.entries < anchored[0]:
            raise LedgerError(
                f"The ledger {self.path} is older than it was: it has {account.entries} entries of the {anchored[0]}"
                f" that {self.anchor} knows of; put the newest one back."
            )
        self._known = account
        return account

    def _checked(self, line: bytes, account: Account) -> Entry:
        """Parse a line and check that it follows the last entry of ``account``."""
        if not line.endswith(b"\n"):
            raise LedgerError(
                f"The ledger {self.path} ends in a torn line; `fl-privacy policy show-ledger SITE.yaml --mend` counts"
                " it as one reply."
            )
        try:
            entry = Entry.read(line)
        except (ValueError, TypeError, RecursionError) as error:
            raise LedgerError(
                f"The ledger {self.path} has a line that is no entry, after {account.entries}."
            ) from error
        if entry.number != account.entries + 1 or entry.before != account.digest or entry.when < account.when:
            raise LedgerError(f"The ledger {self.path} was changed: entry {account.entries + 1} does not follow.")
        return entry

    def _is_known(self, descriptor: int) -> bool:
        """Say whether the last known line is still where it was."""
        tail = os.pread(descriptor, min(self._known.size, LARGEST_LINE), max(0, self._known.size - LARGEST_LINE))
        line = tail[:-1].rpartition(b"\n")[2] + b"\n"
        return self._known.size > 0 and hashlib.sha256(line).hexdigest() == self._known.digest

    def _anchored(self, size: int) -> tuple[int, str]:
        """Return number and digest of the last entry that the anchor of a ledger of ``size`` bytes knows."""
        try:
            found = json.loads(self.anchor.read_bytes())
            return int(found["entries"]), str(found["digest"])
        except FileNotFoundError:
            if size:
                raise LedgerError(
                    f"The anchor {self.anchor} of the ledger {self.path} is missing; put it back."
                ) from None
            self._drop_anchor(Account())  # the process that began it was ended
            return 0, BEGINNING
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LedgerError(f"The anchor {self.anchor} of the ledger can't be read; put it back.") from error


def _content(descriptor: int, start: int = 0) -> bytes:
    size = os.fstat(descriptor).st_size
    if size > LARGEST_LEDGER:
        raise LedgerError(f"The ledger is expected to have at most {LARGEST_LEDGER >> 20} MiB, but is larger.")
    return os.pread(descriptor, size - start, start) if size > start else b""


def _write_all(descriptor: int, line: bytes) -> None:
    if (written := os.write(descriptor, line)) != len(line):
        raise OSError(None, f"only {written} of {len(line)} bytes fit")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _expect_own(descriptor: int, path: Path) -> None:
    status = os.fstat(descriptor)
    if status.st_mode & 0o077 or status.st_uid != os.geteuid():
        raise LedgerError(f"{path} is expected to be its user's alone, but others own or read it; chmod 600 it.")
