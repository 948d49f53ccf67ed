"""Overrides in Hydra's grammar, with errors a user can act on."""

import itertools
import math
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fl_privacy.config.composition import composed, own_keys, put_settings
from fl_privacy.config.defaults import COMPLETED, NESTED, check_types, complete, completed_sections
from fl_privacy.config.groups import options, suggest
from fl_privacy.config.settings import RunSettings
from fl_privacy.errors import UserError
from fl_privacy.files import CONFIG_DIR

_BEYOND_ASCII = re.compile(r"[\w./-]+")
"""A word or a path, in whatever script."""

NAMING = ("out", "name", "weights", "captured", "truth", "evaluator")
"""Settings of a run that name a file, a folder or a part of one."""

MOST_JOBS = 10_000
"""Of one sweep; each is composed and checked before the first one starts."""


def compose_run(overrides: Sequence[str] = ()) -> RunSettings:
    """The settings of a run for ``overrides`` in Hydra's grammar.

    Raises:
        UserError: an override does not parse, names a group, option or key that does not exist, or sets a setting to
            what it can't be.
    """
    config = RunSettings.of(compose_file("config", overrides))
    for name in NAMING:
        if (value := getattr(config, name)) is not None and not str(value).strip():
            raise UserError(f"{name} is expected to name something, but is empty; leave {name}= out.")
    return config


def compose_file(base: str, overrides: Sequence[str] = ()) -> DictConfig:
    """What the file ``base`` of ``conf`` says, resolved; ``choices`` names the option of each group.

    Args:
        base: name of the file; ``config`` describes a run.
        overrides: of what it says.

    Raises:
        UserError: an override does not parse, or names a group, option or key that does not exist.
    """
    parsed = parse_overrides(overrides)
    for override in parsed:
        if override.is_sweep_override():
            raise UserError(f"{override.input_line} lists several values; add -m to run each of them.")
        if override.key_or_group.replace("/", ".").partition(".")[0] == "hydra":
            raise UserError(f"Settings of a run are expected, but got Hydra's own {override.input_line}; leave it out.")
    _check_groups(parsed)
    try:
        choices, settings = _parted(parsed)
        config, chosen = composed(base, choices)
        put_settings(config, _check_keys(settings, config))
        with open_dict(config):
            config.choices = {
                group: _together(config, group) if group in NESTED else chosen.get(group) for group in sorted(_groups())
            }
        complete(config)
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(" ".join(str(error).split())) from error
    known = own_keys(base) | _groups() | {"choices"}
    if unknown := sorted(str(key) for key in config if key not in known):
        raise UserError(f"Unknown key {unknown[0]}{suggest(unknown[0], map(str, known))}")
    check_types(config)
    return config


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Every combination of the values that the overrides list (``seed=0,1 attack=dlg,idlg``).

    Raises:
        UserError: they do not parse, list what can't be enumerated, or combine to more than ``MOST_JOBS``.
    """
    choices = [_values(o) if o.is_sweep_override() else [o.input_line or ""] for o in parse_overrides(overrides)]
    if (number := math.prod(map(len, choices))) > MOST_JOBS:
        raise UserError(
            f"At most {MOST_JOBS} combinations of values are expected, but these are {number}; list fewer, or cut them"
            " into several sweeps."
        )
    return [list(combination) for combination in itertools.product(*choices)]


def swept_key(overrides: Sequence[str]) -> str:
    """The key whose values the overrides list (``defense.rate`` for ``defense.rate=0.1,0.5``); empty if none does.

    Raises:
        UserError: several do.
    """
    keys = [o.get_key_element() for o in parse_overrides(overrides) if o.is_sweep_override()]
    if len(keys) > 1:
        raise UserError(f"One key with several values is expected, but got {', '.join(keys)}; list values of one.")
    return keys[0] if keys else ""


def override_keys(overrides: Sequence[str]) -> list[str]:
    """What each override sets."""
    return [o.key_or_group for o in parse_overrides(overrides)]


def merge_overrides(*parts: Sequence[str]) -> list[str]:
    """All overrides, of those that set the same key the last one."""
    overrides = [override for part in parts for override in part]
    return list(dict(zip(override_keys(overrides), overrides, strict=True)).values())


def to_yaml(config: RunSettings | DictConfig) -> str:
    """The configuration as text that ``OmegaConf.create`` reads back."""
    return OmegaConf.to_yaml(config if isinstance(config, DictConfig) else config.plain(), resolve=True)


def _groups() -> set[str]:
    return {path.name for path in CONFIG_DIR.iterdir() if path.is_dir()}


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Each override taken apart.

    Raises:
        UserError: one is not in Hydra's grammar.
    """
    return [_parsed(text) for text in overrides]


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Override:
    """One override; the grammar's parser takes milliseconds, and sweeps repeat the same ones."""
    try:
        (parsed,) = OverridesParser.create().parse_overrides([text])
    except HydraException as error:
        key, sign, value = text.partition("=")
        if sign and not value.isascii() and _BEYOND_ASCII.fullmatch(value):  # the grammar knows ASCII alone
            return _parsed(f'{key}="{value}"')
        raise UserError(f"Overrides are expected as key=value, but got {text!r}; {_remedy(text)}.") from error
    return parsed


