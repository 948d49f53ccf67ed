"""List the options of this package and of plugins, and parse declared settings with checks of types and ranges."""

import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import Field, fields, is_dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from fl_privacy.checks import fits, in_words, meant_by, one_of
from fl_privacy.errors import UserError
from fl_privacy.files import CONFIG_DIR, shipped

T = TypeVar("T")

LATER: Mapping[str, Any] = shipped(__file__, "later.json")
"""Settings that were added later, at the value that older files imply; it does not change hashes."""


class Options(Mapping[str, Any]):
    """Read-only mapping of the settings of a chosen option, such as ``attack=auto``."""

    def __init__(self, settings: Mapping[Any, Any]) -> None:
        self._settings = {str(key): deepcopy(value) for key, value in settings.items()}

    def __getitem__(self, key: str) -> Any:
        return self._settings[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)

    def __repr__(self) -> str:
        return f"Options({self._settings})"

    def plain(self) -> dict[str, Any]:
        return deepcopy(self._settings)


def select(content: Any, key: str) -> Any:
    """Return the value at the dotted ``key`` of nested mappings; ``None`` if missing."""
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
    """Raise ``UserError`` unless ``value`` fits the type ``annotation``, or has a ``_target_`` that builds it later."""
    if not (isinstance(value, dict) and "_target_" in value) and not fits(value, annotation):
        raise UserError(f"{name} is expected to be {in_words(annotation)}, but got {value!r}; change it.")


def expect_within(name: str, value: object, within: tuple[float, float] | None) -> None:
    """Raise ``UserError`` for a number outside ``within`` (least, largest); ``None`` allows all numbers."""
    if within and isinstance(value, int | float) and not within[0] <= value <= within[1]:
        low, high = (f"{end:g}" for end in within)
        raise UserError(f"{name} is expected to be at least {low} and at most {high}, but got {value}; change it.")


def read_section(kind: type[T], section: Mapping[Any, Any], above: str = "") -> T:
    """Build the dataclass ``kind`` from the section at key ``above``; ``UserError`` for a missing or wrong setting."""
    declared = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    for key in map(str, section):
        if key not in declared:
            raise UserError(f"Unknown key {above}{key}{suggest(key, declared, above=above.rstrip('.'))}")
    values = {name: section.get(name, LATER.get(f"{above}{name}")) for name in declared}
    return kind(**{name: _value(f, hints[name], values[name], f"{above}{name}") for name, f in declared.items()})


def _value(declared: Field[Any], annotation: Any, value: Any, name: str) -> Any:
    if is_dataclass(annotation) or annotation is Options:
        if not isinstance(value, Mapping):
            raise UserError(f"{name} is expected to be a section, but got {value!r:.40}; set {name}.KEY=VALUE.")
        for key, within in declared.metadata.get("limits", {}).items():
            expect_within(f"{name}.{key}", value.get(key), within)
        if names := declared.metadata.get("names"):
            one_of(f"{name}.name", value.get("name"), names)
        section: Any = annotation
        return Options(value) if annotation is Options else read_section(section, value, f"{name}.")
    if isinstance(value, Mapping):  # none of the run's own settings is built, even if an untrusted file says so
        raise UserError(f"{name} is expected to be {in_words(annotation)}, but got a section; set {name}=VALUE.")
    expect_type(name, value, annotation)
    expect_within(name, value, declared.metadata.get("within"))
    return value


def plain_value(value: Any) -> Any:
    """Return a setting as nested mappings, lists, text and numbers."""
    if is_dataclass(value):
        return {name: plain_value(entry) for name, entry in vars(value).items()}
    return value.plain() if isinstance(value, Options) else value


CUSTOM = "custom"  # option for a user's own code
PLUGINS = "fl_privacy.plugins"  # entry points of packages whose folder ``conf`` adds options


def options(group: str) -> dict[str, Path]:
    """Return the sorted options of ``group`` with their files; a plugin's option does not replace the package's."""
    found = {path.stem: path for folder in reversed(config_folders()) for path in (folder / group).glob("*.yaml")}
    return dict(sorted(found.items()))


def search_path() -> list[str]:
    """Return the plugins' folders as overrides of Hydra's search path."""
    places = [f"'file://{folder}'" for folder in config_folders()[1:]]
    return [f"hydra.searchpath=[{','.join(places)}]"] if places else []


@cache
def config_folders() -> tuple[Path, ...]:
    """Return the ``conf`` folders of this package and of plugins; ``UserError`` if a plugin has none."""
    folders = [CONFIG_DIR]
    for point in sorted(entry_points(group=PLUGINS)):
        package, *below = point.module.split(".")
        spec = find_spec(package)
        places = [Path(place, *below, "conf") for place in (spec and spec.submodule_search_locations) or ()]
        if (own := next(filter(Path.is_dir, places), None)) is None:
            raise UserError(
                f"The plugin {point.name} is expected to have a folder conf in its package {point.module}, but has"
                " none; repair or uninstall it."
            )
        folders.append(own)
    return tuple(folders)


MOST_NAMED = 24  # most names in an error


def called(option: str, section: Any) -> str:
    """Return the name of ``option``, or of the user's function or class in ``section`` if the option is ``custom``."""
    if option == CUSTOM and isinstance(section, Mapping) and section.get("_target_"):
        return str(section["_target_"]).rpartition(".")[2]
    return option


def suggest(word: str, allowed: Iterable[str], known: str = "", *, group: str = "", above: str | None = None) -> str:
    """Return the end of an error message on an unknown name: `` (did you mean X?); allowed: X, Y.``

    ``known``: override, such as ``attack=idlg``, on which the allowed names depend. ``group``, ``above``: group or
    section in which ``word`` was expected.
    """
    names = sorted(name for name in allowed if not name.startswith("_") and name != "defaults")
    like = meant_by(word, names, group, above=above)
    meant = f" (did you mean {like}?); " if like else "; "
    meant += f"allowed with {known}: " if known else "allowed: "
    if (left := len(names) - MOST_NAMED) > 0:
        nearest = sorted(difflib.get_close_matches(word, names, n=MOST_NAMED, cutoff=0.0))
        return f"{meant}{', '.join(nearest)}, and {left} others."
    return f"{meant}{', '.join(names) or 'nothing'}."
