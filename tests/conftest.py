"""What tests of several folders share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One cluster for all tests; a run that finds Ray running joins it."""
    ray = pytest.importorskip("ray")
    from fl_privacy.parallel.cluster import SWITCHED_OFF  # noqa: PLC0415

    os.environ.update(dict.fromkeys(SWITCHED_OFF, "0"))
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}},
    )
    yield
    ray.shutdown()
