"""What tests of Flower's side share."""

from pathlib import Path

import pytest

from fl_privacy.flower._node_memory import STATE_VARIABLE


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own state folder, so that none has answered another's rounds."""
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "own-state"))
