"""How messages stand on the pipe between a gate and its app; the standard library is enough for both ends."""

import struct
from collections.abc import Sequence


def framed(parts: Sequence[bytes]) -> list[bytes]:
    """Return the number and lengths of ``parts``, followed by the parts."""
    return [struct.pack(f">{1 + len(parts)}Q", len(parts), *map(len, parts)), *parts]
