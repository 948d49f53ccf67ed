"""What tests of several folders share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For ``--dist loadgroup``: Ray's tests share a cluster in one process, those of a file its fixtures; long ones
    begin, so that no process is left alone with them."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.get_closest_marker("ray") is None, item.path not in slow))
    for item in items:
        item.add_marker(pytest.mark.xdist_group("ray" if item.get_closest_marker("ray") else str(item.path)))


@pytest.fixture(scope="module")
def undrawn_charts() -> Iterator[None]:
    """For tests of what is on a page beside its charts; ``tests/report`` looks at drawn ones."""
    from tests.experiment.runs import undrawn  # noqa: PLC0415

    with undrawn():
        yield


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One cluster for all tests; a run that finds Ray running joins it."""
    ray = pytest.importorskip("ray")
    from fl_privacy.parallel.cluster import SWITCHED_OFF  # noqa: PLC0415

    os.environ.update(dict.fromkeys(SWITCHED_OFF, "0"))
    os.environ.update({"RAY_worker_niceness": "0"})  # at 15 they hardly get on beside the other tests
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}},
    )
    yield
    ray.shutdown()
