"""The allocator keeps what is freed as long as anybody computes, and is left alone where the user set it."""

import ctypes
import threading
from types import SimpleNamespace

import pytest

from fl_privacy.models.gradients import memory

KEEPS, LETS_GO = [(-1, 2**31 - 1), (-4, 0)], [(-1, 64 * 2**20), (-3, 32 * 2**20), (-4, 65536), "trim"]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Record the settings that the allocator receives."""
    said: list[object] = []
    libc = SimpleNamespace(mallopt=lambda *given: said.append(given), malloc_trim=lambda kept: said.append("trim"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    for name in ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_"):
        monkeypatch.delenv(name, raising=False)
    return said


def test_of_two_threads_the_last_to_leave_lets_go(told: list[object]) -> None:
    begun, first_left = threading.Event(), threading.Event()

    def attack() -> None:
        with memory.freed_memory_kept():
            begun.set()
            first_left.wait(10)

    other = threading.Thread(target=attack)
    with memory.freed_memory_kept():
        other.start()
        assert begun.wait(10)
    assert told == KEEPS, "the other goes on"
    first_left.set()
    other.join()
    assert told == [*KEEPS, *LETS_GO]
    with pytest.raises(ZeroDivisionError), memory.freed_memory_kept():
        _ = 1 / 0
    assert told == 2 * [*KEEPS, *LETS_GO], "however it ends"


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_user_told_the_allocator_stands(
    name: str, told: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "glibc.malloc.trim_threshold=1000")
    with memory.freed_memory_kept():
        pass
    assert told == []
