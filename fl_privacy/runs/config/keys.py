"""Derive keys and their roles from the declared settings."""

from collections.abc import Iterable, Iterator
from dataclasses import Field, fields, is_dataclass
from typing import Any

from fl_privacy.runs.config.parse import Options
from fl_privacy.runs.config.settings import Role, RunSettings


def declared_settings() -> Iterator[tuple[str, Field[Any]]]:
    """Yield dotted key and declaration of every setting and group, groups first."""
    yield from _walk(RunSettings, "")


def groups(*, shown: bool = False) -> list[str]:
    """Return the names of groups of options; with ``shown`` only those that pages name."""
    return [f.name for f in fields(RunSettings) if "group" in f.metadata and (f.metadata["shown"] or not shown)]


def sections() -> list[str]:
    """Return the names of all sections."""
    return [f.name for f in fields(RunSettings) if is_dataclass(f.type) or f.type is Options]


def keys_of(role: Role) -> tuple[str, ...]:
    """Return dotted keys of all settings, and choices of groups, with this role."""
    found: list[str] = []
    for key, declared in declared_settings():
        if "group" in declared.metadata and role is Role.RUNTIME:
            found += [f"{key}.{name}" for name in declared.metadata["runtime"]]
        if declared.metadata["role"] is role and not is_dataclass(declared.type):
            found.append(key)
    of_choice = {f.name: f.metadata["role"] for f in fields(RunSettings) if "group" in f.metadata}
    of_choice |= dict.fromkeys(("experiment", "threat_model"), Role.RUNTIME)  # short for settings with own roles
    return (*found, *(f"choices.{name}" for name, of in of_choice.items() if of is role))


def captured_keys() -> tuple[str, ...]:
    """Return dotted keys that an attack on captured updates takes from the captured run."""
    found: list[str] = []
    for key, declared in declared_settings():
        if declared.metadata["captured"] and key.partition(".")[0] not in found:
            found.append(key)
    return tuple(found)


def captured_groups() -> tuple[str, ...]:
    """Return the groups among the captured keys."""
    return tuple(f.name for f in fields(RunSettings) if "group" in f.metadata and f.metadata["captured"])


def is_within(key: str, keys: Iterable[str]) -> bool:
    """Return ``True`` if the dotted ``key`` is one of ``keys`` or below one."""
    return any(key == name or key.startswith(f"{name}.") for name in keys)


def _walk(kind: type, above: str) -> Iterator[tuple[str, Field[Any]]]:
    for declared in fields(kind):
        if "role" in declared.metadata:
            yield f"{above}{declared.name}", declared
        if is_dataclass(declared.type):
            yield from _walk(declared.type, f"{above}{declared.name}.")  # type: ignore[arg-type]
