"""Entries of a privacy ledger, their total, and the limits on it."""

import copy
import hashlib
import json
import math
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from fl_privacy import checks
from fl_privacy.errors import UserError

DAY = 86_400.0
BELIEVED = 31 * DAY  # longest step in seconds of the clock that counts as passed time after a reboot
YEARS = (-62_135_596_800.0, 253_402_300_799.0)  # least and largest seconds since 1970 in the years 1 to 9999
BEGINNING = "0" * 64  # digest in place of a line before the first one
ASKED = "asked"  # outcome of an entry before the app's reply; it counts like a reply that left
REFUSED_RUN = "run"  # kind of the entry of a refused run, which counts toward no limit

_OF_BUNDLES, _OF_A_LINE = ("fab", "approved_by", "left"), ("before", "clock", "boot", "up")


class ExhaustedError(UserError):
    """Raised if the budget or the daily rounds are used up; no reply leaves the site."""


@dataclass(frozen=True)
class Moment:
    """Time by the clock and by the machine's uptime, to notice if the clock was set."""

    clock: float  # seconds since 1970 by the clock, which anybody may have set
    boot: str = ""  # random name of the machine's boot; empty if unknown
    up: float = 0.0  # seconds since the boot, which nobody can set

    def since(self, earlier: "Moment") -> float | None:
        """Return the seconds since ``earlier``: by uptime within a boot, else by the clock; ``None`` if implausible."""
        if self.boot and self.boot == earlier.boot:
            return max(0.0, self.up - earlier.up)
        passed = self.clock - earlier.clock
        return passed if 0 <= passed <= BELIEVED else None


def moment_now() -> Moment:
    """Return the time now."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:8]
    return Moment(time.time(), boot, time.clock_gettime(time.CLOCK_BOOTTIME))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Entry of the ledger: one message to the app.

    It is written with the outcome ``ASKED`` before the app gets the message. After the reply, a line with the same
    number states the outcome; without an outcome, the cost of a reply is counted.

    Attributes:
        when: seconds since 1970 by the ledger's own time, which follows ``up`` and never runs back.
        kind: ``train``, ``evaluate`` or ``query``; ``run`` for a refused run, ``mended`` for a line that a crash cut
            off.
        outcome: ``ASKED``, ``sent``, or, if no reply was sent, ``refused`` or ``failed``.
        rho: privacy cost (zCDP) of the weights in the reply; 0 without weights, ``None`` without noise. A refused reply
            costs as much, since an app may choose to fail.
        policy: beginning of the SHA-256 of the policy's file.
        before: SHA-256 of the previous line.
        fab: SHA-256 of the run's app bundle; empty for an installed app.
        approved_by: user or rule that approved the run.
        left: description of what was sent, set with the outcome.
        clock, boot, up: machine's time of writing, see ``Moment``.
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
    clock: float | None = None
    boot: str = ""
    up: float = 0.0
    fab: str = ""
    approved_by: str = ""
    left: str = ""

    @property
    def moment(self) -> Moment:
        return Moment(self.when if self.clock is None else self.clock, self.boot, self.up)

    @property
    def line(self) -> bytes:
        written = {name: value for name, value in vars(self).items() if value or name not in _OF_BUNDLES}
        if self.clock is None:
            for name in ("clock", "boot", "up"):
                del written[name]
        return json.dumps(written, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> "Entry":
        """Parse an entry's line in a ledger; ``ValueError`` or ``TypeError`` for any other line."""
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError("no entry")
        entry = cls(**found)
        texts = [value for name, value in vars(entry).items() if name not in ("number", "when", "rho", "clock", "up")]
        numbers = entry.when, entry.up, entry.moment.clock, entry.rho or 0.0
        if not (type(entry.number) is int and all(type(one) is str for one in texts)):
            raise ValueError("no number or text")
        if not all(type(one) in {int, float} and math.isfinite(one) for one in numbers) or numbers[-1] < 0:
            raise ValueError("no finite number")
        if entry.rho is False or entry.when > 2 * YEARS[1] or entry.line != line:
            raise ValueError("not as it was written")
        return entry


