"""Which runs are the same experiment: a hash of the settings that decide the numbers."""

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

RUNTIME_KEYS = (
    "out",
    "name",
    "overwrite",
    "trust",
    "device",
    "backend",
    "attack.shards",
    "choices.backend",
    "choices.experiment",
    "twin",
    "privacy.epsilon",
    "intercept.when",
    "intercept.save",
)
"""Settings that change where and how fast a run goes, but no result. A ``privacy.epsilon`` has become noise of the
defense by the time that a run is told apart."""

DEFENSE_KEYS = ("defense", "choices.defense", "knows_defense", "privacy")

ATTACK_KEYS = (
    "attack",
    "attack_threads",
    "choices.attack",
    "knows_labels",
    "public_images",
    "victims",
    "batch_size",
    "intercept",
    "captured",
    "split",
    "evaluator",
    "tracing",
    "tracing_queries",
    "colluder",
    "knows_features",
    "features_at",
    "bpki",
)
"""Settings of an attacker that only listens: the training comes out the same."""


NULL_AS_ABSENT = ("evaluator", "tracing", "tracing_queries", "colluder", "features_at")
"""Settings that came later: where they are null, a run is the same as before."""


PLAIN = {"federation.norm_factor": 100.0}
"""Settings by their dotted key that leave a run the same where they have this value."""


def run_hash(config: Mapping[str, Any], ignore: Collection[str] = RUNTIME_KEYS) -> str:
    """Eight hexadecimal digits that equal configurations share, the dotted keys in ``ignore`` left out."""
    plain = [key for key, value in PLAIN.items() if _selected(config, key) == value]
    text = json.dumps(_without(config, [*ignore, *plain]), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def training_hash(config: Mapping[str, Any]) -> str:
    """The same for all runs whose training differs in the defense alone."""
    return run_hash(config, (*RUNTIME_KEYS, *DEFENSE_KEYS, *ATTACK_KEYS))


def attacked_hash(config: Mapping[str, Any]) -> str:
    """The same for all runs that differ in the attack alone."""
    return run_hash(config, (*RUNTIME_KEYS, *ATTACK_KEYS, "knows_defense"))


def repeat_hash(config: Mapping[str, Any]) -> str:
    """The same for all runs that differ in the seed alone."""
    return run_hash(config, (*RUNTIME_KEYS, "seed"))


def _selected(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def _without(config: Mapping[str, Any], dropped: Collection[str]) -> dict[str, Any]:
    """``config`` without the dotted keys in ``dropped``."""
    kept: dict[str, Any] = {}
    for key, value in config.items():
        if key in dropped or (key in NULL_AS_ABSENT and value is None):
            continue
        below = [name.removeprefix(f"{key}.") for name in dropped if name.startswith(f"{key}.")]
        kept[key] = _without(value, below) if below and isinstance(value, Mapping) else value
    return kept
