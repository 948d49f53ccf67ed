"""Calls whose failure is somebody else's: whatever they raise becomes a value."""

import logging
from collections.abc import Callable
from typing import TypeVar

from fl_privacy.federation.guard import Failure

T = TypeVar("T")

logger = logging.getLogger(__name__)


def attempt(function: Callable[[], T]) -> T | Failure:
    """The result of ``function``, or what it raised as a ``Failure``; the traceback is logged at debug level.

    Clients and attacks may be foreign code: anything can come out of them, a call of ``sys.exit`` too. An interrupt is
    none of it.
    """
    try:
        return function()
    except (Exception, SystemExit) as error:
        logger.debug("The call failed", exc_info=error)
        return Failure(f"{type(error).__name__}: {error}".splitlines()[0])
