"""Calls whose failure is somebody else's: whatever they raise becomes a value."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import ThreadPoolExecutor as Pool
from typing import TypeVar

from fl_privacy.federation.server import Failure

T = TypeVar("T")

logger = logging.getLogger(__name__)


def attempt(function: Callable[[], T]) -> T | Failure:
    """The result of ``function``, or what it raised as a ``Failure``; the traceback is logged at debug level."""
    with Pool(max_workers=1) as pool:
        future: Future[T] = pool.submit(function)
        error = future.exception()
    if error is None:
        return future.result()
    logger.debug("The call failed", exc_info=error)
    return Failure(f"{type(error).__name__}: {error}".splitlines()[0])
