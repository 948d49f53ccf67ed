"""List the options of this package and of installed plugins."""

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fl_privacy.checks import meant_by
from fl_privacy.errors import UserError
from fl_privacy.files import CONFIG_DIR

CUSTOM = "custom"  # option for a user's own code
PLUGINS = "fl_privacy.plugins"  # entry points of packages whose folder ``conf`` adds options


def options(group: str) -> dict[str, Path]:
    """Return the options of ``group``, sorted, with their files; own ones win over a plugin's."""
    found = {path.stem: path for folder in reversed(config_folders()) for path in (folder / group).glob("*.yaml")}
    return dict(sorted(found.items()))


def search_path() -> list[str]:
    """Return the plugins' folders as overrides of Hydra's search path."""
    places = [f"'file://{folder}'" for folder in config_folders()[1:]]
    return [f"hydra.searchpath=[{','.join(places)}]"] if places else []


@cache
def config_folders() -> tuple[Path, ...]:
    """Return the folders ``conf`` of this package and of plugins without importing; ``UserError`` if one is missing."""
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
    """Return the name of an option with settings ``section``; for a user's own code, its name."""
    if option == CUSTOM and isinstance(section, Mapping) and section.get("_target_"):
        return str(section["_target_"]).rpartition(".")[2]
    return option


def suggest(word: str, allowed: Iterable[str], beside: str = "", *, group: str = "", above: str | None = None) -> str:
    """Return the tail of an error about a name: `` (did you mean X?); allowed: X, Y.``

    At most ``MOST_NAMED`` names similar to ``word`` are listed; ``beside`` is a choice that they depend on, such as
    ``attack=idlg``, ``group`` the group of options, and ``above`` the section of settings.
    """
    names = sorted(name for name in allowed if not name.startswith("_") and name != "defaults")
    like = meant_by(word, names, group, above=above)
    meant = f" (did you mean {like}?); " if like else "; "
    meant += f"allowed with {beside}: " if beside else "allowed: "
    if (left := len(names) - MOST_NAMED) > 0:
        nearest = sorted(difflib.get_close_matches(word, names, n=MOST_NAMED, cutoff=0.0))
        return f"{meant}{', '.join(nearest)}, and {left} others."
    return f"{meant}{', '.join(names) or 'nothing'}."
