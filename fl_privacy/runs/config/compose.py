"""Compose settings from overrides in Hydra's grammar; settings that files leave out get the target's defaults."""

import itertools
import math
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
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
from fl_privacy.runs.config.building import Signature, signature_of
from fl_privacy.runs.config.parse import config_folders, options, search_path, suggest
from fl_privacy.runs.config.settings import RunSettings
from fl_privacy.site.gate.plain_yaml import loaded

FEW = 3  # compositions after which each section is composed by itself, once, as in a sweep
_PLAIN = re.compile(r"[a-z_]+=\w+")


def composed(base: str, chosen: Sequence[str]) -> tuple[DictConfig, Mapping[str, str | None]]:
    """Return the settings of file ``base`` with options ``chosen`` (``attack=idlg``), and the option of each group."""
    stamp = _stamp()
    apart = dict(filter(None, (_option_alone(o, stamp) for o in chosen if _packed.cache_info().misses >= FEW)))
    others = tuple(o for o in chosen if o.partition("=")[0] not in apart)
    preset = options("experiment").get("".join(others).removeprefix("experiment="))
    of_package = preset and preset.is_relative_to(CONFIG_DIR)
    set_by_others: Any = OmegaConf.load(str(preset)) if of_package else others and apart
    if len(apart) + len(others) == len(chosen) and apart.keys().isdisjoint(set_by_others):
        config, choices = _composed(base, others, stamp)
        if apart.keys() <= config.keys():
            with open_dict(config):
                for group, (_, section) in apart.items():
                    config[group] = section  # a copy of it
            return config, {**choices, **{group: option for group, (option, _) in apart.items()}}
    return _composed(base, tuple(chosen), stamp)


@lru_cache(maxsize=1024)
def _option_alone(override: str, stamp: int) -> tuple[str, tuple[str, Any]] | None:
    group, _, option = override.partition("=")
    path = CONFIG_DIR / group / f"{option}.yaml"
    text = path.read_text() if _PLAIN.fullmatch(override) and path.is_file() else "@package"
    merges = "defaults:" in text
    if "@package" in text or (merges and "_self_" not in text):
        return None
    return group, (option, _composed(f"{group}/{option}", (), stamp)[0][group] if merges else OmegaConf.load(path))


def _composed(base: str, chosen: tuple[str, ...], stamp: int) -> tuple[DictConfig, Mapping[str, str | None]]:
    packed, choices = _packed(base, chosen, stamp)
    config: DictConfig = pickle.loads(packed)  # noqa: S301  (of this process, and much quicker than a copy)
    return config, choices


@lru_cache(maxsize=1024)
def _packed(base: str, chosen: tuple[str, ...], stamp: int) -> tuple[bytes, Mapping[str, str | None]]:
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = compose(base, overrides=[*chosen, *search_path()], return_hydra_config=True)
    choices = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    return pickle.dumps(config), choices


def _stamp() -> int:
    paths = (path for folder in config_folders() for path in folder.rglob("*.yaml"))
    return hash(tuple((str(path), path.stat().st_mtime_ns) for path in sorted(paths)))


@cache
def _file(base: str) -> dict[str, Any]:
    content = loaded((CONFIG_DIR / f"{base}.yaml").read_bytes(), f"{base}.yaml")
    assert isinstance(content, dict)
    return content


