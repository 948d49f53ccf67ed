"""What tests of Flower's side share."""

from pathlib import Path

import pytest

from fl_privacy.flower._node_memory import STATE_VARIABLE


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own state folder, so that none has answered another's rounds."""
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "own-state"))


@pytest.fixture(scope="module", autouse=True)
def hardly_any_seeds(few_seeds: None) -> None:
    """No test of this folder seeds its noise by small numbers."""


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """For audits of which it is not looked at what is drawn from the strategy: to test its claim takes seconds."""
    monkeypatch.setattr("fl_privacy.auditing.strategy_report.DRAWS", 200)
    monkeypatch.setattr("fl_privacy.auditing.app_claims.DRAWS", 200)
    monkeypatch.setattr("fl_privacy.dp_check.mechanism.PILOT", ((4, 1),))


@pytest.fixture
def short_pilot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the neighbors by a tenth of the draws; ``tests/dp_check`` looks at that choice."""
    monkeypatch.setattr("fl_privacy.dp_check.mechanism.PILOT", ((6, 2), (48, 1)))


@pytest.fixture
def few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """For audits whose attacks by descent need not end well: each takes as few evaluations as there may be."""
    monkeypatch.setattr("fl_privacy.auditing.scenarios.seconds_of_evaluation", lambda observation: 1000.0)
    monkeypatch.setattr("fl_privacy.auditing.scenarios.Scenarios._in_time", lambda ladder, found, uploaded: found)
