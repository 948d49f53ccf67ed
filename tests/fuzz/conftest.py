"""A small run with captures, from which copies to be damaged are made."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fl_privacy.runs.config import compose_run
from fl_privacy.runs.run import run_experiment
from fl_privacy.runs.run_location import Monitor, plain_loop

SETTINGS = (
    "model=mlp",
    "model.widths=[8]",
    "federation.clients=2",
    "federation.rounds=2",
    "evaluate_every=2",
    "victims=2",
    "attack=analytic",
    "defense=dp_noise",
    "defense.clip_norm=1.0",
    "baseline=false",
    "threat_model=adaptive",
    "intercept.save=true",
)


@pytest.fixture(scope="package")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run once and return the folder."""
    out = tmp_path_factory.mktemp("fuzzed")
    return run_experiment(compose_run([*SETTINGS, f"out={out}"]), plain_loop, Monitor()).resolve()


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> Callable[[], Path]:
    """Return a function that copies the run, so that a test may damage it."""
    return lambda: Path(shutil.copytree(recorded, tmp_path / "copied"))
