"""Checked configurations from Hydra overrides."""

from fl_privacy.files import CONFIG_DIR as CONFIG_DIR
from fl_privacy.runs.config.compose import (
    compose_file as compose_file,
    compose_run as compose_run,
    expand_sweep as expand_sweep,
    to_yaml as to_yaml,
)
from fl_privacy.runs.config.parse import Options as Options, options as options
from fl_privacy.runs.config.settings import Role as Role, RunSettings as RunSettings
