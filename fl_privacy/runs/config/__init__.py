"""Checked configurations from Hydra overrides."""

from typing import TYPE_CHECKING

from fl_privacy.checks.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.files import CONFIG_DIR as CONFIG_DIR
    from fl_privacy.runs.config.compose import (
        compose_file as compose_file,
        compose_run as compose_run,
        expand_sweep as expand_sweep,
        to_yaml as to_yaml,
    )
    from fl_privacy.runs.config.parse import Options as Options, options as options
    from fl_privacy.runs.config.settings import Role as Role, RunSettings as RunSettings
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
