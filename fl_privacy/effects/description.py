"""The public description of a defense: its parts, and how they are written to a file."""

import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import UnionType
from typing import Any

from fl_privacy import checks
from fl_privacy.effects.kinds import KNOWN, UNDECLARED, Effect
from fl_privacy.errors import UserError


@dataclass(frozen=True)
class Part:
    """One of the defenses that a defense is composed of, as the public may know it.

    Attributes:
        name: as in the configuration.
        settings: by name, for people to read: numbers, text, lists of them.
        effect: what it does, for everything else.
        strength: the setting that its strength follows, in pages that compare runs; the noise of a mechanism of
            differential privacy is proportional to it. ``None`` where there is none.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    effect: Effect = UNDECLARED
    strength: str | None = None


Description = tuple[Part, ...]
"""The public description of a defense: its parts in order. Empty of a client that does not defend itself."""


def settings_in_words(parts: Iterable[Part]) -> str:
    """``NAME.SETTING=value`` of all parts with commas between; the second part of a name is ``NAME#2``."""
    words, seen = [], list[str]()
    for part in parts:
        seen.append(part.name)
        number = seen.count(part.name)
        name = f"{part.name}#{number}" if number > 1 else part.name
        words += [f"{name}.{key}={value}" for key, value in part.settings.items()]
    return ", ".join(words)


def to_plain(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """``parts`` as lists, mappings, numbers and text."""
    return [
        {
            "name": part.name,
            "settings": dict(part.settings),
            "strength": part.strength,
            "effect": _effect_to_plain(part.effect),
        }
        for part in parts
    ]


def from_plain(plain: object) -> Description:
    """What ``to_plain`` was given.

    Raises:
        UserError: it is something else, or an effect that no imported module declares.
    """
    if not isinstance(plain, list):
        raise UserError(f"The description of a defense is expected to be a list of its parts, but got {plain!r}.")
    return tuple(_part_from_plain(part) for part in plain)


def _part_from_plain(plain: object) -> Part:
    types = {"name": str, "settings": Mapping[str, Any], "strength": str | None, "effect": Mapping[str, Any]}
    if not isinstance(plain, dict) or plain.keys() != types.keys():
        raise UserError(f"A part of a defense is expected to be told by {', '.join(types)}, but got {plain!r}.")
    for key, annotation in types.items():
        if not checks.fits(plain[key], annotation):
            raise UserError(
                f"The {key} of a part of a defense is expected to be {checks.in_words(annotation)}, but got"
                f" {plain[key]!r}."
            )
    return Part(**(plain | {"effect": _effect_from_plain(plain["effect"])}))


def _effect_to_plain(effect: Effect) -> dict[str, Any]:
    def told(value: Any) -> Any:
        return _effect_to_plain(value) if isinstance(value, Effect) else value

    return {"effect": type(effect).__name__, **{f.name: told(getattr(effect, f.name)) for f in fields(effect)}}


def _effect_from_plain(plain: Mapping[str, Any], base: type[Effect] = Effect) -> Effect:
    known = KNOWN.get(name) if isinstance(name := plain.get("effect"), str) else None
    if known is None or not issubclass(known, base):
        allowed = ", ".join(sorted(key for key, effect in KNOWN.items() if issubclass(effect, base)))
        raise UserError(
            f"The effect of a defense is expected to be one of {allowed}, but got {name!r}; import the module that"
            " declares it."
        )
    types = typing.get_type_hints(known)
    names = [f.name for f in fields(known)]
    needed = {f.name for f in fields(known) if f.default is MISSING and f.default_factory is MISSING}
    given = {key: value for key, value in plain.items() if key != "effect"}
    if not needed <= given.keys() <= set(names):
        raise UserError(f"{name} is expected to be told by {', '.join(names) or 'nothing'}, but got {sorted(given)}.")
    return known(**{key: _value_from_plain(f"{name}.{key}", value, types[key]) for key, value in given.items()})


def _value_from_plain(name: str, value: Any, annotation: Any) -> Any:
    kinds = typing.get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    effects = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Effect)]
    if effects and isinstance(value, Mapping):
        return _effect_from_plain(value, effects[0])
    if not any(checks.fits(value, kind) for kind in kinds if kind not in effects):
        raise UserError(f"{name} is expected to be {checks.in_words(annotation)}, but got {value!r}.")
    return tuple(value) if isinstance(value, list) else value
