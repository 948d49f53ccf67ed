"""The same training without defense, for the accuracy that the defense costs."""

import json
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict

from fl_privacy.config import compose
from fl_privacy.config.compose import to_yaml

TRAINING = ("data", "partition", "model", "federation", "seed", "client_threads", "device", "evaluate_every")
"""The configuration keys that decide the accuracy of an undefended run."""


def twin_config(config: DictConfig) -> DictConfig:
    """The undefended training of ``config``, without any attack."""
    none = compose(["defense=none", "attack=none"])
    twin = OmegaConf.create(to_yaml(config))
    assert isinstance(twin, DictConfig)
    with open_dict(twin):
        twin.defense, twin.attack = none.defense, none.attack
        twin.choices.defense = twin.choices.attack = "none"
        twin.intercept.save = False
        twin.name = "twin"
    return twin


def find_twin(config: DictConfig) -> float | None:
    """Final accuracy of a finished undefended run in ``config.out`` that trained alike."""
    wanted = yaml.safe_load(to_yaml(config))
    for summary in sorted(Path(config.out).glob("*/summary.json")):
        other = yaml.safe_load((summary.parent / "config.yaml").read_text())
        if other.get("command") != "run" or other["choices"]["defense"] != "none":
            continue
        if all(other.get(key) == wanted.get(key) for key in TRAINING):
            accuracy: float | None = json.loads(summary.read_text()).get("final_accuracy")
            return accuracy
    return None
