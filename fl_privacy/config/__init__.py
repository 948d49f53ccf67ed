"""From Hydra overrides to a checked configuration."""

from fl_privacy.config._options import options
from fl_privacy.config.compose import compose_file, compose_run, expand_sweep, to_yaml
from fl_privacy.config.reading import Options
from fl_privacy.config.settings import Role, RunSettings
from fl_privacy.files import CONFIG_DIR

__all__ = [
    "CONFIG_DIR",
    "Options",
    "Role",
    "RunSettings",
    "compose_file",
    "compose_run",
    "expand_sweep",
    "options",
    "to_yaml",
]
