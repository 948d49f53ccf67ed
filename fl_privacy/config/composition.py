"""Hydra's compose on the shipped ``conf/``, once for each choice of options; settings are put into a copy of it."""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache, lru_cache

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from fl_privacy.config.groups import config_folders, search_path
from fl_privacy.errors import UserError
from fl_privacy.files import CONFIG_DIR

FEW = 3
"""Choices that are composed as a whole; where there are more, as in a sweep, it pays to compose each section once."""

_PLAIN = re.compile(r"[a-z_]+=\w+")


def composed(base: str, chosen: Sequence[str]) -> tuple[DictConfig, Mapping[str, str | None]]:
    """What the file ``base`` of ``conf`` says with the overrides ``chosen`` of options, and the option of each group.

    Raises:
        HydraException, OmegaConfBaseException: they do not fit each other.
    """
    places, stamp = tuple(search_path()), _stamp()
    apart = dict(filter(None, map(_apart, chosen)))
    if _composed.cache_info().misses >= FEW and len(apart) == len(chosen):
        base_config, base_choices = _composed(base, (), places, stamp)
        if apart.keys() <= base_config.keys():
            config = deepcopy(base_config)
            with open_dict(config):
                for group, option in apart.items():
                    config[group] = deepcopy(_section(group, option, places, stamp))
            return config, {**base_choices, **apart}
    config, choices = _composed(base, tuple(chosen), places, stamp)
    return deepcopy(config), choices


def _apart(override: str) -> tuple[str, str] | None:
    """Group and option, where the option is of this package and stands by itself: no other option shows in it."""
    group, _, option = override.partition("=")
    path = CONFIG_DIR / group / f"{option}.yaml"
    if not _PLAIN.fullmatch(override) or not path.is_file():
        return None
    text = path.read_text()
    return None if "@package" in text or ("defaults:" in text and "_self_" not in text) else (group, option)


@lru_cache(maxsize=512)
def _section(group: str, option: str, places: tuple[str, ...], stamp: int) -> DictConfig:
    """What ``option`` says, composed without all the others."""
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = compose(f"{group}/{option}", overrides=[*places])
    return config[group]


@lru_cache(maxsize=32)
def _composed(
    base: str, chosen: tuple[str, ...], places: tuple[str, ...], stamp: int
) -> tuple[DictConfig, Mapping[str, str | None]]:
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = compose(base, overrides=[*chosen, *places], return_hydra_config=True)
    choices = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    return config, choices


@cache
def own_keys(base: str) -> frozenset[str]:
    """What the file ``base`` of ``conf`` sets itself."""
    return frozenset(map(str, OmegaConf.load(CONFIG_DIR / f"{base}.yaml").keys()))


def _stamp() -> int:
    """Changes with every file that is composed."""
    paths = (path for folder in config_folders() for path in folder.rglob("*.yaml"))
    return hash(tuple((str(path), path.stat().st_mtime_ns) for path in sorted(paths)))


def put_settings(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Set in ``config`` what ``overrides`` say, in their order: ``key=``, ``+key=``, ``++key=``, ``~key``, as in Hydra.

    Raises:
        UserError: one adds what is there, takes out what is not, or sets what there is not.
        OmegaConfBaseException: a value does not fit.
    """
    for override in overrides:
        key, value, text = override.key_or_group, override.value(), override.input_line
        if override.package is not None:
            raise UserError(f"A group of options is expected before @, but got {text}.")
        there = OmegaConf.select(config, key, throw_on_missing=False)
        if override.is_delete():
            if there is None or (value is not None and value != there):
                raise UserError(f"A setting that is there is expected to be taken out, but got {text}.")
            above, _, name = key.rpartition(".")
            section = OmegaConf.select(config, above) if above else config
            with open_dict(section):
                del section[name]
            continue
        if override.is_add() and there is not None and not isinstance(value, dict | list):
            raise UserError(f"{text} adds a setting that is there; write {key}=VALUE.")
        adds = override.is_add() or override.is_force_add()
        try:
            OmegaConf.update(config, key, value, merge=True, force_add=adds)
        except (ConfigAttributeError, ConfigKeyError) as error:
            raise UserError(
                f"A setting that is there is expected, but got {text}; to add one, write +{text}."
            ) from error
