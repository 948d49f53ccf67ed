"""Parse XGBoost's Universal Binary JSON within bounds and without executing anything."""

import struct
from typing import Any

import numpy as np

from fl_privacy.errors import UserError

DEEPEST = 40
"""Levels of containers; XGBoost's models have eight."""

MOST_VALUES = 2_000_000
"""Largest number of values outside of numeric arrays, which are parsed at once: XGBoost writes some dozens a tree."""

_NUMBERS = {"i": ">i1", "U": ">u1", "I": ">i2", "l": ">i4", "L": ">i8", "d": ">f4", "D": ">f8"}
_CONSTANTS = {"Z": None, "T": True, "F": False}


def read_ubjson(data: bytes) -> Any:
    """Parse one UBJSON value.

    Args:
        data: all of its bytes. Memory stays near their number, plus some hundred bytes for each of ``MOST_VALUES``.

    Raises:
        UserError: it is damaged, nested too deeply, or of a type that XGBoost does not write.
    """
    reader = _Reader(data)
    try:
        value = reader.value(reader.text(1), 0)
    except (struct.error, UnicodeDecodeError, IndexError, ValueError) as error:
        raise UserError(f"A model is expected to be whole UBJSON, but is damaged: {error}.") from error
    return value


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.values = data, 0, 0

    def take(self, number: int) -> bytes:
        if number < 0 or self.at + number > len(self.data):
            raise ValueError(f"{number} bytes at {self.at} of {len(self.data)}")
        self.at += number
        return self.data[self.at - number : self.at]

    def text(self, number: int) -> str:
        return self.take(number).decode("utf-8")

    def number(self, kind: str) -> Any:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def length(self) -> int:
        kind = self.text(1)
        if kind not in "iUIlL":
            raise ValueError(f"a length of type {kind!r}")
        return int(self.number(kind))

    def value(self, kind: str, depth: int) -> Any:
        self.values += 1
        if depth > DEEPEST or self.values > MOST_VALUES:
            raise ValueError(f"more than {DEEPEST} levels or {MOST_VALUES} values")
        if kind in _NUMBERS:
            return self.number(kind)
        if kind in _CONSTANTS:
            return _CONSTANTS[kind]
        if kind == "C":
            return self.text(1)
        if kind == "S":
            return self.text(self.length())
        if kind == "[":
            return self.array(depth)
        if kind == "{":
            return self.mapping(depth)
        raise ValueError(f"type {kind!r} at {self.at}")

    def array(self, depth: int) -> Any:
        kind, number = self.header()
        if kind:
            if kind not in _NUMBERS or number is None:
                raise ValueError(f"an array of type {kind!r}")
            dtype = np.dtype(_NUMBERS[kind])
            return np.frombuffer(self.take(number * dtype.itemsize), dtype).astype(dtype.newbyteorder("="))
        if number is not None:
            if number > len(self.data) - self.at:
                raise ValueError(f"{number} items in {len(self.data) - self.at} bytes")
            return [self.value(self.text(1), depth + 1) for _ in range(number)]
        found = []
        while (mark := self.text(1)) != "]":
            found.append(self.value(mark, depth + 1))
        return found

    def mapping(self, depth: int) -> dict[str, Any]:
        kind, number = self.header()
        if kind or number is not None:
            raise ValueError("an object with a type or a length")
        found: dict[str, Any] = {}
        while self.data[self.at : self.at + 1] != b"}":
            key = self.text(self.length())
            found[key] = self.value(self.text(1), depth + 1)
        self.at += 1
        return found

    def header(self) -> tuple[str, int | None]:
        kind = ""
        if self.data[self.at : self.at + 1] == b"$":
            self.at += 1
            kind = self.text(1)
        if self.data[self.at : self.at + 1] == b"#":
            self.at += 1
            return kind, self.length()
        return kind, None
