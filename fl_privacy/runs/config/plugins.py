"""Metrics of installed plugins: an option ``conf/metric/NAME.yaml`` names what makes one."""

from functools import cache

from fl_privacy.errors import UserError
from fl_privacy.measure import Metric, register_metric
from fl_privacy.runs.config._options import options
from fl_privacy.site.gate.plain_yaml import loaded


@cache
def register_plugin_metrics() -> None:
    """Register the metrics of all installed plugins once; ``UserError`` if one is no metric or its name is taken."""
    for name, path in options("metric").items():
        from fl_privacy.runs.config.building import instantiate  # noqa: PLC0415 (Hydra, which reading a run does without)

        section = loaded(path.read_bytes(), str(path))
        metric = instantiate(section, f"metric.{name}") if isinstance(section, dict) else None
        if not isinstance(metric, Metric):
            raise UserError(f"{path} is expected to make a Metric, but makes a {type(metric).__name__}; repair it.")
        register_metric(name, metric)
