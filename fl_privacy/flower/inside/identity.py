"""The identity that Flower requires of a process that makes messages, and an empty run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.common.config import parse_config_args
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    factor_extract,
    get_parameters_shape,
    parameters_addition,
    parameters_mod,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.quantization import dequantize
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.supercore.object_ref import load_app
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

__all__ = ["Run", "empty_run", "identify_process", "identity_put_back", "loaded", "parse_config_args"]


def identify_process() -> None:
    """Give this process, which Flower's own command has not started, the identity that messages need."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1


@contextmanager
def identity_put_back() -> Iterator[None]:
    """Restore this process's identity at the end of the context."""
    before = TaskIdentity._run_id, TaskIdentity._task_id, TaskIdentity._node_id
    try:
        yield
    finally:
        TaskIdentity._run_id, TaskIdentity._task_id, TaskIdentity._node_id = before


def empty_run() -> Run:
    """Return the run of a grid that serves only one."""
    return Run.create_empty(run_id=1)


def loaded(reference: str, folder: Path) -> Any:
    """Load the object ``module:attribute`` in ``folder``; ``ValueError`` if there is none."""
    return load_app(reference, ValueError, folder)


__all__ = [
    "bytes_to_private_key",
    "bytes_to_public_key",
    "combine_shares",
    "dequantize",
    "factor_extract",
    "generate_shared_key",
    "get_parameters_shape",
    "parameters_addition",
    "parameters_mod",
    "parameters_subtraction",
    "pseudo_rand_gen",
]
