"""Messages on the pipes of an isolated process; it uses the standard library only."""

import os
import struct
from collections.abc import Sequence


class Said:
    """Kinds of a sandbox's messages; the first part of each message is one of them."""

    NAME, TEXT, PAGE, DONE, FAILED = b"name", b"told", b"page", b"done", b"failed"


def framed(parts: Sequence[bytes]) -> list[bytes]:
    """Return a header with the number and lengths of ``parts``, followed by the parts."""
    return [struct.pack(f">{1 + len(parts)}Q", len(parts), *map(len, parts)), *parts]


def own_pipes() -> tuple[int, int]:
    """Return pipes (input, output) to the parent. Then standard input is empty, and prints go to standard error."""
    inlet, outlet = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return inlet, outlet


def read_parts(descriptor: int) -> list[bytes]:
    """Return the parts of the next message from the parent; end the process if the parent has ended."""
    (number,) = struct.unpack(">Q", _bytes(descriptor, 8))
    sizes = struct.unpack(f">{number}Q", _bytes(descriptor, 8 * number))
    return [_bytes(descriptor, size) for size in sizes]


def write_parts(descriptor: int, parts: Sequence[bytes]) -> None:
    """Write a message of ``parts`` to the parent."""
    os.set_blocking(descriptor, True)
    for part in framed(parts):
        content = memoryview(part)
        while content:
            content = content[os.write(descriptor, content) :]


def _bytes(descriptor: int, size: int) -> bytes:
    os.set_blocking(descriptor, True)  # an app may have changed it
    found = bytearray(size)
    rest = memoryview(found)
    while rest:
        if not (length := os.readv(descriptor, [rest])):
            os._exit(0)  # the parent has ended
        rest = rest[length:]
    return bytes(found)
