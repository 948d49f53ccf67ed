"""What there is to choose from, with a line each."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from fl_privacy.config import options
from fl_privacy.config.building import locate_target
from fl_privacy.config.keys import groups
from fl_privacy.config.plugins import register_plugin_metrics
from fl_privacy.config.study import GRIDS, TRACKS, grid_names, track_names
from fl_privacy.metrics import METRICS

GROUPS = (*groups(), "experiment")


def catalog_tables() -> list[Table]:
    """Build a table for each configuration group, and for grids, tracks and metrics."""
    tables = []
    for group in GROUPS:
        table = Table(title=f"{group}=", title_justify="left", box=None, show_header=False)
        for name in options(group):
            table.add_row(f"  [bold]{name}[/bold]", describe_option(group, name))
        tables.append(table)
    grids = Table(title="trade-off", title_justify="left", box=None, show_header=False)
    for name in grid_names():
        grids.add_row(f"  [bold]{name}[/bold]", comment_of(GRIDS / f"{name}.yaml"))
    tracks = Table(title="benchmark", title_justify="left", box=None, show_header=False)
    for name in track_names():
        tracks.add_row(f"  [bold]{name}[/bold]", comment_of(TRACKS / f"{name}.yaml"))
    register_plugin_metrics()
    metrics = Table(title="metrics", title_justify="left", box=None, show_header=False)
    for name, metric in METRICS.items():
        metrics.add_row(f"  [bold]{name}[/bold]", metric.description)
    return [*tables, grids, tracks, metrics]


def describe_option(group: str, name: str) -> str:
    """Return the comment that opens the option's file, or the first line of what it builds."""
    path = options(group)[name]
    if comment := comment_of(path):
        return comment
    section = OmegaConf.load(path)
    if not isinstance(section, DictConfig) or "_target_" not in section:
        return ""
    return (locate_target(section, group).__doc__ or "").strip().split("\n")[0]


def comment_of(path: Path) -> str:
    """Return the comment that opens the file."""
    comment = []
    for line in path.read_text().splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    return " ".join(comment)
