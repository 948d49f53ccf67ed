"""No reply without its entry: kills, full disks, restarts at the budget, files that were put back or changed."""

import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fl_privacy.site.gate.entries import DAY, YEARS, Entry, ExhaustedError, Limits, Moment, epsilon_of, most_rho
from fl_privacy.site.gate.ledger import Ledger, LedgerError

KILLS, FULL = 20, 5

ANSWERING = """
import os, resource, sys
from pathlib import Path
from fl_privacy.site.gate.entries import Limits
from fl_privacy.site.gate.ledger import Ledger
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
ledger, limits = Ledger(folder / "ledger", folder / "away" / "anchor"), Limits(epsilon=1e6)
replies = os.open(sys.argv[3], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(replies, b"up\\n")
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
while True:
    account = ledger.append(kind="train", outcome="asked", rho=0.5, run="1", app="a:b", policy="p", limits=limits)
    if not limit:
        account = ledger.settle(account.entries, "sent", 0.5)
    os.write(replies, b"%d\\n" % account.entries)
"""


def ledger(folder: Path, **more: object) -> Ledger:
    return Ledger(folder / "ledger", folder / "away" / "anchor", **more)  # type: ignore[arg-type]


def append(one: Ledger, rho: float | None = 0.5, limits: Limits | None = None, **more: str) -> None:
    told = {"kind": "train", "outcome": "sent", "run": "1", "app": "a:b", "policy": "p", **more}
    one.append(rho=rho, limits=limits, **told)


def answering(folder: Path, replies: Path, limit: int = 0) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", ANSWERING, str(folder), str(limit), str(replies)]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


def left(replies: Path) -> list[int]:
    """List the replies that left, by number of their entry."""
    text = replies.read_text() if replies.exists() else ""
    return [int(line) for line in text.splitlines() if line != "up"]


@pytest.mark.long
def test_no_reply_is_left_without_its_entry_by_twenty_kills(tmp_path: Path) -> None:
    rng, replies = random.Random(0), tmp_path / "replies"
    for kill in range(KILLS):
        process = answering(tmp_path, replies)
        deadline = time.monotonic() + 60
        while not replies.exists() or replies.read_text().count("up") <= kill:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    numbers = [entry.number for entry in ledger(tmp_path).entries()]
    assert numbers == list(range(1, len(numbers) + 1))
    assert set(left(replies)) <= set(numbers)
    assert len(left(replies)) == len(set(left(replies))), "no entry stands for two"
    assert len(numbers) - len(left(replies)) <= KILLS
    assert ledger(tmp_path).account().rho == pytest.approx(0.5 * len(numbers))


@pytest.mark.long
def test_a_full_disk_lets_nothing_out_and_leaves_no_torn_line(tmp_path: Path) -> None:
    rng, replies = random.Random(1), tmp_path / "replies"
    append(ledger(tmp_path))
    for _ in range(FULL):
        before = ledger(tmp_path).account().entries
        limit = (tmp_path / "ledger").stat().st_size + rng.randrange(50, 900)
        process = answering(tmp_path, replies, limit)
        _, said = process.communicate(timeout=60)
        assert b"can't be written" in said
        assert (tmp_path / "ledger").read_bytes().endswith(b"\n")
        assert ledger(tmp_path).account().entries == max([before, *left(replies)])
        replies.unlink()


