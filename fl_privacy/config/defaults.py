"""What a section leaves out has the value that what it builds gives it, so that files hold only what differs."""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

from omegaconf import DictConfig, open_dict

from fl_privacy.config.targets import locate_target

COMPLETED: Mapping[str, Mapping[str, Any]] = {
    "attack": {"shards": 1},
    "defense": {},
    "data": {},
    "partition": {},
    "server": {},
    "guard": {},
}
"""Section -> settings of it that its ``_target_`` does not take."""


def complete(config: DictConfig) -> None:
    """Add to the sections of ``COMPLETED`` what they leave out.

    Raises:
        UserError: what a section builds can't be imported.
    """
    for name, own in COMPLETED.items():
        section = config.get(name)
        target = section.get("_target_") if isinstance(section, DictConfig) else None
        if target is None:
            continue
        with open_dict(section):
            for key, value in {**_defaults(str(target), name), **own}.items():
                if key not in section:
                    section[key] = value


@cache
def _defaults(target: str, name: str) -> Mapping[str, Any]:
    try:
        parameters = inspect.signature(locate_target(DictConfig({"_target_": target}), name)).parameters
    except (TypeError, ValueError):
        return {}
    defaults = {key: list(p.default) if isinstance(p.default, tuple) else p.default for key, p in parameters.items()}
    return {key: value for key, value in defaults.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_plain, value))
    return isinstance(value, str | int | float | None)