def _values(override: Override) -> list[str]:
    """``key=value`` for each of the values that ``override`` lists."""
    value, key = override.value(), override.get_key_element()
    try:
        if isinstance(value, RangeSweep):
            span = (value.stop or 0) - (value.start or 0)
            if not abs(span) <= MOST_JOBS * abs(value.step):
                raise UserError(f"At most {MOST_JOBS} values are expected of {override.input_line}; list fewer.")
        values = [f"{key}={text}" for text in itertools.islice(override.sweep_string_iterator(), MOST_JOBS + 1)]
    except (HydraException, ValueError, AssertionError) as error:
        raise UserError(
            f"Values to enumerate are expected, but got {override.input_line}; list them: {key}=A,B."
        ) from error
    if not 1 <= len(values) <= MOST_JOBS:
        raise UserError(f"1 to {MOST_JOBS} values are expected of {override.input_line}, but got {len(values)}.")
    return values


def _remedy(text: str) -> str:
    """What to write instead of the override ``text``, which does not parse."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        return "write key=value"
    if not any(quote in value for quote in "'\"[]{}"):
        return f"put quotes around values with spaces or special characters: '{key}=\"{value}\"'"
    return "check that quotes and brackets are closed"


def _check_groups(overrides: Sequence[Override]) -> None:
    for override in overrides:
        group, option = override.key_or_group, override.value()
        if group == "experiment" and option is None:
            continue
        if group not in _groups() or override.type is OverrideType.DEL:
            continue
        for name in option if isinstance(option, list) and group in NESTED else [option]:
            if str(name) not in options(group):
                raise UserError(f"{group} has no option {name!r}{suggest(str(name), options(group))}")


def _parted(overrides: Sequence[Override]) -> tuple[list[str], list[Override]]:
    """Those that decide which sections there are, and those that set what is in them."""
    groups, choices, settings = _groups(), list[str](), list[Override]()
    for override in overrides:
        if override.key_or_group in groups or _names_target(override):
            choices.append(override.input_line or "")
        else:
            settings.append(override)
    return choices, settings


def _check_keys(overrides: Sequence[Override], config: DictConfig) -> list[Override]:
    """Refuse to set what the chosen groups do not have; ``+key=value`` is left to what reads it.

    Returns:
        The overrides, those of settings that the groups' files leave out as ``++key=value``.
    """
    full = deepcopy(config)
    written = {
        name: set(section) if isinstance(section, DictConfig) else set()
        for name, section, _ in completed_sections(full)
    }
    complete(full)
    checked = []
    for override in overrides:
        key = override.key_or_group
        adds = False
        if override.type is OverrideType.CHANGE:
            _check_key(key, full)
            adds = any(
                key.startswith(f"{section}.") and key[len(section) + 1 :].partition(".")[0] not in names
                for section, names in written.items()
            )  # also where it is set twice, of which the last wins
        checked.append(replace(override, type=OverrideType.FORCE_ADD) if adds else override)
    return checked


def _together(config: DictConfig, group: str) -> str:
    """The options of a group of which several are chosen at once, all that build something; Hydra does not tell."""
    section = config.get(group) or {}
    return "+".join(str(key) for key, below in section.items() if isinstance(below, DictConfig)) or "none"


def _names_target(override: Override) -> bool:
    section, _, setting = override.key_or_group.partition(".")
    return section in COMPLETED and setting == "_target_"


def _check_key(key: str, config: DictConfig) -> None:
    section: object = config
    parts = key.split(".")
    for depth, part in enumerate(parts):
        allowed = [str(key) for key in section] if isinstance(section, DictConfig) else []
        if part not in allowed:
            above = ".".join(parts[:depth])
            allowed = sorted({*allowed, *(_groups() if not above else ())})
            raise UserError(f"Unknown key {'.'.join(parts[: depth + 1])}{suggest(part, allowed)}")
        assert isinstance(section, DictConfig)
        section = section.get(part)
