"""The Ray cluster that work is handed to, and what it says when work fails."""

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fl_privacy.errors import UserError
from fl_privacy.extras import expect_package

SWITCHED_OFF = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")
"""Ray listens on other interfaces than loopback, reports usage, hides the GPUs from clients that reserve none."""


PATIENCE = 5.0
"""Seconds in which a cluster has to answer."""


def expect_ray(setting: str) -> None:
    """Refuse ``setting`` (``KEY=VALUE``) without Ray.

    Raises:
        UserError: Ray is not installed.
    """
    expect_package("ray", setting)


def joins_cluster() -> bool:
    """Whether RAY_ADDRESS names a cluster that runs."""
    return bool(os.environ.get("RAY_ADDRESS"))


def expect_answer() -> None:
    """Knock at the address in RAY_ADDRESS: Ray itself tries for minutes without a word.

    Raises:
        UserError: nobody answers within ``PATIENCE`` seconds.
    """
    address = os.environ.get("RAY_ADDRESS", "").rpartition("://")[2]
    if not address or address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UserError(_no_cluster("it is no address"))
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()
    except OSError as error:
        raise UserError(_no_cluster(error.strerror or str(error))) from error
    if os.environ.get("RAY_USE_TLS", "0") == "0" and not _speaks_grpc(address):
        raise UserError(_no_cluster("what answers there is no Ray"))


def _speaks_grpc(address: str) -> bool:
    import grpc  # noqa: PLC0415

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=PATIENCE)
        except grpc.FutureTimeoutError:
            return False
    return True


def _no_cluster(reason: str) -> str:
    return (
        f"RAY_ADDRESS is expected to name a cluster that runs (HOST:PORT, or auto), but got"
        f" {os.environ.get('RAY_ADDRESS')!r}: {reason.rstrip('.')}; start it, or unset RAY_ADDRESS to work here."
    )


@contextmanager
def ray_cluster() -> Iterator[None]:
    """A Ray cluster: the one that runs or that RAY_ADDRESS names, else a new one on the loopback interface."""
    for name in SWITCHED_OFF:
        os.environ.setdefault(name, "0")
    import ray  # noqa: PLC0415

    started = not ray.is_initialized()
    if started:
        expect_answer()
        own = {"num_cpus": os.cpu_count() or 1, "num_gpus": torch.cuda.device_count(), "include_dashboard": False}
        resources: dict[str, Any] = {} if joins_cluster() else own
        paths = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
        try:
            ray.init(**resources, runtime_env=paths, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, ValueError) as error:
            if not joins_cluster():
                raise
            raise UserError(_no_cluster(one_line(error))) from error
    try:
        yield
    finally:
        if started:
            ray.shutdown()


def on_this_node() -> Any:
    """Where a task runs that must not be lost while this process lives."""
    import ray  # noqa: PLC0415
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def cause_of(error: Exception) -> BaseException:
    """What went wrong behind Ray's own exception."""
    return getattr(error, "cause", None) or error


def one_line(error: Exception) -> str:
    """``cause_of(error)`` in a line."""
    cause = cause_of(error)
    return f"{type(cause).__name__}: {cause}".splitlines()[0]
