"""Parsing of plain YAML, and checks of its values."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fl_privacy import checks
from fl_privacy.errors import UserError
from fl_privacy.files.foreign import expanded

_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
"""Numbers such as ``1e-5``, which PyYAML takes for text."""


class PlainLoader(yaml.SafeLoader):
    """YAML loader of texts, numbers, lists and mappings that refuses aliases and duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[Any]()
        for key, _ in node.value:
            found = self.construct_object(key, deep=True)
            if not isinstance(found, str | int | float | bool | None):
                raise yaml.constructor.ConstructorError(None, None, "a key is no text", key.start_mark)
            if seen & {found, str(found)}:  # 17 and '17' name one setting
                raise yaml.constructor.ConstructorError(None, None, f"{found!r:.80} stands twice", key.start_mark)
            seen |= {found, str(found)}
        return super().construct_mapping(node, deep=deep)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not read", self.peek_event().start_mark)
        return super().compose_node(parent, index)


PlainLoader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def loaded(content: bytes, name: str) -> object:
    """Parse YAML without aliases and duplicate keys; ``UserError`` about ``name`` for other content."""
    try:
        return yaml.load(content, PlainLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{name} is expected to be YAML, but is not: {reason}; correct it.") from error


def mapping(where: str, given: object) -> Mapping[str, Any]:
    """Return ``given`` if it is a mapping with text keys, empty for ``None``, else raise ``UserError`` on ``where``."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise UserError(f"{where} is expected to be a mapping of names, but got {given!r:.80}; write NAME: VALUE.")
    return given


def table(where: str, given: object, *known: str) -> Mapping[str, Any]:
    """Return ``given`` if it is a mapping with keys among ``known``, else raise ``UserError`` about ``where``."""
    section = mapping(where, given)
    if odd := [key for key in section if key not in known]:
        raise UserError(f"{where} is expected to have keys among {', '.join(known)}, but got {odd[0]!r}; use those.")
    return section


def listed(where: str, given: object) -> Sequence[Any]:
    """Return ``given`` if it is a list, else raise ``UserError`` about ``where``."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UserError(f"{where} is expected to be a list, but got {given!r:.80}; write [VALUE].")
    return given


def names(where: str, given: object, *, star: bool = False) -> tuple[str, ...]:
    """Return the names in a list, or the keys mapped to true; ``UserError`` otherwise. ``star`` allows a name ``*``."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            checks.one_of(f"{where}.{key}", value, (True, False))
        given = [key for key, value in given.items() if value]
    found = listed(where, given)
    if odd := [one for one in found if not isinstance(one, str) or (one == "*" and not star)]:
        raise UserError(f"{where} is expected to list names, but got {odd[0]!r}; write out each name.")
    return tuple(dict.fromkeys(found))


def place_of(where: str, given: object, folder: Path) -> Path:
    """Return the path ``given`` relative to ``folder``; ``UserError`` that names ``where`` if empty or no string."""
    if not isinstance(given, str) or not given:
        raise UserError(f"{where} is expected to be a path, but got {given!r:.80}; try data.")
    return Path(os.path.normpath(folder / expanded(given)))
