"""Which runs are the same experiment: a hash of the settings that decide the numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fl_privacy.runs.config.keys import keys_of
from fl_privacy.runs.config.parse import select
from fl_privacy.runs.config.settings import Role

RUNTIME = keys_of(Role.RUNTIME)

FORMAT = 1
"""Of a run's folder; raised when a reader of the older one would misread it."""


LATER: Mapping[str, Any] = {
    "bpki.prior": None,
    "defense.widths": None,
    "defense.layers": None,
    "defense.samples": None,
    "attack.into_range": "clamp",
}
"""Settings that came after runs had been identified, at the value that these have: it changes no hash."""


def run_hash(config: Mapping[str, Any], ignore: Collection[str] = RUNTIME) -> str:
    """Return eight hexadecimal digits that equal configurations share, the dotted keys in ``ignore`` left out."""
    unchanged = [key for key, value in LATER.items() if select(config, key) == value]
    text = json.dumps(_without(config, (*ignore, *unchanged)), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def training_hash(config: Mapping[str, Any]) -> str:
    """Return a hash that is the same for all runs whose training differs in the defense alone."""
    return run_hash(config, (*RUNTIME, *keys_of(Role.DEFENSE), *keys_of(Role.ATTACK)))


def attacked_hash(config: Mapping[str, Any]) -> str:
    """Return a hash that is the same for all runs that differ in the attack alone."""
    return run_hash(config, (*RUNTIME, *keys_of(Role.ATTACK)))


def repeat_hash(config: Mapping[str, Any]) -> str:
    """Return a hash that is the same for all runs that differ in the seed alone."""
    return run_hash(config, (*RUNTIME, "seed"))


def _without(config: Mapping[str, Any], dropped: Collection[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in config.items():
        if key in dropped:
            continue
        below = [name.removeprefix(f"{key}.") for name in dropped if name.startswith(f"{key}.")]
        kept[key] = _without(value, below) if below and isinstance(value, Mapping) else value
    return kept


@dataclass(frozen=True, kw_only=True)
class Identity:
    """``run.json``: what was run, as a value.

    Attributes:
        label: readable part of the folder's name.
        hash: equal for equal configurations.
        training: equal for runs whose training differs in the defense alone.
        repeat: equal for runs that differ in the seed alone.
        undefended: whether clients don't defend themselves.
        config: the resolved configuration.
    """

    label: str
    hash: str
    training: str
    repeat: str
    undefended: bool
    config: Mapping[str, Any]

    @classmethod
    def of(cls, label: str, config: Mapping[str, Any], *, undefended: bool) -> Identity:
        """Build the identity of the run that ``config`` describes."""
        hashes = {"hash": run_hash(config), "training": training_hash(config), "repeat": repeat_hash(config)}
        return cls(label=label, undefended=undefended, config=config, **hashes)
