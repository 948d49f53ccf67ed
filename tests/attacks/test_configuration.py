"""Every configuration of an attack builds the preset that it names, with the preset's own defaults."""

import inspect
from pathlib import Path

import hydra.utils
import pytest
from omegaconf import OmegaConf

from fl_privacy import attacks
from fl_privacy.config import build_attack, compose

FILES = sorted((Path(__file__).parents[2] / "conf/attack").glob("*.yaml"))


@pytest.mark.parametrize("name", [f.stem for f in FILES if f.stem not in ("none", "custom")])
def test_configurations_are_complete(name: str) -> None:
    config = compose([f"attack={name}", "device=cpu"])
    settings = config.attack
    preset = hydra.utils.get_object(settings._target_)
    assert settings.keys() - {"_target_", "shards"} == inspect.signature(preset).parameters.keys()
    built = build_attack(config)
    assert isinstance(built, attacks.GradientInversion)
    if not name.startswith("ats"):
        assert built == preset(device="cpu")


def test_every_preset_has_a_configuration() -> None:
    targets = {str(OmegaConf.load(path).get("_target_")).rpartition(".")[2] for path in FILES}
    presets = {name for name in attacks.__all__ if name[0].islower() and name != "no_progress"}
    assert presets <= targets
