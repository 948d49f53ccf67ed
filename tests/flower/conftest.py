"""What tests of Flower's side share."""

from pathlib import Path

import pytest

from fl_privacy.flower._node_memory import STATE_VARIABLE


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own state folder, so that none has answered another's rounds."""
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "own-state"))


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """For audits of which it is not looked at what is drawn from the strategy: to test its claim takes seconds."""
    monkeypatch.setattr("fl_privacy.auditing.strategy_claims.DRAWS", 200)
    monkeypatch.setattr("fl_privacy.auditing.app_claims.DRAWS", 200)
    monkeypatch.setattr("fl_privacy.dp_check.mechanism.PILOT", ((4, 1),))
