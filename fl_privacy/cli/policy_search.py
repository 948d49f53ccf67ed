"""``fl-privacy search-policies``."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fl_privacy.cli.console import RichMonitor
from fl_privacy.config import compose_file, to_yaml
from fl_privacy.experiment.policy_search import search_policies


def search(overrides: Sequence[str], *, show_config: bool, console: Console) -> Path | None:
    """The folder with the policies that ``overrides`` of ``conf/policy_search.yaml`` describe."""
    config = compose_file("policy_search", overrides)
    if show_config:
        print(to_yaml(config))
        return None
    return search_policies(config, RichMonitor(console))
