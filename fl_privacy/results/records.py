"""``metrics.jsonl``: one record a line, appended as it comes."""

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from fl_privacy.errors import UserError
from fl_privacy.results.schema import wrong_record
from fl_privacy.victim_ids import Attacker

MOST_BYTES = 1 << 29
"""Of a file of records."""

SYNC_EVERY = 5.0
"""Seconds between two waits for the disk. A line survives the death of the process in any case."""


class RecordWriter:
    """Appends records, a line of JSON each, to a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._synced = time.monotonic()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write ``record`` as one line and hand it to the operating system."""
        self._file.write(dump_json(record) + "\n")
        self._file.flush()
        if time.monotonic() - self._synced > SYNC_EVERY:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Wait for the disk and close, which also holds where the disk is full."""
        if not self._file.closed:
            try:
                os.fsync(self._file.fileno())
            finally:
                self._file.close()

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_records(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The records in ``path`` and what is wrong with them: a last line that a killed run left half written.

    Raises:
        UserError: another line is damaged.
    """
    if not path.is_file():
        return [], [f"{path.name} is missing"]
    if path.stat().st_size > MOST_BYTES:
        raise UserError(
            f"{path} is expected to hold a run's records, but has {path.stat().st_size >> 20} MiB, more than"
            f" {MOST_BYTES >> 20}; remove it."
        )
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records.append(_record(line))
        except ValueError as error:
            if number < len(lines):
                raise UserError(
                    f"{path} is expected to hold a JSON record a line, but line {number} is damaged ({error});"
                    " remove that line."
                ) from error
            return records, [f"the last line of {path.name} is cut off"]
    return records, []


def records_of(records: Iterable[Mapping[str, Any]], kind: str, attacker: Attacker) -> list[Mapping[str, Any]]:
    """Those of one kind and attacker; what names no attacker belongs to the plain one."""
    return [r for r in records if r["kind"] == kind and r.get("attacker", Attacker.PLAIN) == attacker]


def _record(line: bytes) -> dict[str, Any]:
    record = parse_json(line.decode())
    if not isinstance(record, dict) or "kind" not in record:
        raise ValueError("not a record")
    if wrong := wrong_record(record):
        raise ValueError(wrong)
    return record


def dump_json(value: Any, *, indent: int | None = None) -> str:
    """``value`` as standard JSON: infinities become ``"inf"`` and ``"-inf"``, NaN becomes null."""
    return json.dumps(_standard(value), allow_nan=False, indent=indent, ensure_ascii=False)


def parse_json(text: str) -> Any:
    """What ``dump_json`` wrote, infinities restored; NaN comes back as ``None``."""
    try:
        return _restored(json.loads(text))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _standard(value: Any) -> Any:
    match value:
        case float() if math.isnan(value):
            return None
        case float() if math.isinf(value):
            return "inf" if value > 0 else "-inf"
        case Mapping():
            return {str(key): _standard(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_standard(entry) for entry in value]
    return value


def _restored(value: Any) -> Any:
    match value:
        case "inf" | "-inf":
            return float(value)
        case dict():
            return {key: _restored(entry) for key, entry in value.items()}
        case list():
            return [_restored(entry) for entry in value]
    return value