@dataclass
class Account:
    """Totals of a ledger, the file that records each message to a site's apps and its privacy cost."""

    entries: int = 0
    digest: str = BEGINNING
    asked: str = BEGINNING  # digest of the last line that began an entry
    when: float = YEARS[0]
    moment: Moment = Moment(math.inf)
    rho: float = 0.0  # sum of the entries' rho, for protection of the presence of a change
    unbounded: int = 0  # number of replies with weights that left without noise
    recent: deque[tuple[float, str]] = field(default_factory=deque)  # time and kind of each message of the last day
    open: dict[int, Entry] = field(default_factory=dict)  # entries without an outcome, by number
    size: int = 0

    def copy(self) -> "Account":
        found = copy.copy(self)
        found.recent, found.open = self.recent.copy(), self.open.copy()
        return found

    def add(self, entry: Entry, line: bytes) -> None:
        """Add ``entry``, parsed from ``line``; ``ValueError`` if it does not follow the last line added."""
        if entry.before != self.digest or entry.when < self.when:
            raise ValueError("another line came before")
        self.digest, self.when, self.moment = hashlib.sha256(line).hexdigest(), entry.when, entry.moment
        self.size += len(line)
        if entry.number != self.entries + 1:
            return self._settle(entry)
        self.entries, self.asked = entry.number, self.digest
        self.rho += entry.rho or 0.0
        self.unbounded += entry.rho is None
        if entry.outcome == ASKED:
            self.open[entry.number] = entry
        while self.recent and self.recent[0][0] <= entry.when - DAY:
            self.recent.popleft()
        return self.recent.append((entry.when, "train" if entry.kind == "mended" else entry.kind))

    def _settle(self, entry: Entry) -> None:
        asked = self.open.pop(entry.number, None)
        given_back = asked is not None and asked.rho is None and entry.rho == 0.0
        changed = {name: getattr(entry, name) for name in ("when", "outcome", "left", *_OF_A_LINE)}
        changed |= {"rho": 0.0} if given_back else {}
        if asked is None or entry.outcome == ASKED or entry != replace(asked, **changed):
            raise ValueError("no such entry is open")
        self.unbounded -= given_back


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on messages and privacy budget that a ledger enforces."""

    epsilon: float | None = None  # budget; ``None`` for no limit
    delta: float = 1e-5
    factor: float = 1.0  # factor on rho for the unit of protection, see ``FACTORS``
    rounds_per_day: int | None = None  # most messages of each kind in 24 hours; ``None`` for no limit

    def spent(self, account: Account) -> float:
        return math.inf if account.unbounded else epsilon_of(self.factor * account.rho, self.delta)

    def expect_room(self, account: Account, rho: float | None, kind: str, when: float) -> None:
        if self.epsilon is not None:
            after = replace(account, rho=account.rho + (rho or 0.0), unbounded=account.unbounded + (rho is None))
            if self.spent(after) > self.epsilon:
                raise ExhaustedError(
                    f"The budget of epsilon {self.epsilon:g} is used up: {self.spent(account):.4g} is spent and this"
                    " reply would go beyond; raise budget.epsilon or stop here."
                )
        if self.rounds_per_day is not None:
            recent = [one for one in account.recent if one[0] > when - DAY and one[1] == kind]
            if len(recent) >= self.rounds_per_day:
                raise ExhaustedError(f"The {self.rounds_per_day} rounds of this day are used up; raise rounds_per_day.")


def epsilon_of(rho: float, delta: float) -> float:
    """Return the epsilon at ``delta`` of releases that are together ``rho``-zCDP; infinite if ``rho`` is.

    It is the least value over a > 1 of rho a + log((a - 1) / a) - (log(delta) + log(a)) / (a - 1) (Canonne, Kamath,
    Steinke 2020, Proposition 12).
    """
    checks.number("rho", rho, at_least=0, infinite=True, example=0.1)
    checks.number("delta", delta, above=0, below=1, example=1e-5)
    if rho == 0:
        return 0.0
    if math.isinf(rho):
        return math.inf
    import numpy as np  # noqa: PLC0415  (policies are read without it)

    center = 1 + math.sqrt(math.log(1 / delta) / rho)
    orders = 1 + (center - 1) * np.geomspace(1e-3, 1e3, 20_001)
    values = rho * orders + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return max(0.0, float(values.min()))


def most_rho(epsilon: float, delta: float) -> float:
    """Return the largest zCDP rho that implies (``epsilon``, ``delta``)-differential privacy, to a millionth."""
    checks.number("budget.epsilon", epsilon, above=0, example=8)
    low, high = 0.0, epsilon + 1.0
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon_of(middle, delta) <= epsilon else (low, middle)
    return low


FACTORS = {"client": 1.0, "any_data": 4.0}
"""Unit of protection -> factor on rho.

``client`` protects the presence of the site's change, of sensitivity C; ``any_data`` any two data sets of the site,
whose changes differ by up to 2 C.
"""
