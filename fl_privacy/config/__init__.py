"""From Hydra overrides to a checked configuration."""

from fl_privacy.config.compose import compose, expand_sweep, to_yaml
from fl_privacy.config.groups import CONFIG_DIR, options

__all__ = ["CONFIG_DIR", "compose", "expand_sweep", "options", "to_yaml"]