@pytest.mark.parametrize("often", [1, 2, 1000])
def test_a_failing_disk_of_the_anchor_neither_locks_the_ledger_nor_loses_an_entry(
    often: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The anchor is there, but that it lasts is not sure: once, also where it is taken back, or from now on."""
    one, left = ledger(tmp_path), [often]

    def failing(folder: Path) -> None:
        if folder == one.anchor.parent and left[0]:
            left[0] -= 1
            raise OSError(5, "Input/output error")

    append(one, 0.1)
    monkeypatch.setattr("fl_privacy.site.gate.ledger._sync_folder", failing)
    with pytest.raises(LedgerError, match="can't be written"):
        append(one, 0.1)
    monkeypatch.undo()
    kept = often > 1
    for again in (one, ledger(tmp_path)):
        assert again.account().entries == 1 + kept
    append(one, 0.1)
    assert [entry.number for entry in ledger(tmp_path).entries()] == list(range(1, 3 + kept))
    assert json.loads(one.anchor.read_text())["entries"] == 2 + kept


def test_an_anchor_that_can_not_be_made_leaves_the_ledger_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: str) -> None:
        raise OSError(28, "No space left on device")

    one = ledger(tmp_path)
    append(one, 0.1)
    before = one.path.read_bytes()
    monkeypatch.setattr("fl_privacy.site.gate.ledger.write_private", full)
    for _ in range(3):
        with pytest.raises(LedgerError, match="can't be written"):
            append(one, 0.1)
    assert one.path.read_bytes() == before, "nobody was asked"


def test_a_restart_refuses_at_the_budget_whatever_asks(tmp_path: Path) -> None:
    limits = Limits(epsilon=8, delta=1e-5)
    sent = 0
    with pytest.raises(ExhaustedError, match="budget of epsilon 8 is used up"):
        while True:
            append(ledger(tmp_path), 0.1, limits, run=str(sent), app=f"app:{sent}")
            sent += 1
    assert epsilon_of(0.1 * sent, 1e-5) <= 8 < epsilon_of(0.1 * (sent + 1), 1e-5)
    with pytest.raises(ExhaustedError):
        append(ledger(tmp_path), 0.1, limits)
    assert ledger(tmp_path).account().entries == sent, "what is refused is not counted"
    with pytest.raises(ExhaustedError):
        append(ledger(tmp_path), None, limits)


def test_two_gates_with_one_ledger_spend_one_budget(tmp_path: Path) -> None:
    one, other, limits = ledger(tmp_path), ledger(tmp_path), Limits(epsilon=8)
    with pytest.raises(ExhaustedError):
        for _ in range(100):
            append(one, 0.1, limits)
            append(other, 0.1, limits)
    assert one.account().entries == other.account().entries == ledger(tmp_path).account().entries
    assert limits.spent(one.account()) <= 8


def test_another_unit_counts_what_was_spent_before(tmp_path: Path) -> None:
    append(ledger(tmp_path), 0.3)
    account = ledger(tmp_path).account()
    assert Limits(epsilon=8, factor=4.0).spent(account) == epsilon_of(1.2, 1e-5) > Limits(epsilon=8).spent(account)


def test_weights_that_left_without_noise_leave_no_budget(tmp_path: Path) -> None:
    append(ledger(tmp_path), None)
    assert Limits(epsilon=8).spent(ledger(tmp_path).account()) == math.inf
    with pytest.raises(ExhaustedError):
        append(ledger(tmp_path), 0.001, Limits(epsilon=100))


def test_a_ledger_that_was_put_back_is_noticed(tmp_path: Path) -> None:
    one = ledger(tmp_path)
    append(one)
    old = one.path.read_bytes()
    append(one)
    append(one)
    one.path.write_bytes(old)
    for reader in (one, ledger(tmp_path)):
        with pytest.raises(LedgerError, match=r"older than it was: it has 1 entries of the 3"):
            reader.account()
    forged = Entry.read(old.splitlines(keepends=True)[0])
    assert forged.number == 1
    ledger_of_other = Ledger(tmp_path / "o", tmp_path / "away" / "o")
    for _ in range(3):
        append(ledger_of_other, 0.0)
    one.path.write_bytes(ledger_of_other.path.read_bytes())
    with pytest.raises(LedgerError, match="its past was changed"):
        ledger(tmp_path).account()


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda folder: (folder / "ledger").unlink(), "but is missing; restore its newest copy"),
        (lambda folder: (folder / "away" / "anchor").unlink(), "anchor .* is missing"),
        (lambda folder: (folder / "away" / "anchor").write_text("x"), "anchor .* can't be read"),
        (lambda folder: (folder / "ledger").open("ab").write(b'{"number":3'), "torn line"),
        (lambda folder: (folder / "ledger").open("ab").write(b"\n"), "no entry"),
        (lambda folder: (folder / "ledger").open("ab").write(b"[" * 4000 + b"\n"), "no entry"),
        (lambda folder: _changed(folder, 0, "rho", 0.0), "does not follow"),
        (lambda folder: _changed(folder, 1, "rho", 0.0), "its past was changed"),
        (lambda folder: _changed(folder, 1, "rho", -1.0), "no entry"),
        (lambda folder: _changed(folder, 1, "rho", math.nan), "no entry"),
        (lambda folder: (folder / "ledger").chmod(0o644), "private to its owner"),
        (lambda folder: (folder / "away" / "anchor").chmod(0o644), "private to its owner"),
        (lambda folder: (folder / "away" / "anchor").write_text("[" * 4000), "anchor .* can't be read"),
        (lambda folder: _anchored(folder, entries=-5), "anchor .* can't be read"),
        (lambda folder: _anchored(folder, entries=True), "anchor .* can't be read"),
        (lambda folder: _anchored(folder, entries=1.5), "anchor .* can't be read"),
        (lambda folder: _anchored(folder, digest=""), "anchor .* can't be read"),
        (lambda folder: os.link(folder / "ledger", folder / "other"), "have one name, but has 2"),
        (lambda folder: os.link(folder / "away" / "anchor", folder / "other"), "have one name, but has 2"),
        (lambda folder: _a_pipe(folder / "ledger"), "ordinary file"),
        (lambda folder: _a_pipe(folder / "away" / "anchor"), "ordinary file"),
        (lambda folder: _a_link(folder / "away" / "anchor"), "anchor .* can't be read"),
        (lambda folder: (folder / "ledger").open("ab").write(b"x" * 10_000), "no entry"),
        (lambda folder: _changed(folder, 1, "rho", True), "no entry"),
        (lambda folder: _changed(folder, 1, "rho", False), "no entry"),
        (lambda folder: _changed(folder, 1, "number", 2.0), "no entry"),
        (lambda folder: _changed(folder, 1, "when", math.inf), "no entry"),
        (lambda folder: _changed(folder, 1, "when", 1e300), "no entry"),
        (lambda folder: _changed(folder, 1, "up", math.inf), "no entry"),
        (lambda folder: _changed(folder, 1, "app", None), "no entry"),
        (lambda folder: _changed(folder, 1, "number", 1), "does not follow"),
        (lambda folder: _changed(folder, 1, "number", -1), "does not follow"),
    ],
)
def test_a_ledger_that_is_not_whole_refuses(damage: object, line: str, tmp_path: Path) -> None:
    append(ledger(tmp_path))
    append(ledger(tmp_path))
    assert callable(damage)
    damage(tmp_path)
    with pytest.raises(LedgerError, match=line):
        append(ledger(tmp_path))
    with pytest.raises(LedgerError, match=line):
        ledger(tmp_path).account()


def _anchored(folder: Path, **changed: object) -> None:
    anchor = folder / "away" / "anchor"
    anchor.write_text(json.dumps({**json.loads(anchor.read_text()), **changed}))


def _a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _a_link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("real")))


def _changed(folder: Path, place: int, key: str, value: object) -> None:
    lines = (folder / "ledger").read_bytes().splitlines(keepends=True)
    lines[place] = json.dumps({**json.loads(lines[place]), key: value}, separators=(",", ":")).encode() + b"\n"
    (folder / "ledger").write_bytes(b"".join(lines))


def test_a_torn_line_is_mended_and_counted(tmp_path: Path) -> None:
    one = ledger(tmp_path)
    append(one)
    assert not one.mend(0.7)
    with one.path.open("ab") as file:
        file.write(b'{"number":2,"when"')
    assert ledger(tmp_path).mend(0.7)
    account = ledger(tmp_path).account()
    assert (account.entries, account.rho) == (2, pytest.approx(1.2))


def test_a_ledger_whose_beginning_was_killed_begins(tmp_path: Path) -> None:
    (tmp_path / "away").mkdir()
    (tmp_path / "ledger").touch(0o600)
    assert ledger(tmp_path).account().entries == 0


def test_a_clock_that_is_set_back_frees_no_rounds(tmp_path: Path) -> None:
    now = [1e9]
    one, limits = ledger(tmp_path, clock=lambda: now[0]), Limits(rounds_per_day=2)
    append(one, limits=limits)
    append(one, limits=limits)
    for moved in (0.0, -10 * DAY, DAY - 1):
        now[0] = 1e9 + moved
        with pytest.raises(ExhaustedError, match="2 rounds of this day"):
            append(one, limits=limits)
    append(one, limits=limits, kind="evaluate")
    now[0] = 1e9 + DAY + 1
    append(one, limits=limits)


def test_a_clock_that_is_set_forward_frees_no_rounds_and_set_right_locks_nothing(tmp_path: Path) -> None:
    now, limits = [1e9], Limits(rounds_per_day=1)
    one = ledger(tmp_path, clock=lambda: now[0])
    append(one, limits=limits)
    for clock in (1e9 + 3650 * DAY, 1e9, 1e9 + 3650 * DAY, 1e11, 0.0, 2e9):
        now[0] = clock
        append(one, limits=limits, kind=f"of {clock}, {one.account().entries}")
        with pytest.raises(ExhaustedError, match="1 rounds of this day"):
            append(one, limits=limits)
    for reader in (one, ledger(tmp_path, clock=lambda: now[0])):  # wherever the clock is, a day of it is a day
        now[0] += DAY + 1
        append(reader, limits=limits)
        with pytest.raises(ExhaustedError):
            append(reader, limits=limits)


def test_a_clock_that_was_set_right_locks_nothing_for_years(tmp_path: Path) -> None:
    now, limits = [2e9], Limits(rounds_per_day=1)
    append(ledger(tmp_path, clock=lambda: now[0]), limits=limits)
    one, now[0] = ledger(tmp_path, clock=lambda: now[0]), 1e9
    with pytest.raises(ExhaustedError):
        append(one, limits=limits)
    now[0] += DAY + 1
    append(one, limits=limits)
    with pytest.raises(ExhaustedError):
        append(one, limits=limits)


def test_the_machine_s_own_seconds_count_whatever_its_clock_says(tmp_path: Path) -> None:
    now, limits = [Moment(1e9, "one", 50.0)], Limits(rounds_per_day=1)
    append(ledger(tmp_path, clock=lambda: now[0]), limits=limits)
    for clock, up in ((1e9 + 2 * DAY, 60.0), (0.0, DAY + 49), (2e9, 10.0)):
        now[0] = Moment(clock, "one", up)
        with pytest.raises(ExhaustedError):
            append(ledger(tmp_path, clock=lambda: now[0]), limits=limits)
    now[0] = Moment(5.0, "one", DAY + 51)
    append(ledger(tmp_path, clock=lambda: now[0]), limits=limits)
    for clock in (4.0, 3650 * DAY):  # after the machine has begun anew; a long step is not believed
        now[0] = Moment(clock, "two", 3 * DAY)
        with pytest.raises(ExhaustedError):
            append(ledger(tmp_path, clock=lambda: now[0]), limits=limits)
    now[0] = Moment(2 * DAY, "two", 10.0)
    append(ledger(tmp_path, clock=lambda: now[0]), limits=limits)


@pytest.mark.parametrize("clock", [math.nan, math.inf, -math.inf, 1e300])
def test_a_clock_that_says_no_date_lets_nothing_out(clock: float, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="The clock is expected to say a date"):
        append(ledger(tmp_path, clock=lambda: clock))
    append(ledger(tmp_path))


def test_a_clock_at_the_end_of_all_years_ends_no_ledger(tmp_path: Path) -> None:
    now, limits = [YEARS[1]], Limits(rounds_per_day=1)
    one = ledger(tmp_path, clock=lambda: now[0])
    append(one, limits=limits)
    for clock in (1e9, 1e9 + DAY + 1, 1e9 + 2 * DAY + 2):
        now[0] = clock
        if clock > 1e9:
            append(one, limits=limits)
        with pytest.raises(ExhaustedError):
            append(one, limits=limits)
    assert one.account().when > YEARS[1]


@pytest.mark.parametrize("rho", [math.inf, math.nan, -1.0, True])
def test_what_could_not_be_read_again_is_not_written(rho: float, tmp_path: Path) -> None:
    append(ledger(tmp_path))
    with pytest.raises(LedgerError, match="expected to be given an entry"):
        append(ledger(tmp_path), rho)
    assert ledger(tmp_path).account().entries == 1


def test_lines_of_earlier_versions_are_read_and_count(tmp_path: Path) -> None:
    line = Entry(
        number=1, when=time.time(), kind="train", outcome="sent", rho=0.5, run="", app="", policy="", before="0" * 64
    ).line
    assert b"clock" not in line
    (tmp_path / "away").mkdir()
    (tmp_path / "ledger").touch(0o600)
    (tmp_path / "ledger").write_bytes(line)
    (tmp_path / "away" / "anchor").touch(0o600)
    (tmp_path / "away" / "anchor").write_text(json.dumps({"entries": 1, "digest": hashlib.sha256(line).hexdigest()}))
    with pytest.raises(ExhaustedError, match="this day"):
        append(ledger(tmp_path), limits=Limits(rounds_per_day=1))
    append(ledger(tmp_path))
    assert [entry.number for entry in ledger(tmp_path).entries()] == [1, 2]


def test_an_entry_counts_until_it_is_known_that_nothing_left(tmp_path: Path) -> None:
    one, limits = ledger(tmp_path), Limits(epsilon=8)
    append(one, None, outcome="asked")
    append(one, 0.0, outcome="asked")
    assert limits.spent(ledger(tmp_path).account()) == math.inf
    one.settle(1, "refused", 0.0)
    one.settle(2, "sent", 0.0)
    for account in (one.account(), ledger(tmp_path).account()):
        assert (account.entries, account.rho, account.unbounded, account.open) == (2, 0.0, 0, {})
    assert [entry.outcome for entry in one.entries()] == ["refused", "sent"]
    for number in (0, 1, 3):
        with pytest.raises(LedgerError, match="open"):
            one.settle(number, "sent", 0.0)


@pytest.mark.parametrize(
    "change", [{"rho": 0.0}, {"outcome": "asked"}, {"kind": "query"}, {"number": 2}, {"when": 0.0}]
)
def test_what_came_of_an_entry_changes_nothing_else_of_it(change: dict[str, object], tmp_path: Path) -> None:
    append(ledger(tmp_path), 0.5, outcome="asked")
    entry = ledger(tmp_path).entries()[0]
    told = {"outcome": "sent", "before": ledger(tmp_path).account().digest, **change}
    with (tmp_path / "ledger").open("ab") as file:
        file.write(replace(entry, **told).line)  # type: ignore[arg-type]
    if change == {"number": 2}:
        assert ledger(tmp_path).account().rho == 1.0
        return
    with pytest.raises(LedgerError, match="does not follow"):
        ledger(tmp_path).account()


def test_an_anchor_is_elsewhere_than_its_ledger(tmp_path: Path) -> None:
    (tmp_path / "to").symlink_to(tmp_path)
    for anchor in ("ledger", "to/ledger", "ledger/anchor", "to/ledger/a/b"):
        with pytest.raises(LedgerError, match=r"anchor of .* is expected elsewhere"):
            Ledger(tmp_path / "ledger", tmp_path / anchor)
    assert not (tmp_path / "ledger").exists()


def test_a_link_is_no_ledger(tmp_path: Path) -> None:
    append(Ledger(tmp_path / "real", tmp_path / "away" / "anchor"))
    (tmp_path / "ledger").symlink_to(tmp_path / "real")
    with pytest.raises(LedgerError, match="can't be opened"):
        ledger(tmp_path).account()


@pytest.mark.parametrize(("rho", "delta"), [(0.01, 1e-5), (0.4, 1e-5), (5.0, 1e-6), (50.0, 1e-3)])
def test_epsilon_is_that_of_the_accountant_of_others(rho: float, delta: float) -> None:
    dp_accounting = pytest.importorskip("dp_accounting")
    from dp_accounting.rdp import RdpAccountant  # noqa: PLC0415

    orders = [1 + x / 100 for x in range(1, 3000)] + list(range(31, 2000))
    accountant = RdpAccountant(orders)
    accountant.compose(dp_accounting.GaussianDpEvent(1 / math.sqrt(2 * rho)))
    theirs = accountant.get_epsilon(delta)
    assert epsilon_of(rho, delta) == pytest.approx(theirs, rel=1e-3)
    assert epsilon_of(most_rho(theirs, delta), delta) <= theirs


def test_nothing_spends_nothing_and_no_noise_all() -> None:
    assert epsilon_of(0, 1e-5) == 0
    assert epsilon_of(math.inf, 1e-5) == math.inf