def put_settings(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Apply overrides (``key=``, ``+key=``, ``++key=``, ``~key``) to ``config``; ``UserError`` if one can't apply."""
    for override in overrides:
        key, value, text = override.key_or_group, override.value(), override.input_line
        if override.package is not None:
            raise UserError(f"A group of options is expected before @, but got {text}; leave @ out.")
        there = OmegaConf.select(config, key, throw_on_missing=False)
        if override.is_delete():
            if there is None or (value is not None and value != there):
                raise UserError(f"An existing setting is expected after ~, but got {text}; leave it out.")
            above, _, name = key.rpartition(".")
            section = OmegaConf.select(config, above) if above else config
            with open_dict(section):
                del section[name]
            continue
        if override.is_add() and there is not None and not isinstance(value, dict | list):
            raise UserError(f"A new setting is expected after +, but got {text}, which exists; write {key}=VALUE.")
        try:
            OmegaConf.update(config, key, value, merge=True, force_add=override.is_add() or override.is_force_add())
        except (ConfigAttributeError, ConfigKeyError) as error:
            raise UserError(f"An existing setting is expected, but got {text}; to add one, write +{text}.") from error


COMPLETED: Mapping[str, Mapping[str, Any]] = {
    "attack": {"shards": 1},
    **{name: {} for name in ("defense", "data", "partition", "server", "guard")},
}
"""Section -> defaults of settings that are not passed to its ``_target_``."""

NESTED = ("inference",)  # sections of several options, each a section like those
_ANY_MODEL = {"init": None, "lora_rank": None, "lora_alpha": None}
_CHECKED: Mapping[str, Mapping[str, Any]] = {"data": {}, "partition": {}, "model": _ANY_MODEL, **COMPLETED}
"""Section -> such settings, for all sections that are checked before anything is built."""


def complete(config: DictConfig) -> None:
    """Add missing settings with their defaults to the sections named in ``COMPLETED``."""
    for name, missing in _left_out(config).items():
        with open_dict(section := OmegaConf.select(config, name)):
            section.update(missing)


def _left_out(config: DictConfig) -> Mapping[str, Mapping[str, Any]]:
    found = {}
    for name, section, own, signature in _sections(config, COMPLETED):
        named, known = set(section), {**signature.defaults, **own}  # ``in`` takes long if it is not there
        found[name] = {key: value for key, value in known.items() if key not in named or key not in section}
    return found


def check_types(config: DictConfig) -> None:
    """Raise ``UserError`` for settings of a wrong type, before anything is built."""
    remedy = " Where an experiment sets it, ~{} leaves it out."
    for name, section, others, signature in _sections(config, _CHECKED):
        settings = OmegaConf.to_container(section, resolve=True)
        assert isinstance(settings, dict)
        own = {str(key): value for key, value in settings.items() if key not in others}
        signature.check(own, name, remedy=remedy)


def _sections(
    config: DictConfig, known: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, Any, Mapping[str, Any], Signature]]:
    found: list[tuple[str, Any, Mapping[str, Any]]] = [(name, config.get(name), own) for name, own in known.items()]
    for name in NESTED:
        section = config.get(name)
        below = section.items() if isinstance(section, DictConfig) else ()
        found += [(f"{name}.{key!s}", part, {}) for key, part in below]
    for name, section, own in found:
        if isinstance(section, DictConfig) and (target := section.get("_target_")) is not None:
            yield name, section, own, signature_of(str(target), name)


_BEYOND_ASCII = re.compile(r"[\w./-]+")  # A word or a path in any script
NAMING = ("out", "name", "weights", "captured", "truth", "evaluator")
"""Settings of a run that name a file, a folder or a part of one."""

LONGEST, DEEPEST = 1 << 15, 20  # longest override in characters, and deepest nesting of brackets
MOST_JOBS = 10_000  # most jobs of a sweep; all are composed and checked before the first one starts


def compose_run(overrides: Sequence[str] = ()) -> RunSettings:
    """Compose the settings of a run; ``UserError`` for an unknown group, option or key, or a wrong value."""
    config = RunSettings.of(compose_file("config", overrides))
    for name in NAMING:
        if (value := getattr(config, name)) is not None and not str(value).strip():
            raise UserError(f"{name} is expected to name something, but is empty; leave {name}= out.")
    return config


