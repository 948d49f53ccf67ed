"""Which runs are the same experiment: a hash of the settings that decide the numbers."""

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from fl_privacy.config.keys import keys_of
from fl_privacy.config.settings import Role

RUNTIME = keys_of(Role.RUNTIME)


def run_hash(config: Mapping[str, Any], ignore: Collection[str] = RUNTIME) -> str:
    """Eight hexadecimal digits that equal configurations share, the dotted keys in ``ignore`` left out."""
    text = json.dumps(_without(config, ignore), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def training_hash(config: Mapping[str, Any]) -> str:
    """The same for all runs whose training differs in the defense alone."""
    return run_hash(config, (*RUNTIME, *keys_of(Role.DEFENSE), *keys_of(Role.ATTACK)))


def attacked_hash(config: Mapping[str, Any]) -> str:
    """The same for all runs that differ in the attack alone."""
    return run_hash(config, (*RUNTIME, *keys_of(Role.ATTACK)))


def repeat_hash(config: Mapping[str, Any]) -> str:
    """The same for all runs that differ in the seed alone."""
    return run_hash(config, (*RUNTIME, "seed"))


def _without(config: Mapping[str, Any], dropped: Collection[str]) -> dict[str, Any]:
    """``config`` without the dotted keys in ``dropped``."""
    kept: dict[str, Any] = {}
    for key, value in config.items():
        if key in dropped:
            continue
        below = [name.removeprefix(f"{key}.") for name in dropped if name.startswith(f"{key}.")]
        kept[key] = _without(value, below) if below and isinstance(value, Mapping) else value
    return kept
