"""How messages stand on the pipe between a gate and its app; the standard library is enough for both ends."""

import struct
from collections.abc import Sequence


def framed(parts: Sequence[bytes]) -> list[bytes]:
    """Return number and lengths of ``parts``, then these."""
    return [struct.pack(f">{1 + len(parts)}Q", len(parts), *map(len, parts)), *parts]
