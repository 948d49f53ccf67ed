"""Activation checkpointing, off while gradients are computed: it saves memory and changes no value.

A checkpoint computes its layers again on the way back. Reentrant, it takes no ``torch.autograd.grad``; in its other
form it takes no second derivative, and no hooks that count calls.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint

_NAMES = (
    "CheckpointFunction",
    "_checkpoint_without_reentrant_generator",
    "_checkpoint_without_reentrant_generator_impl",
)
"""What ``torch.utils.checkpoint.checkpoint`` calls by name, whoever imported it: one of the last two, by version."""

_lock, _uses, _own = threading.Lock(), list[None](), dict[str, Any]()


class _Called:
    """The reentrant checkpoint as a plain call."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def _nothing(*args: Any, **options: Any) -> Iterator[None]:
    """Do nothing before and behind the layers of a checkpoint."""
    yield


@contextmanager
def without_checkpointing() -> Iterator[None]:
    """Compute what a model checkpoints once, and keep it; also as the decorator of a function."""
    with _lock:
        if not _uses:
            for name in _NAMES:
                if hasattr(checkpoint, name):
                    _own[name] = getattr(checkpoint, name)
                    setattr(checkpoint, name, _Called if name == _NAMES[0] else _nothing)
        _uses.append(None)
    try:
        yield
    finally:
        with _lock:
            _uses.pop()
            if not _uses:
                for name, value in _own.items():
                    setattr(checkpoint, name, value)
