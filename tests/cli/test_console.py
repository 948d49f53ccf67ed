"""What is shown where there is no terminal."""

import io
import re
import time

import pytest
from rich.console import Console

from fl_privacy.cli import console
from fl_privacy.federation.rounds import RoundReport
from fl_privacy.progress import Remaining, counted, time_left
from fl_privacy.runs.run_location import LineMonitor


@pytest.mark.parametrize(("pause", "expected"), [(0, [f"{10 * tenth} %" for tenth in range(11)]), (3600, [])])
def test_a_long_attack_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, pause: int, expected: list[str]) -> None:
    monkeypatch.setattr("fl_privacy.progress.BETWEEN_LINES", pause)
    written = io.StringIO()

    with console.RichMonitor(Console(file=written)).attacking("3 updates of round 5") as progress:
        for done in range(201):
            progress(done, 200)

    lines = [line.partition(",")[0] for line in written.getvalue().splitlines()]
    assert lines == [f"Attacking 3 updates of round 5: {share}" for share in expected]


def test_within_a_tenth_that_takes_long_there_is_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 10_000, 5))
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(now)))
    written = io.StringIO()

    with console.RichMonitor(Console(file=written)).attacking("3 updates") as progress:
        for _ in range(30):
            progress(1, 100)

    assert written.getvalue().splitlines() == ["Attacking 3 updates: 1 %"] * 5


def test_an_audit_inside_a_server_of_flower_says_how_far_its_attack_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter(range(0, 10_000, 5))
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(now)))

    with LineMonitor().attacking("3 updates") as progress:
        for _ in counted("exact", range(1)):
            for _ in range(4):
                progress(1, 100)

    assert capsys.readouterr().out.splitlines() == ["Attacking 3 updates, exact: 1 %"]


def test_of_several_attacks_the_one_at_work_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_privacy.progress.BETWEEN_LINES", 0)
    written = io.StringIO()

    with console.RichMonitor(Console(file=written)).attacking("2 updates") as progress:
        for name in ("cosine", "L2"):
            for _ in counted(name, range(1)):
                progress(1 if name == "cosine" else 2, 2)

    assert [line[:31] for line in written.getvalue().splitlines()] == [
        "Attacking 2 updates, cosine: 50",
        "Attacking 2 updates, L2: 100 %",
    ]


def test_an_attack_victim_by_victim_says_which_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_privacy.progress.BETWEEN_LINES", 0)
    written = io.StringIO()

    with console.RichMonitor(Console(file=written)).attacking("3 updates") as progress:
        for _ in counted("cocktail party", range(1)):
            for victim in counted("victim", range(3)):
                progress(victim + 1, 3)

    assert [line.partition("%")[0] for line in written.getvalue().splitlines()] == [
        f"Attacking 3 updates, cocktail party, victim {number}/3: {share} "
        for number, share in ((1, 33), (2, 66), (3, 100))
    ]


def test_a_terminal_names_what_is_at_work_before_any_of_it_is_done() -> None:
    written = io.StringIO()

    with console.RichMonitor(Console(file=written, force_terminal=True, width=120)).attacking("3 updates"):
        for _ in counted("cocktail party", range(1)):
            time.sleep(0.3)

    assert "cocktail party" in written.getvalue()


def test_long_work_of_clients_says_which_client_is_at_which_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_privacy.progress.BETWEEN_LINES", 0)
    clock = iter(range(10**6))
    monkeypatch.setattr("fl_privacy.cli.console.time.monotonic", lambda: float(next(clock)))
    written = io.StringIO()

    with console.RichMonitor(Console(file=written, width=200)).training(2):
        for _ in counted("client", range(3)):
            for _ in counted("condensing images", range(20)):
                pass

    lines = written.getvalue().splitlines()
    assert lines[0] == "Round 1/2: client 1/3"
    assert any(re.fullmatch(r"Round 1/2: client 2/3, condensing images 11/20, about .* left", line) for line in lines)


def test_a_step_that_lasts_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_privacy.progress.BETWEEN_LINES", 0.2)
    written = io.StringIO()

    with console.RichMonitor(Console(file=written, width=200)).working("Making uploads"):
        for _ in counted("victim", range(2)):
            time.sleep(0.7)

    lines = written.getvalue().splitlines()
    assert "Making uploads: victim 1/2 (1 s at this step)" in lines
    assert any(line.startswith("Making uploads: victim 2/2") for line in lines)


def test_a_terminal_sees_the_table_and_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    terminal = Console(file=written, force_terminal=True, width=100, height=30, color_system=None)

    with console.RichMonitor(terminal).training(2):
        for _ in counted("client", range(3)):
            time.sleep(0.3)

    assert "Round 1/2: client 2/3" in written.getvalue()
    assert "Training" in written.getvalue()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(None, ""), (0.2, "1 s"), (59, "59 s"), (80, "1:20 min"), (3599.4, "59:59 min"), (3600, "1:00 h")],
)
def test_time_left_in_words(seconds: float | None, expected: str) -> None:
    assert time_left(seconds) == (f", about {expected} left" if expected else "")


def test_time_left_is_that_of_the_work_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("fl_privacy.cli.console.time.monotonic", lambda: now)
    left = Remaining()
    assert left("round 1", 0.0) is None
    now = 10.0
    assert left("round 1", 0.25) == pytest.approx(30)
    assert left("round 2", 0.0) is None
    now = 12.0
    assert left("round 2", 0.5) == pytest.approx(2)


@pytest.mark.parametrize(
    ("loss", "epsilon", "expected"),
    [(float("nan"), 2.0, "withheld"), (float("nan"), None, "nan"), (0.25, 2.0, "0.250")],
)
def test_a_loss_that_clients_keep_to_themselves_is_called_withheld(
    loss: float, epsilon: float | None, expected: str
) -> None:
    report = RoundReport(round=1, clients=(0,), train_loss=loss, seconds=0.1, defense_seconds=0.0, upload_bytes=1)
    assert console.loss_in_words(report, epsilon) == expected
