"""Build dataclasses from untrusted JSON, with checks by their annotations."""

import json
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import partial
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from fl_privacy.checks import fits, in_words

T = TypeVar("T")

Part = Callable[[object, str], object]
"""Builds a field from its value and place; raises ``ValueError``."""


def made(kind: type[T], told: object, where: str, **parts: Part) -> T:
    """Build a dataclass from JSON, and the dataclasses that its fields hold.

    Args:
        parts: builders of fields; all others are checked by their annotations.

    Raises:
        ValueError: a field is missing, unknown, or of another type.
    """
    if not isinstance(told, dict):
        raise ValueError(f"{where} is {beginning(told)}")
    known: dict[str, Field[Any]] = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    needed = {name for name, field in known.items() if field.default is field.default_factory is MISSING}
    if wrong := sorted(needed - told.keys()) or sorted(told.keys() - known):
        raise ValueError(f"{where} should {'have' if wrong[0] in needed else 'not have'} {wrong[0]}")
    hints = get_type_hints(kind)
    values = {
        name: parts.get(name, partial(_of_type, hints[name]))(value, f"{where}.{name}") for name, value in told.items()
    }
    return kind(**values)


def _of_type(hint: Any, told: object, where: str) -> object:
    if isinstance(kind := next((one for one in (hint, *get_args(hint)) if is_dataclass(one)), None), type):
        return None if told is None and NoneType in get_args(hint) else made(kind, told, where)
    if not fits(told, hint):
        raise ValueError(f"{where} is {beginning(told)}, not {in_words(hint)}")
    return tuple(told) if isinstance(told, list) else told


def each(make: Callable[[object, str], T], told: object, where: str, *, at_least: int) -> tuple[T, ...]:
    """Build an object from each entry of a list; ``ValueError`` if it is shorter than ``at_least``."""
    if not isinstance(told, list) or len(told) < at_least:
        raise ValueError(f"{where} is {beginning(told)}, not a list of at least {at_least}")
    return tuple(make(entry, f"{where}[{number}]") for number, entry in enumerate(told))


def beginning(value: object) -> str:
    """Return the first 40 characters of a value."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]} ..."
