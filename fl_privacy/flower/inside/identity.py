"""The identity that Flower requires of a process, and a lock for threads."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.common.config import parse_config_args  # noqa: F401
from flwr.supercore.object_ref import load_app
from flwr.supercore.primitives.asymmetric import bytes_to_public_key  # noqa: F401
from flwr.supercore.run import Run  # noqa: F401
from flwr.supercore.task_identity import TaskIdentity


def identify_process() -> None:
    """Give this process the identity that Flower requires for making messages."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1


@contextmanager
def identity_put_back() -> Iterator[None]:
    """Restore Flower's ids of this process (run, task, node) at the end of the context."""
    before = TaskIdentity._run_id, TaskIdentity._task_id, TaskIdentity._node_id
    try:
        yield
    finally:
        TaskIdentity._run_id, TaskIdentity._task_id, TaskIdentity._node_id = before


TURN = threading.RLock()  # held by a thread that answers a message, except during ``others_turn``


@contextmanager
def others_turn() -> Iterator[None]:
    """Let other threads compute within the context, by releasing the lock ``TURN`` if this thread holds it."""
    try:
        TURN.release()
    except RuntimeError:  # not held
        yield
        return
    try:
        yield
    finally:
        TURN.acquire()


def loaded(reference: str, folder: Path) -> Any:
    """Load the object ``module:attribute`` in ``folder``; ``ValueError`` if there is none."""
    return load_app(reference, ValueError, folder)
