"""From Hydra overrides to the objects of a run."""

from fl_privacy.config.build import (
    Federation,
    build_attack,
    build_dataset,
    build_federation,
    participants_of,
    positive,
    resolve_device,
)
from fl_privacy.config.compose import compose, expand_sweep, to_yaml
from fl_privacy.config.groups import CONFIG_DIR, options

__all__ = [
    "CONFIG_DIR",
    "Federation",
    "build_attack",
    "build_dataset",
    "build_federation",
    "compose",
    "expand_sweep",
    "options",
    "participants_of",
    "positive",
    "resolve_device",
    "to_yaml",
]
