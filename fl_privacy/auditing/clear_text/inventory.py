"""Record everything that is sent, by direction, round and kind of message."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fl_privacy.report.audit_parts import UP, Line, Volume

DOWN = "server to client"
MOST_SHOWN = 80  # largest length of a shown value


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Content of one message or reply, by record/key; ``round`` counts messages of this kind to this node, from 1."""

    direction: str
    kind: str
    round: int
    node: int
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def key_of(where: str) -> str:
    """Return the key in ``where``, which is ``record/key``."""
    return where.partition("/")[2]


@dataclass(eq=False)
class Inventory:
    """Record of all entries in messages between server and clients; of arrays, only shape and size are kept."""

    _lines: dict[tuple[str, ...], list[tuple[int, int, str]]] = field(default_factory=lambda: defaultdict(list))
    messages: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))

    def add(self, sent: Sent) -> None:
        way = (sent.direction, sent.kind)
        self.messages[way] += 1
        self.bytes[way] += sum(a.nbytes for a in sent.arrays.values()) + sum(map(_size, sent.values.values()))
        for where, array in sent.arrays.items():
            what = f"array {'x'.join(map(str, array.shape)) or 'of one value'} {array.dtype}"
            self._lines[*way, where, what].append((array.nbytes, sent.round, ""))
        for where, value in sent.values.items():
            of = {"str": "text", "int": "whole number", "float": "number", "bool": "yes or no"}
            what = of.get(type(value).__name__, type(value).__name__)
            if isinstance(value, list):
                what = f"list of {len(value)} {type(value[0]).__name__ if value else 'nothing'}"
            self._lines[*way, where, what].append((_size(value), sent.round, shown(value)))

    def lines(self) -> list[Line]:
        found = [
            Line(
                direction=direction,
                kind=kind,
                record=where.partition("/")[0],
                key=key_of(where),
                what=what,
                size=sum(size for size, _, _ in entries) / len(entries),
                messages=len(entries),
                rounds=tuple(sorted({round for _, round, _ in entries})),
                example=entries[0][2],
            )
            for (direction, kind, where, what), entries in self._lines.items()
        ]
        return sorted(found, key=lambda line: line.direction != UP)

    def volumes(self) -> list[Volume]:
        return [
            Volume(direction=direction, kind=kind, messages=number, bytes=self.bytes[direction, kind])
            for (direction, kind), number in self.messages.items()
        ]


def shown(value: Any) -> str:
    """Return ``value`` as a text of at most ``MOST_SHOWN`` characters."""
    if isinstance(value, bytes):
        text = f"{len(value)} bytes, first {value[:8].hex(' ')}"
    elif isinstance(value, list):
        text = f"{len(value)} values: {', '.join(map(_short, value[:5]))}{', …' if len(value) > 5 else ''}"
    else:
        text = _short(value)
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 1] + "…"


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _size(value: Any) -> int:
    if isinstance(value, bytes | str):
        return len(value)
    return 8 * len(value) if isinstance(value, list) else 8
