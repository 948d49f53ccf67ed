"""The public description of a defense, taken apart."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """One of the defenses that a description speaks of: its name and its settings."""

    name: str
    settings: Mapping[str, Any]


def parts(description: Iterable[Any]) -> list[Part]:
    """The defenses in ``description``, in order."""
    return [Part(part.name, part.settings) for part in description]
