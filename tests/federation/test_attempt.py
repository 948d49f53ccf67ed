import threading

import pytest

from fl_privacy.federation.attempt import attempt
from fl_privacy.federation.guard import Failure


def test_an_exception_becomes_one_line():
    def fail():
        raise OSError("first line\nsecond line")

    assert attempt(fail) == Failure("OSError: first line")


def test_an_interrupt_is_not_swallowed():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(interrupted)


def test_the_call_stays_in_the_callers_thread():
    """Else an interrupt would wait for its end, and gradients would be on again inside ``torch.no_grad``."""
    assert attempt(threading.get_ident) == threading.get_ident()
