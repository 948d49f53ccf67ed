"""Load configurations from untrusted sources; only plain values of registered options are accepted.

Import paths come from ``conf`` of this package or a plugin; others need ``trust=`` on the command line.
"""

import importlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar, NoReturn

import yaml

from fl_privacy.errors import UserError
from fl_privacy.runs.config.building import own_modules
from fl_privacy.runs.config.compose import NAMING, compose_file, expand_sweep, parse_overrides
from fl_privacy.runs.config.parse import LATER, options, select, suggest
from fl_privacy.runs.config.settings import captured_groups, captured_keys, declared_settings, groups
from fl_privacy.site.gate.plain_yaml import PlainLoader

MOST_BYTES = 1 << 17
MOST_VALUES = 20_000
DEEPEST = 20
"""Limits of a file: bytes, values and depth. Files of runs are far smaller."""

_TARGET = "_target_"
_IMPORT_PATH = re.compile(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+", re.ASCII)


class _Loader(PlainLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        letter: [(tag, form) for tag, form in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for letter, resolvers in PlainLoader.yaml_implicit_resolvers.items()
    }


def read_settings(path: Path) -> dict[str, Any]:
    """Load plain values from YAML; ``UserError`` for a large or deep file, aliases, tags or interpolations."""
    try:
        if not path.is_file():
            _refuse(path, "is no file")
        with path.open("rb") as file:
            read = file.read(MOST_BYTES + 1)
        if len(read) > MOST_BYTES:
            _refuse(path, f"is larger than {MOST_BYTES >> 10} KiB")
        text = read.decode()
    except OSError as error:
        _refuse(path, f"can't be read ({error.strerror})")
    except UnicodeDecodeError:
        _refuse(path, "is no text")
    try:
        _expect_small(path, text)
        content = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        _refuse(path, f"is none: {' '.join(str(error).split())[:200]}")
    if not isinstance(content, dict) or not content:
        _refuse(path, "holds a list" if isinstance(content, list) else "is empty")
    for key, value in _leaves(content):
        if not isinstance(value, str | int | float | bool | None):
            _refuse(path, f"holds {key}, a {type(value).__name__}")
        if isinstance(value, str) and ("${" in value or value == "???"):
            _refuse(path, f"refers to something else in {key}={value[:80]!r}")
    if strange := next((key for key in content if not isinstance(key, str)), None):
        _refuse(path, f"holds the key {strange!r}")
    return {str(key): value for key, value in content.items()}


def recorded_parts(path: Path, trust: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings that an attack copies from a captured run's file; ``UserError`` for code not in ``trust``."""
    found, parts = read_settings(path), captured_groups()
    choices = _choices(path, found, parts, trust)
    declared = [key for key, _ in declared_settings()]
    for key in (f"{name}.{key}" for name in ("intercept", "threat_model") for key in found.get(name) or ()):
        if key not in declared:
            _refuse(path, f"has {key}{suggest(key, (name for name in declared if '.' in name))}")
    taken = {}
    for key in captured_keys():
        above, _, name = key.rpartition(".")
        section = select(found, above) if above else found
        if not isinstance(section, dict) or (name not in section and key not in LATER):
            _refuse(path, f"has no {key}")
        taken[key] = section.get(name, LATER.get(key))
    return taken | {f"choices.{part}": choices[part] for part in parts}


def registered_run(path: Path, trust: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings of the run that wrote ``path``; ``UserError`` for code outside this package and ``trust``."""
    found = read_settings(path)
    _choices(path, found, [part for part in groups() if isinstance(found.get(part), dict)], trust)
    return found


def _choices(path: Path, found: Mapping[str, Any], parts: Iterable[str], trust: Collection[str]) -> dict[str, Any]:
    choices: dict[str, Any] = found["choices"] if isinstance(found.get("choices"), dict) else {}
    for part in parts:
        option = choices.get(part)
        if not isinstance(option, str) or option not in options(part):
            _refuse(path, f"has choices.{part}={option!r}{suggest(str(option), options(part), group=part)}")
    registered = compose_file("config", [f"{part}={choices[part]}" for part in parts])
    for part in parts:
        if not isinstance(found.get(part), dict):
            _refuse(path, f"has {part}={found.get(part)!r}")
        expect_registered(part, found[part], registered[part], trust, where=f"{path} (its option {part}=)")
    return choices


def expect_plain(overrides: Sequence[str], trust: Collection[str], *, where: str) -> None:
    """Raise ``UserError`` if ``overrides`` import code not in ``trust``, or have ``${...}``; ``where``: source."""
    for override in parse_overrides([text for listed in overrides for (text,) in expand_sweep([listed])]):
        text, key = override.input_line or "", override.key_or_group
        above, _, name = key.rpartition(".")
        outside = key.partition(".")[0].partition("/")[0] in ("hydra", "trust") or "@" in text.partition("=")[0]
        if outside or "${" in text or any(part.startswith("_") for part in above.split(".")):
            raise UserError(f"{where} is expected to hold plain settings, but has {text[:80]!r}; remove that.")
        for at, mapping in [(above, {name: override.value()}), *_mappings(override.value(), key)]:
            for entry, value in mapping.items():
                if str(entry).startswith("_"):
                    _expect_trusted(f"{at}.{entry}", value, trust, where)


def trusted(trust: str | Sequence[str] | None) -> frozenset[str]:
    """Return the import paths and data set names that the setting ``trust`` allows."""
    return frozenset([trust] if isinstance(trust, str) else trust or ())


def trust_in(overrides: Sequence[str]) -> frozenset[str]:
    """Return the files and import paths that the user allows by ``trust=`` in ``overrides``."""
    said = [override.value() for override in parse_overrides(overrides) if override.key_or_group == "trust"]
    return frozenset(str(name) for value in said for name in (value if isinstance(value, list) else [value]))


def expect_registered(
    part: str, section: Mapping[str, Any], registered: Mapping[str, Any], trust: Collection[str], *, where: str
) -> None:
    """Raise ``UserError`` if ``section`` names code outside ``registered`` and ``trust``, or lacks a setting.

    ``registered``: the package's own settings of the chosen option. ``part``: section's name; ``where``: its file, for
    errors.
    """
    for key, value in _mappings(section, part):
        for name in value:
            if not isinstance(name, str):
                raise UserError(f"{where} is expected to have settings by name, but {key} has {name!r}; remove that.")
            is_own = name == _TARGET and key == part and value[name] == registered.get(_TARGET)
            if name.startswith("_") and not is_own:
                _expect_trusted(f"{key}.{name}", value[name], trust, where)
    if section.get(_TARGET) != registered.get(_TARGET):
        return
    if missing := next(_missing(registered, section, part), None):
        raise UserError(
            f"{where} is expected to have all settings of its option, but lacks {missing}; add it, or use the version"
            " that wrote the file."
        )
    if part == "data" and section.get("name") != registered.get("name") and str(section.get("name")) not in trust:
        raise UserError(
            f"{where} is expected to name the data {registered.get('name')} as its option does, but names"
            f" {section.get('name')!r}; if you trust it, say trust={section.get('name')}."
        )


def _expect_trusted(key: str, target: object, trust: Collection[str], where: str) -> None:
    if key.rpartition(".")[2] != _TARGET or not isinstance(target, str) or not _IMPORT_PATH.fullmatch(target):
        raise UserError(
            f"{where} is expected to hold settings of what is registered here, but has {key}={str(target)[:80]!r};"
            " remove that."
        )
    module, _, name = target.rpartition(".")
    if target in trust:
        return
    if module in trust:
        try:
            with own_modules(module):
                found = getattr(importlib.import_module(module), name, None)
        except ImportError as error:
            raise UserError(f"trust expects a module, but {module} can't be imported ({error}); correct it.") from error
        home = str(getattr(found, "__module__", ""))
        if home == module or home.startswith(f"{module}."):
            return
    raise UserError(
        f"{where} is expected to name only what this package or an installed plugin registers, but has {key}={target};"
        f" running it runs code that the file names. If you know it and trust it, say trust={target}."
    )


def _expect_small(path: Path, text: str) -> None:
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        if number == 2 and not isinstance(event, yaml.MappingStartEvent):
            _refuse(path, "holds a list" if isinstance(event, yaml.SequenceStartEvent) else "holds no settings by name")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            _refuse(path, f"refers to something else by *{event.anchor}")
        if depth > DEEPEST or number > MOST_VALUES:
            _refuse(path, f"holds over {MOST_VALUES} values, or some within {DEEPEST} others")


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    match value:
        case dict():
            for key, entry in value.items():
                yield from _leaves(entry, f"{name}.{key}" if name else str(key))
        case list():
            for entry in value:
                yield from _leaves(entry, name)
        case _:
            yield name, value


def _mappings(value: Any, name: str) -> Iterator[tuple[str, dict[Any, Any]]]:
    if isinstance(value, dict):
        yield name, value
        for key, entry in value.items():
            yield from _mappings(entry, f"{name}.{key}")
    elif isinstance(value, list):
        for entry in value:
            yield from _mappings(entry, name)


def _missing(registered: Mapping[str, Any], section: Mapping[str, Any], name: str) -> Iterator[str]:
    for key, value in registered.items():
        if key not in section:
            yield from {f"{name}.{key}"} - LATER.keys()
        elif isinstance(value, dict) and not isinstance(section[key], dict):
            yield f"{name}.{key}"
        elif isinstance(value, dict):
            yield from _missing(value, section[key], f"{name}.{key}")


def _refuse(path: Path, what: str) -> NoReturn:
    raise UserError(
        f"{path} is expected to be YAML with settings of `fl-privacy`, but {what}; repair it or don't use it."
    )


PLACES = frozenset({"root", "folder", "path", "file", "generator", "policies", "cache", "public", *NAMING})
"""Last parts of keys whose values are files or folders."""


def expect_no_place(overrides: Sequence[str], *, where: str, unread: Collection[str] = ()) -> None:
    """Raise ``UserError`` if ``overrides`` of the message ``where`` set a path in a key that is not in ``unread``."""
    for override in parse_overrides([text for listed in overrides for (text,) in expand_sweep([listed])]):
        for name, text in _settings(override.key_or_group, override.value()):
            parted = "/" in text or "\\" in text or leads_outside(text)
            if name not in unread and text.strip() and (parted or name.rpartition(".")[2] in PLACES):
                raise UserError(
                    f"{where} is expected to name no file or folder of a node, but sets {name}; leave it out: whoever"
                    " runs the node sets data-path in its node config."
                )


def expect_below_here(overrides: Sequence[str], *, where: str) -> None:
    """Raise ``UserError`` if ``overrides``, which are from ``where``, name a path outside of the working directory."""
    for override in parse_overrides([text for listed in overrides for (text,) in expand_sweep([listed])]):
        if any(map(leads_outside, _texts(override.value()))):
            text = (override.input_line or "")[:80]
            raise UserError(
                f"{where} is expected to name only paths below the working directory, but has {text!r}; take it out of"
                " the file and set it on the command line."
            )


def leads_outside(text: str) -> bool:
    """Return whether the path ``text`` may lead out of the working directory, on POSIX or Windows."""
    posix, windows = PurePosixPath(text), PureWindowsPath(text)
    absolute = posix.is_absolute() or bool(windows.drive or windows.root)
    return absolute or text.startswith("~") or ".." in (*posix.parts, *windows.parts)


def _settings(name: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _settings(f"{name}.{key}", entry)
    elif not isinstance(value, bool | int | float):
        yield from ((name, text) for text in _texts(value))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for entry in value:
            yield from _texts(entry)
    elif value is not None:
        yield str(value)
