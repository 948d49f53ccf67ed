"""The Ray cluster that work is handed to, and what it says when work fails."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from fl_privacy.errors import UserError

SWITCHED_OFF = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")
"""Ray listens on other interfaces than loopback, reports usage, hides the GPUs from clients that reserve none."""


def expect_ray(setting: str) -> None:
    """Refuse ``setting`` (``KEY=VALUE``) without Ray.

    Raises:
        UserError: Ray is not installed.
    """
    if find_spec("ray") is None:
        raise UserError(f"{setting} is expected to find Ray; install flwr[simulation].")


def joins_cluster() -> bool:
    """Whether RAY_ADDRESS names a cluster that runs."""
    return bool(os.environ.get("RAY_ADDRESS"))


@contextmanager
def ray_cluster() -> Iterator[None]:
    """A Ray cluster: the one that runs or that RAY_ADDRESS names, else a new one on the loopback interface."""
    for name in SWITCHED_OFF:
        os.environ.setdefault(name, "0")
    import ray  # noqa: PLC0415

    started = not ray.is_initialized()
    if started:
        own = {"num_cpus": os.cpu_count() or 1, "num_gpus": torch.cuda.device_count(), "include_dashboard": False}
        resources: dict[str, Any] = {} if joins_cluster() else own
        paths = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
        ray.init(**resources, runtime_env=paths, logging_level=logging.ERROR, log_to_driver=False)
    try:
        yield
    finally:
        if started:
            ray.shutdown()


def cause_of(error: Exception) -> BaseException:
    """What went wrong behind Ray's own exception."""
    return getattr(error, "cause", None) or error


def one_line(error: Exception) -> str:
    """``cause_of(error)`` in a line."""
    cause = cause_of(error)
    return f"{type(cause).__name__}: {cause}".splitlines()[0]
