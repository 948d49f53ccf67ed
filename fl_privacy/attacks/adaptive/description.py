"""The public description of a defense, taken apart."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """One of the defenses that a description speaks of: its name and its settings."""

    name: str
    settings: Mapping[str, Any]


def parts(description: Mapping[str, Any]) -> list[Part]:
    """The defenses in ``description``, in order.

    Args:
        description: settings by ``NAME.SETTING``; of a composed defense the last two names of a longer path count. The
            second defense of a name is called ``NAME#2``.
    """
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for key, value in description.items():
        *path, setting = key.split(".")
        found.setdefault(tuple(path), {})[setting] = value
    return [Part(path[-1].partition("#")[0] if path else "", settings) for path, settings in found.items()]
