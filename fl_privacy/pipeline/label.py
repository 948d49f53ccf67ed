"""Where a run's results go."""

from pathlib import Path
from typing import Literal

from omegaconf import DictConfig, OmegaConf

from fl_privacy.config import to_yaml
from fl_privacy.results import RunFolder

Command = Literal["run", "attack"]


def plain(config: DictConfig, command: Command) -> dict[str, object]:
    """``config`` as plain values, with the command that it was given to."""
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return {"command": command, **{str(key): value for key, value in values.items()}}


def open_folder(config: DictConfig, command: Command) -> RunFolder:
    """The folder of ``config``: named after its choices, told apart by the hash of all of it."""
    chosen = [config.choices[group] for group in ("data", "model", "federation", "defense", "attack")]
    front = [config.name] if config.name else [] if command == "run" else [command]
    return RunFolder.open_or_create(
        Path(config.out),
        label="-".join([*front, *chosen]),
        config=plain(config, command),
        config_text=f"command: {command}\n{to_yaml(config)}",
        undefended=config.choices.defense == "none" and command == "run",
        overwrite=config.overwrite,
    )
