"""Calls whose failure is somebody else's: whatever they raise becomes a value."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import ThreadPoolExecutor as Pool
from typing import TypeVar

from fl_privacy.federation.server import Failure

T = TypeVar("T")

logger = logging.getLogger(__name__)


def attempt(what: str, function: Callable[[], T]) -> T | Failure:
    """The result of ``function``, or what it raised as a ``Failure``; the traceback is logged at debug level."""
    with Pool(max_workers=1) as pool:
        future: Future[T] = pool.submit(function)
        error = future.exception()
    if error is None:
        return future.result()
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    logger.warning("%s failed: %s", what, reason)
    logger.debug("%s failed", what, exc_info=error)
    return Failure(reason)
