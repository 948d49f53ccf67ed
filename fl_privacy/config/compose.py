"""Hydra's compose on the shipped ``conf/``, with errors a user can act on."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fl_privacy.config.suggest import suggest
from fl_privacy.errors import UserError

_PACKAGE = Path(__file__).resolve().parent.parent
CONFIG_DIR = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"
"""Inside the package in a wheel, beside it in a checkout and in a Flower app bundle."""


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """The resolved configuration for ``overrides`` in Hydra's grammar; ``choices`` names the option of each group.

    Raises:
        UserError: an override does not parse, or names a group, option or key that does not exist.
    """
    parsed = _parse(overrides)
    for override in parsed:
        if override.is_sweep_override():
            raise UserError(f"{override.input_line} lists several values; add -m to run each of them.")
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            config = hydra_compose("config", overrides=list(overrides), return_hydra_config=True)
            chosen = {group: config.hydra.runtime.choices.get(group) for group in sorted(_groups())}
            with open_dict(config):
                del config["hydra"]
                config.choices = chosen
            OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explain(parsed, error)) from error
    known = OmegaConf.load(CONFIG_DIR / "config.yaml").keys() | _groups() | {"choices"}
    if unknown := sorted(str(key) for key in config if key not in known):
        raise UserError(f"Unknown key {unknown[0]}{suggest(unknown[0], map(str, known))}")
    return config


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Every combination of the values that the overrides list (``seed=0,1 attack=dlg,idlg``)."""
    choices = [
        [f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()]
        if o.is_sweep_override()
        else [o.input_line or ""]
        for o in _parse(overrides)
    ]
    return [list(combination) for combination in itertools.product(*choices)]


def options(group: str) -> list[str]:
    """Names that the configuration group ``group`` offers."""
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))


def to_yaml(config: DictConfig) -> str:
    """The configuration as text that ``OmegaConf.create`` reads back."""
    return OmegaConf.to_yaml(config, resolve=True)


def _groups() -> set[str]:
    return {path.name for path in CONFIG_DIR.iterdir() if path.is_dir()}


def _parse(overrides: Sequence[str]) -> list[Override]:
    parsed = []
    for text in overrides:
        try:
            parsed += OverridesParser.create().parse_overrides([text])
        except HydraException as error:
            raise UserError(
                f"Overrides are expected as key=value, but got {text!r}; quote values with spaces."
            ) from error
    return parsed


def _explain(overrides: Sequence[Override], error: Exception) -> str:
    for override in overrides:
        key, value = override.key_or_group, override.value()
        if key in _groups() and isinstance(value, str) and value not in options(key):
            return f"{key} has no option {value!r}{suggest(value, options(key))}"
    if found := re.search(r"[Kk]ey '([^']+)' is not in struct[\s\S]*?full_key: (\S+)", str(error)):
        full_key = found[2]
        parent = ".".join(full_key.split(".")[:-1])
        return f"Unknown key {full_key}{suggest(found[1], _keys_beside(overrides, parent))}"
    if found := re.search(r"Could not override '([^']+)'", str(error)):
        return f"Unknown key {found[1]}{suggest(found[1], map(str, OmegaConf.load(CONFIG_DIR / 'config.yaml')))}"
    return " ".join(str(error).split())


def _keys_beside(overrides: Sequence[Override], parent: str) -> list[str]:
    """Keys of the section ``parent`` in the configuration without the overrides of single keys."""
    groups = [o.input_line or "" for o in overrides if o.key_or_group in _groups()]
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = hydra_compose("config", overrides=groups)
    section = OmegaConf.select(config, parent) if parent else config
    return [str(key) for key in section] if isinstance(section, DictConfig) else []
