"""Checked configurations from Hydra overrides."""

from fl_privacy.files import CONFIG_DIR
from fl_privacy.runs.config._options import options
from fl_privacy.runs.config.compose import compose_file, compose_run, expand_sweep, to_yaml
from fl_privacy.runs.config.parse import Options
from fl_privacy.runs.config.settings import Role, RunSettings

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