def compose_file(base: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Compose the file ``base`` as plain values; ``UserError`` for unknown groups, options or keys."""
    parsed, choices, settings = parse_overrides(overrides), list[str](), list[Override]()
    for override in parsed:
        if override.is_sweep_override():
            raise UserError(f"One value is expected, but got {override.input_line}; add -m to run each of them.")
        if override.key_or_group.replace("/", ".").partition(".")[0] == "hydra":
            raise UserError(f"Settings of a run are expected, but got Hydra's own {override.input_line}; leave it out.")
    for override in parsed:
        group, option = override.key_or_group, override.value()
        section, _, setting = group.partition(".")
        if group not in _groups() and not (section in COMPLETED and setting == "_target_"):
            settings.append(override)
            continue
        choices.append(override.input_line or "")
        if group not in _groups() or override.is_delete() or (group == "experiment" and option is None):
            continue
        for name in option if isinstance(option, list) and group in NESTED else [option]:
            if str(name) not in options(group):
                raise UserError(f"{group} has no option {name!r}{suggest(str(name), options(group), group=group)}")
    try:
        config, chosen = composed(base, choices)
        data, usual = config.get("data"), next(e["model"] for e in _file("config")["defaults"] if "model" in e)
        is_named = any(override.key_or_group in ("model", "model._target_") for override in parsed)
        model = _MODELS.get(str(data.get("_target_"))) if isinstance(data, DictConfig) else None
        if model and not is_named and chosen.get("model") == usual:
            config, chosen = composed(base, [*choices, f"model={model}"])
        put_settings(config, _check_keys(settings, config, chosen))
        named = {group: chosen.get(group) for group in sorted(_groups())}
        for group in NESTED:
            below = (config.get(group) or {}).items()
            named[group] = "+".join(str(key) for key, section in below if isinstance(section, DictConfig)) or "none"
        with open_dict(config):
            config.choices = named
        complete(config)
        content = OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(" ".join(str(error).split())) from error
    known = _file(base).keys() | _groups() | {"choices"}
    if unknown := sorted(str(key) for key in config if key not in known):
        raise UserError(f"Unknown key {unknown[0]}{suggest(unknown[0], map(str, known), above='')}")
    check_types(config)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


_MODELS = {"fl_privacy.data.load_table": "table_mlp", "fl_privacy.data.load_text": "bert_tiny"}
"""Loader of rows or texts -> default model."""


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Return every combination of listed values (``seed=0,1 attack=dlg,idlg``); ``UserError`` above ``MOST_JOBS``."""
    choices = [_values(o) if o.is_sweep_override() else [o.input_line or ""] for o in parse_overrides(overrides)]
    if (number := math.prod(map(len, choices))) > MOST_JOBS:
        raise UserError(
            f"At most {MOST_JOBS} combinations of values are expected, but these are {number}; list fewer, or cut them"
            " into several sweeps."
        )
    return [list(combination) for combination in itertools.product(*choices)]


def swept_key(overrides: Sequence[str]) -> str:
    """Return the key with several values, such as ``seed`` in ``seed=0,1``; empty if none; ``UserError`` for two."""
    keys = [o.get_key_element() for o in parse_overrides(overrides) if o.is_sweep_override()]
    if len(keys) > 1:
        raise UserError(f"One key with several values is expected, but got {', '.join(keys)}; list values of one.")
    return keys[0] if keys else ""


def override_keys(overrides: Sequence[str]) -> list[str]:
    """Return the key that each override sets."""
    return [o.key_or_group for o in parse_overrides(overrides)]


def merge_overrides(*parts: Sequence[str]) -> list[str]:
    """Merge the lists of overrides ``parts``; the last override of each key wins."""
    overrides = [override for part in parts for override in part]
    return list(dict(zip(override_keys(overrides), overrides, strict=True)).values())


def to_yaml(config: RunSettings | Mapping[str, Any]) -> str:
    """Write the configuration as YAML."""
    return OmegaConf.to_yaml(config.plain() if isinstance(config, RunSettings) else dict(config))


@cache
def _groups() -> frozenset[str]:
    return frozenset(path.name for path in CONFIG_DIR.iterdir() if path.is_dir())


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides in Hydra's grammar; ``UserError`` if one does not parse."""
    return [_parsed(text) for text in overrides]


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Override:
    depth = deepest = 0  # parsing takes time quadratic in a list's length
    for letter in text[:LONGEST]:
        depth += (letter in "[{(") - (letter in "]})")
        deepest = max(deepest, depth)
    if len(text) > LONGEST or deepest > DEEPEST:
        raise UserError(
            f"An override is expected to have at most {LONGEST} letters, and {DEEPEST} brackets within each other, but"
            f" {text[:40]!r}... has {len(text)}, and {deepest}; write less."
        )
    try:
        (parsed,) = OverridesParser.create().parse_overrides([text])
    except HydraException as error:
        key, sign, value = text.partition("=")
        if sign and not value.isascii() and _BEYOND_ASCII.fullmatch(value):  # the grammar is ASCII only
            return _parsed(f'{key}="{value}"')
        raise UserError(f"Overrides are expected as key=value, but got {text[:200]!r}; {_remedy(text)}.") from error
    return parsed


def _values(override: Override) -> list[str]:
    value, key = override.value(), override.get_key_element()
    try:
        if isinstance(value, RangeSweep):
            span = (value.stop or 0) - (value.start or 0)
            if not abs(span) <= MOST_JOBS * abs(value.step):
                raise UserError(f"At most {MOST_JOBS} values are expected, but got {override.input_line}; list fewer.")
        values = [f"{key}={text}" for text in itertools.islice(override.sweep_string_iterator(), MOST_JOBS + 1)]
    except (HydraException, ValueError, AssertionError) as error:
        raise UserError(
            f"Values to enumerate are expected, but got {override.input_line}; list them: {key}=A,B."
        ) from error
    if not 1 <= len(values) <= MOST_JOBS:
        raise UserError(f"1 to {MOST_JOBS} values are expected, but got {len(values)}; write {key}=A,B.")
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


def _check_keys(overrides: Sequence[Override], config: DictConfig, chosen: Mapping[str, str | None]) -> list[Override]:
    missing, checked = _left_out(config), []
    for override in overrides:
        key = override.key_or_group
        adds = False
        if override.type is OverrideType.CHANGE:
            section: Any = config
            parts = key.split(".")
            for depth, part in enumerate(parts):
                above = ".".join(parts[:depth])
                more = missing.get(above, {})
                allowed = [*map(str, section), *more] if isinstance(section, Mapping) else []
                if part not in allowed:
                    allowed = sorted({*allowed, *(_groups() if not above else ())})
                    parent = f"{above}={chosen[above]}" if chosen.get(above) else ""
                    wrong = suggest(part, allowed, parent, above=above)
                    raise UserError(f"Unknown key {'.'.join(parts[: depth + 1])}{wrong}")
                adds = adds or part in more  # also if it is set twice: the last one wins
                section = more[part] if part in more else section.get(part)
        checked.append(replace(override, type=OverrideType.FORCE_ADD) if adds else override)
    return checked
