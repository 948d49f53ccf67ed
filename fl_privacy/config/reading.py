"""Declared settings read from nested mappings, each checked for its type and range."""

import typing
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf

from fl_privacy.checks import fits, in_words, one_of
from fl_privacy.config._options import suggest
from fl_privacy.errors import UserError

T = TypeVar("T")


def select(content: Any, key: str) -> Any:
    """Return what nested mappings hold at the dotted ``key``; ``None`` where there is nothing."""
    for name in key.split("."):
        content = content.get(name) if isinstance(content, Mapping) else None
    return content


def put(content: dict[str, Any], key: str, value: Any) -> None:
    """Set the dotted ``key`` in nested mappings."""
    *above, last = key.split(".")
    for name in above:
        content = content.setdefault(name, {})
    content[last] = value


def expect_type(name: str, value: object, annotation: Any) -> None:
    """Raise ``UserError`` unless ``value`` fits ``annotation``; one that Hydra is yet to build does."""
    is_built = isinstance(value, dict) and "_target_" in value
    if not is_built and not fits(value, annotation):
        raise UserError(f"{name} is expected to be {in_words(annotation)}, but got {value!r}.")


def expect_within(name: str, value: object, within: tuple[float, float] | None) -> None:
    """Raise ``UserError`` unless ``value`` is no number or lies ``within`` these bounds."""
    if within and isinstance(value, int | float) and not within[0] <= value <= within[1]:
        raise UserError(f"{name} is expected to be at least {within[0]:g} and at most {within[1]:g}, but got {value}.")


def read_section(kind: type[T], section: DictConfig, above: str = "") -> T:
    """Build ``kind``, a dataclass of declared settings, from ``section`` below the key ``above``.

    Raises:
        UserError: one is missing, of a wrong type or out of its range, or nothing reads it.
    """
    declared = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    for key in map(str, section):
        if key not in declared:
            raise UserError(f"Unknown key {above}{key}{suggest(key, declared)}")
    return kind(**{name: _value(f, hints[name], section.get(name), f"{above}{name}") for name, f in declared.items()})


def _value(declared: Field[Any], annotation: Any, value: Any, name: str) -> Any:
    if is_dataclass(annotation) or annotation is DictConfig:
        if not isinstance(value, DictConfig):
            raise UserError(f"{name} is expected to be a section of settings, but is none; leave it as it is.")
        for key, within in declared.metadata.get("limits", {}).items():
            expect_within(f"{name}.{key}", value.get(key), within)
        if names := declared.metadata.get("names"):
            one_of(f"{name}.name", value.get("name"), names)
        section: Any = annotation
        return _frozen(value) if annotation is DictConfig else read_section(section, value, f"{name}.")
    value = list(value) if isinstance(value, ListConfig) else value
    expect_type(name, value, annotation)
    expect_within(name, value, declared.metadata["within"])
    return value


def _frozen(section: DictConfig) -> DictConfig:
    own = OmegaConf.create(OmegaConf.to_container(section, resolve=True))
    assert isinstance(own, DictConfig)
    OmegaConf.set_readonly(own, True)
    return own


def plain_value(value: Any) -> Any:
    """Return a setting as nested mappings, lists, text and numbers."""
    if is_dataclass(value):
        return {name: plain_value(entry) for name, entry in vars(value).items()}
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig) else value
