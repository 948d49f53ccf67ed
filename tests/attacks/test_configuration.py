"""Every configuration of an attack builds the preset that it names, with the preset's own defaults."""

import inspect
from pathlib import Path

import hydra.utils
import pytest
from omegaconf import OmegaConf

from fl_privacy import attacks
from fl_privacy.attacks.objectives import Cosine
from fl_privacy.attacks.optimizers import Adam, StepDecay
from fl_privacy.attacks.priors import BatchNormStatistics, ColorRange, GroupConsistency, TotalVariation
from fl_privacy.config import build_attack, compose

FILES = sorted((Path(__file__).parents[2] / "conf/attack").glob("*.yaml"))

VARIANTS = (
    "inverting_gradients_code",
    "inverting_gradients_notebook",
    "inverting_gradients_refiner",
    "grad_inversion_paper",
    "grad_inversion_refiner",
)
"""Configurations of a preset with other settings than its own defaults."""


@pytest.mark.parametrize("name", [f.stem for f in FILES if f.stem not in ("none", "custom")])
def test_configurations_are_complete(name: str) -> None:
    config = compose([f"attack={name}", "device=cpu"])
    settings = config.attack
    preset = hydra.utils.get_object(settings._target_)
    assert settings.keys() - {"_target_", "shards"} == inspect.signature(preset).parameters.keys()
    built = build_attack(config)
    assert isinstance(built, attacks.GradientInversion | attacks.AnalyticInversion | attacks.ModelInversion)
    if not name.startswith("ats") and name not in VARIANTS:
        assert built == (preset(device="cpu") if "device" in settings else preset())


def test_every_preset_has_a_configuration() -> None:
    targets = {str(OmegaConf.load(path).get("_target_")).rpartition(".")[2] for path in FILES}
    presets = {name for name in attacks.__all__ if name[0].islower() and name != "no_progress"}
    assert presets <= targets


def test_every_part_can_be_set_from_the_command_line() -> None:
    overrides = ["per_layer=true", "sign=soft", "noise=0.1", "isotropic=true", "color_range=0.5", "projection=none"]
    built = build_attack(compose([f"attack.{override}" for override in overrides]))
    assert isinstance(built, attacks.GradientInversion)
    assert built.objective == Cosine(per_layer=True)
    assert built.optimizer == Adam(lr=0.1, sign="soft", schedule=StepDecay())
    assert built.priors == (TotalVariation(weight=4e-4, isotropic=True), ColorRange(weight=0.5))
    assert (built.noise, built.projection) == (0.1, "none")
    grouped = build_attack(compose(["attack=grad_inversion", "attack.first_layer=1", "attack.restarts=2"]))
    assert isinstance(grouped, attacks.GradientInversion)
    assert grouped.priors[2:] == (BatchNormStatistics(weight=0.1, first=1.0), GroupConsistency(weight=0.01))
