"""Build dataclasses from untrusted JSON, with checks by their annotations."""

import json
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, get_type_hints

from fl_privacy.checks import fits, in_words

T = TypeVar("T")


def made(kind: type[T], told: object, where: str, **parts: Callable[[object, str], object]) -> T:
    """Build a dataclass from JSON; ``parts`` build fields from (value, place), all others are plain values.

    Raises:
        ValueError: a field is missing, unknown, or of another type.
    """
    if not isinstance(told, dict):
        raise ValueError(f"{where} is {beginning(told)}")
    known: dict[str, Field[Any]] = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    needed = {name for name, field in known.items() if field.default is field.default_factory is MISSING}
    if wrong := sorted(needed ^ needed.intersection(told)) or sorted(told.keys() - known):
        raise ValueError(f"{where} should {'have' if wrong[0] in needed else 'not have'} {wrong[0]}")
    hints, values = get_type_hints(kind), {}
    for name, value in told.items():
        if name not in parts and not fits(value, hints[name]):
            raise ValueError(f"{where}.{name} is {beginning(value)}, not {in_words(hints[name])}")
        plain = tuple(value) if isinstance(value, list) else value
        values[name] = parts[name](value, f"{where}.{name}") if name in parts else plain
    return kind(**values)


def each(make: Callable[[object, str], T], told: object, where: str, *, at_least: int) -> tuple[T, ...]:
    """Build an object from each entry of a list; ``ValueError`` if it is shorter than ``at_least``."""
    if not isinstance(told, list) or len(told) < at_least:
        raise ValueError(f"{where} is {beginning(told)}, not a list of at least {at_least}")
    return tuple(make(entry, f"{where}[{number}]") for number, entry in enumerate(told))


def beginning(value: object) -> str:
    """Return the first 40 characters of a value."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]} ..."
