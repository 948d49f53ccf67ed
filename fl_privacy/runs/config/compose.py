"""Compose settings from overrides in Hydra's grammar; settings that files leave out get the target's defaults."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from fl_privacy.errors import UserError
from fl_privacy.files import CONFIG_DIR
from fl_privacy.runs.config._options import config_folders, options, search_path, suggest
from fl_privacy.runs.config.building import Signature, signature_of
from fl_privacy.runs.config.settings import RunSettings

FEW = 3
"""Compositions after which each section is composed once and cached, as in a sweep."""

_PLAIN = re.compile(r"[a-z_]+=\w+")


def _stamp() -> int:
    paths = (path for folder in config_folders() for path in folder.rglob("*.yaml"))
    return hash(tuple((str(path), path.stat().st_mtime_ns) for path in sorted(paths)))


def composed(base: str, chosen: Sequence[str]) -> tuple[DictConfig, Mapping[str, str | None]]:
    """Compose the file ``base`` of ``conf`` with the options ``chosen``; return also the option of each group.

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
    """Return group and option if the option is of this package and affects no other section."""
    group, _, option = override.partition("=")
    path = CONFIG_DIR / group / f"{option}.yaml"
    if not _PLAIN.fullmatch(override) or not path.is_file():
        return None
    text = path.read_text()
    return None if "@package" in text or ("defaults:" in text and "_self_" not in text) else (group, option)


@lru_cache(maxsize=512)
def _section(group: str, option: str, places: tuple[str, ...], stamp: int) -> DictConfig:
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


