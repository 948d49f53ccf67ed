"""What is shown where there is no terminal."""

import io

import pytest
from rich.console import Console

from fl_privacy.cli import console


@pytest.mark.parametrize(("pause", "expected"), [(0, [f"{10 * tenth} %" for tenth in range(1, 11)]), (3600, [])])
def test_a_long_attack_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, pause: int, expected: list[str]) -> None:
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", pause)
    written = io.StringIO()

    with console.RichMonitor(Console(file=written)).attacking(3) as progress:
        for done in range(201):
            progress(done, 200)

    assert written.getvalue().splitlines() == [f"Attacking 3 updates: {share}" for share in expected]
