"""The same training without defense, for the accuracy that the defense costs."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from fl_privacy.config import compose, to_yaml
from fl_privacy.experiment.run_folder import plain
from fl_privacy.results import find_baseline


def baseline_config(config: DictConfig) -> DictConfig:
    """The undefended training of ``config``, without any attack."""
    none = compose(["defense=none", "attack=none"])
    twin = OmegaConf.create(to_yaml(config))
    assert isinstance(twin, DictConfig)
    with open_dict(twin):
        twin.defense, twin.attack = none.defense, none.attack
        twin.choices.defense = twin.choices.attack = "none"
        twin.intercept.save, twin.overwrite, twin.name = False, False, "twin"
    return twin


def undefended_accuracy(config: DictConfig) -> float | None:
    """Final accuracy of a finished run in ``config.out`` that trained alike without defense."""
    twin = find_baseline(Path(config.out), plain(config, "run"))
    return twin.accuracy if twin else None
