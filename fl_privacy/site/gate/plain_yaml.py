"""YAML with ``1e-5`` as a number, and with an error for duplicate keys."""

import re
from typing import Any

import yaml

from fl_privacy.errors import UserError

_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")
"""Numbers with an exponent, which are texts without a point in YAML 1.1, the version of PyYAML."""


class PlainLoader(yaml.SafeLoader):
    """Builds texts, numbers, lists and mappings alone, and refuses aliases and duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[Any]()
        for key, _ in node.value:
            found = self.construct_object(key, deep=True)
            if not isinstance(found, str | int | float | bool | None):
                raise yaml.constructor.ConstructorError(None, None, "a key is no text", key.start_mark)
            if found in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{found!r:.80} stands twice", key.start_mark)
            seen.add(found)
        return super().construct_mapping(node, deep=deep)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not read", self.peek_event().start_mark)
        return super().compose_node(parent, index)


PlainLoader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def loaded(content: bytes, name: str) -> object:
    """Parse YAML of texts, numbers, lists and mappings without duplicate keys; else ``UserError`` with ``name``."""
    try:
        return yaml.load(content, PlainLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{name} is expected to be YAML, but is not: {reason}.") from error
