"""Where a run's results go."""

from pathlib import Path

from omegaconf import DictConfig

from fl_privacy.config import to_yaml
from fl_privacy.results import RunFolder


def open_folder(config: DictConfig, command: str) -> RunFolder:
    """The folder of ``config``: named after its choices, told apart by the hash of all of it."""
    chosen = [config.choices[group] for group in ("data", "model", "federation", "defense", "attack")]
    if command != "run":
        chosen.insert(0, command)
    label = "-".join([*([str(config.name)] if config.name else []), *chosen])
    return RunFolder(Path(config.out), label, f"command: {command}\n{to_yaml(config)}")
