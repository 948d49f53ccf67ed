"""List the options to choose from, such as attacks and defenses, with a line each."""

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from rich.table import Table

from fl_privacy.errors import UserError
from fl_privacy.measure import METRICS
from fl_privacy.runs.config import options
from fl_privacy.runs.config.building import locate_target
from fl_privacy.runs.config.parse import suggest
from fl_privacy.runs.config.settings import groups, register_plugin_metrics
from fl_privacy.runs.config.study import GRIDS, TRACKS, names_in
from fl_privacy.site.gate.plain_yaml import loaded


def catalog_tables(kinds: Sequence[str] = ()) -> list[Table]:
    """Build a table of the names that can be chosen for each of ``kinds``, such as ``attack``; by default for all."""
    there = (*groups(), "experiment", *_OTHERS)
    wanted = ["metrics" if kind == "metric" else kind.rstrip("=") for kind in kinds] or there
    for kind in wanted:
        if kind not in there:
            raise UserError(f"What to list is expected to be a kind of parts, but got {kind!r}{suggest(kind, there)}")
    tables = []
    for kind in (kind for kind in there if kind in wanted):
        table = Table(title=kind if kind in _OTHERS else f"{kind}=", title_justify="left", box=None, show_header=False)
        rows = _OTHERS[kind]() if kind in _OTHERS else {name: describe_option(kind, name) for name in options(kind)}
        for name, line in rows.items():
            table.add_row(f"  [bold]{name}[/bold]", line)
        tables.append(table)
    return tables


def _metrics() -> dict[str, str]:
    register_plugin_metrics()
    return {name: metric.description for name, metric in METRICS.items()}


_OTHERS: Mapping[str, Callable[[], dict[str, str]]] = {
    "trade-off": lambda: {name: comment_of(GRIDS / f"{name}.yaml") for name in names_in(GRIDS)},
    "benchmark": lambda: {name: comment_of(TRACKS / f"{name}.yaml") for name in names_in(TRACKS)},
    "metrics": _metrics,
}
"""Kind without a configuration group -> function that describes its parts by name."""


def describe_option(group: str, name: str) -> str:
    """Return an option's description, from its file's first comment or its target's docstring."""
    path = options(group)[name]
    if comment := comment_of(path):
        return comment
    section = loaded(path.read_bytes(), str(path))
    if not isinstance(section, dict) or "_target_" not in section:
        return ""
    return (locate_target(section, group).__doc__ or "").strip().split("\n")[0]


def comment_of(path: Path) -> str:
    """Return the comment at the start of the file."""
    lines = (line for line in path.read_text().splitlines() if not line.startswith("# @package"))
    return " ".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))