def put_settings(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Apply ``overrides`` to ``config`` in order: ``key=``, ``+key=``, ``++key=``, ``~key``, as in Hydra.

    Raises:
        UserError: an override adds an existing setting, or deletes or sets a missing one.
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


COMPLETED: Mapping[str, Mapping[str, Any]] = {
    "attack": {"shards": 1},
    "defense": {},
    "data": {},
    "partition": {},
    "server": {},
    "guard": {},
}
"""Section -> its settings that its ``_target_`` does not take."""

NESTED = ("inference",)
"""Sections of several options, each a section like those."""

_ANY_MODEL = {"init": None, "lora_rank": None, "lora_alpha": None}

_CHECKED: Mapping[str, Mapping[str, Any]] = {"data": {}, "partition": {}, "model": _ANY_MODEL, **COMPLETED}
"""The same for all sections that are checked before anything is built."""


def complete(config: DictConfig) -> None:
    """Add missing settings to the sections of ``COMPLETED``.

    Raises:
        UserError: a target can't be imported.
    """
    for name, section, own in completed_sections(config):
        if (signature := _signature(section, name)) is None:
            continue
        with open_dict(section):
            for key, value in {**signature.defaults, **own}.items():
                if key not in section:
                    section[key] = value


def completed_sections(config: DictConfig) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield name, content and further settings of each section that ``complete`` adds to."""
    yield from ((name, config.get(name), own) for name, own in COMPLETED.items())
    yield from _nested(config)


def _nested(config: DictConfig) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    for name in NESTED:
        section = config.get(name)
        for key, below in section.items() if isinstance(section, DictConfig) else ():
            if isinstance(below, DictConfig):
                yield f"{name}.{key!s}", below, {}


def _signature(section: object, name: str) -> Signature | None:
    target = section.get("_target_") if isinstance(section, DictConfig) else None
    return None if target is None else signature_of(str(target), name)


_BEYOND_ASCII = re.compile(r"[\w./-]+")
"""A word or a path in any script."""

NAMING = ("out", "name", "weights", "captured", "truth", "evaluator")
"""Settings of a run that name a file, a folder or a part of one."""

LONGEST, DEEPEST = 1 << 15, 20
"""Longest override in characters, and deepest nesting of brackets."""

MOST_JOBS = 10_000
"""Most jobs of a sweep; all are composed and checked before the first one starts."""


def compose_run(overrides: Sequence[str] = ()) -> RunSettings:
    """Compose the settings of a run.

    Raises:
        UserError: an override does not parse, names an unknown group, option or key, or sets an impossible value.
    """
    config = RunSettings.of(compose_file("config", overrides))
    for name in NAMING:
        if (value := getattr(config, name)) is not None and not str(value).strip():
            raise UserError(f"{name} is expected to name something, but is empty; leave {name}= out.")
    return config


def compose_file(base: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Compose the file ``base`` of ``conf`` as plain, resolved values; ``choices`` names the option of each group.

    Raises:
        UserError: an override does not parse, or names an unknown group, option or key.
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
        if model := _model_of_data(config, chosen, parsed):
            config, chosen = composed(base, [*choices, f"model={model}"])
        put_settings(config, _check_keys(settings, config, chosen))
        with open_dict(config):
            config.choices = {
                group: "+".join(
                    str(key) for key, below in (config.get(group) or {}).items() if isinstance(below, DictConfig)
                )
                or "none"
                if group in NESTED
                else chosen.get(group)
                for group in sorted(_groups())
            }
        complete(config)
        content = OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(" ".join(str(error).split())) from error
    known = {*map(str, OmegaConf.load(CONFIG_DIR / f"{base}.yaml")), *_groups(), "choices"}
    if unknown := sorted(str(key) for key in config if key not in known):
        raise UserError(f"Unknown key {unknown[0]}{suggest(unknown[0], map(str, known), above='')}")
    plain = [(name, config.get(name), others) for name, others in _CHECKED.items()]
    for name, section, others in [*plain, *_nested(config)]:
        if (signature := _signature(section, name)) is not None:
            own = OmegaConf.to_container(section, resolve=True)
            assert isinstance(own, dict)
            signature.check({str(key): value for key, value in own.items() if key not in others}, name)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


_MODELS = {"fl_privacy.data.load_table": "table_mlp", "fl_privacy.data.load_text": "bert_tiny"}
"""Loader of rows or texts -> default model."""


def _model_of_data(config: DictConfig, chosen: Mapping[str, str | None], overrides: Sequence[Override]) -> str:
    data = config.get("data")
    named = any(override.key_or_group in ("model", "model._target_") for override in overrides)
    if named or chosen.get("model") != _usual_model() or not isinstance(data, DictConfig):
        return ""
    return _MODELS.get(str(data.get("_target_")), "")


@cache
def _usual_model() -> str:
    entries = OmegaConf.load(CONFIG_DIR / "config.yaml").defaults
    return next(str(entry.model) for entry in entries if isinstance(entry, DictConfig) and "model" in entry)


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Return every combination of the values that the overrides list (``seed=0,1 attack=dlg,idlg``).

    Raises:
        UserError: they do not parse, can't be enumerated, or combine to more than ``MOST_JOBS``.
    """
    choices = [_values(o) if o.is_sweep_override() else [o.input_line or ""] for o in parse_overrides(overrides)]
    if (number := math.prod(map(len, choices))) > MOST_JOBS:
        raise UserError(
            f"At most {MOST_JOBS} combinations of values are expected, but these are {number}; list fewer, or cut them"
            " into several sweeps."
        )
    return [list(combination) for combination in itertools.product(*choices)]


def swept_key(overrides: Sequence[str]) -> str:
    """Return the key with several values (``defense.rate`` for ``defense.rate=0.1,0.5``); empty if none.

    Raises:
        UserError: several keys have.
    """
    keys = [o.get_key_element() for o in parse_overrides(overrides) if o.is_sweep_override()]
    if len(keys) > 1:
        raise UserError(f"One key with several values is expected, but got {', '.join(keys)}; list values of one.")
    return keys[0] if keys else ""


def override_keys(overrides: Sequence[str]) -> list[str]:
    """Return the key that each override sets."""
    return [o.key_or_group for o in parse_overrides(overrides)]


def merge_overrides(*parts: Sequence[str]) -> list[str]:
    """Merge all overrides; the last one of each key wins."""
    overrides = [override for part in parts for override in part]
    return list(dict(zip(override_keys(overrides), overrides, strict=True)).values())


def to_yaml(config: RunSettings | Mapping[str, Any]) -> str:
    """Write the configuration as YAML."""
    return OmegaConf.to_yaml(config.plain() if isinstance(config, RunSettings) else dict(config))


def _groups() -> set[str]:
    return {path.name for path in CONFIG_DIR.iterdir() if path.is_dir()}


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides in Hydra's grammar.

    Raises:
        UserError: one does not parse.
    """
    return [_parsed(text) for text in overrides]


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Override:
    """Parse one override, cached since the parser takes milliseconds."""
    _expect_short(text)
    try:
        (parsed,) = OverridesParser.create().parse_overrides([text])
    except HydraException as error:
        key, sign, value = text.partition("=")
        if sign and not value.isascii() and _BEYOND_ASCII.fullmatch(value):  # the grammar is ASCII only
            return _parsed(f'{key}="{value}"')
        raise UserError(f"Overrides are expected as key=value, but got {text[:200]!r}; {_remedy(text)}.") from error
    return parsed


def _expect_short(text: str) -> None:
    """Refuse long or nested overrides, since parsing takes time quadratic in a list's length."""
    depth = deepest = 0
    for letter in text[:LONGEST]:
        depth += (letter in "[{(") - (letter in "]})")
        deepest = max(deepest, depth)
    if len(text) > LONGEST or deepest > DEEPEST:
        raise UserError(
            f"An override is expected to have at most {LONGEST} letters, and {DEEPEST} brackets within each other, but"
            f" {text[:40]!r}... has {len(text)}, and {deepest}; write less."
        )


def _values(override: Override) -> list[str]:
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
    key, sign, value = text.partition("=")
    if not sign or not key:
        return "write key=value"
    if not any(quote in value for quote in "'\"[]{}"):
        return f"put quotes around values with spaces or special characters: '{key}=\"{value}\"'"
    if re.search(r"[{,]\s*['\"]", value):
        return "write keys without quotes, as in 'attack.layers={*.bias:0}'"
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
                raise UserError(f"{group} has no option {name!r}{suggest(str(name), options(group), group=group)}")


def _parted(overrides: Sequence[Override]) -> tuple[list[str], list[Override]]:
    groups, choices, settings = _groups(), list[str](), list[Override]()
    for override in overrides:
        section, _, setting = override.key_or_group.partition(".")
        if override.key_or_group in groups or (section in COMPLETED and setting == "_target_"):
            choices.append(override.input_line or "")
        else:
            settings.append(override)
    return choices, settings


def _check_keys(overrides: Sequence[Override], config: DictConfig, chosen: Mapping[str, str | None]) -> list[Override]:
    """Refuse unknown keys, except ``+key=value``; turn settings missing in files into ``++key=value``."""
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
            _check_key(key, full, chosen)
            adds = any(
                key.startswith(f"{section}.") and key[len(section) + 1 :].partition(".")[0] not in names
                for section, names in written.items()
            )  # also if it is set twice: the last one wins
        checked.append(replace(override, type=OverrideType.FORCE_ADD) if adds else override)
    return checked


def _check_key(key: str, config: DictConfig, chosen: Mapping[str, str | None]) -> None:
    section: object = config
    parts = key.split(".")
    for depth, part in enumerate(parts):
        allowed = [str(key) for key in section] if isinstance(section, DictConfig) else []
        if part not in allowed:
            above = ".".join(parts[:depth])
            allowed = sorted({*allowed, *(_groups() if not above else ())})
            beside = f"{above}={chosen[above]}" if chosen.get(above) else ""
            raise UserError(f"Unknown key {'.'.join(parts[: depth + 1])}{suggest(part, allowed, beside, above=above)}")
        assert isinstance(section, DictConfig)
        section = section.get(part)
