"""What tests of Flower's side share."""

from pathlib import Path

import pytest

from fl_privacy.flower._node_memory import STATE_VARIABLE


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of one test has answered nothing of another's."""
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "own-state"))
