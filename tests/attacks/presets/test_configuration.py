"""Every configuration of an attack builds the preset that it names, with the preset's own defaults."""

import inspect
from dataclasses import is_dataclass, replace
from pathlib import Path

import hydra.utils
import pytest
from omegaconf import DictConfig, OmegaConf

from fl_privacy import attacks
from fl_privacy.attacks.gradient_inversion.objectives import L2, Cosine
from fl_privacy.attacks.gradient_inversion.priors import (
    BatchNormStatistics,
    ColorRange,
    GroupConsistency,
    TotalVariation,
)
from fl_privacy.attacks.gradient_inversion.settings import Uniform
from fl_privacy.attacks.optimizers import LBFGS, Adam, GradientDescent, StepDecay
from fl_privacy.errors import UserError
from fl_privacy.runs.build import build_attack
from fl_privacy.runs.config import compose_run

FILES = sorted((Path(__file__).parents[3] / "conf/attack").glob("*.yaml"))

VARIANTS = (
    "inverting_gradients_code",
    "inverting_gradients_notebook",
    "inverting_gradients_refiner",
    "grad_inversion_paper",
    "model_inversion_paper",
    "grad_inversion_refiner",
    "idlg_refiner",
    "tableak_paper",
    "dlg_fdl_pp",
    "ggl_refiner",
    "inverting_gradients_refiner_paper",
    "sapag_paper",
)
"""Configurations of a preset with other settings than its own defaults."""


@pytest.mark.parametrize("name", [f.stem for f in FILES if f.stem not in ("none", "custom")])
def test_configurations_are_complete(name: str) -> None:
    config = compose_run([f"attack={name}", "device=cpu"])
    settings = config.attack
    preset = hydra.utils.get_object(settings["_target_"])
    assert settings.keys() - {"_target_", "shards"} == inspect.signature(preset).parameters.keys()
    built = build_attack(config.attack, device=config.device)
    assert is_dataclass(built) and callable(built)
    if not name.startswith("ats") and name not in VARIANTS:
        assert built == (preset(device="cpu") if "device" in settings else preset())


@pytest.mark.parametrize("name", [f.stem for f in FILES if f.stem not in ("none", "custom")])
def test_files_hold_only_what_differs_from_the_preset(name: str) -> None:
    written = OmegaConf.load(FILES[0].with_name(f"{name}.yaml"))
    assert isinstance(written, DictConfig)
    target = compose_run([f"attack={name}"]).attack["_target_"]
    parameters = inspect.signature(hydra.utils.get_object(target)).parameters
    settings = {str(key): value for key, value in written.items() if key not in ("_target_", "defaults")}
    assert [key for key, value in settings.items() if parameters[key].default == value] == []


def test_what_files_leave_out_can_be_set_and_is_recorded() -> None:
    config = compose_run(["attack=dlg", "attack.lr=0.5", "attack.shards=2"])
    assert (config.attack["lr"], config.attack["shards"], config.attack["iterations"]) == (0.5, 2, 300)
    own = compose_run(["device=cpu", "attack=custom", "attack._target_=fl_privacy.attacks.idlg", "attack.enough=0"])
    assert build_attack(own.attack, device=own.device) == attacks.idlg(enough=0, device="cpu")
    with pytest.raises(UserError, match=r"Unknown key attack\.lrr \(did you mean lr\?\)"):
        compose_run(["attack=dlg", "attack.lrr=0.5"])


def test_presets_are_varied_by_what_all_attacks_have() -> None:
    plain = attacks.idlg()
    assert attacks.idlg(iterations=7, start="uniform") == replace(plain, iterations=7, start=Uniform())
    assert attacks.idlg(layers={"fc*": 0}).objective == L2(layers={"fc*": 0})
    assert attacks.sapag(optimizer="adamw").projection == "clamp"
    assert [attacks.sapag(optimizer=each).iterations for each in ("lbfgs", "adamw")] == [500, 20_000]
    assert attacks.sapag(optimizer="adamw", projection="minmax").projection == "minmax"
    widths = [attacks.sapag(optimizer=optimizer).objective.bandwidth for optimizer in ("lbfgs", "adamw")]
    assert widths == [10, 1] and attacks.sapag(bandwidth=3).objective.bandwidth == 3
    with pytest.raises(TypeError, match="iteration"):
        attacks.idlg(iteration=7)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", [f.stem for f in FILES if f.stem.startswith("ats")])
def test_configurations_of_ats_are_the_settings_of_their_variant(name: str) -> None:
    config = compose_run([f"attack={name}", "device=cpu"])
    _, optimizer, distance, *variant = name.split("_")
    expected = attacks.ats_attack(optimizer=optimizer, distance=distance, variant=(*variant, "paper")[0], device="cpu")
    assert build_attack(config.attack, device=config.device) == expected


def test_ats_as_its_authors_program_sets_it() -> None:
    cosine, l2 = (attacks.ats_attack(variant="code", optimizer="lbfgs", distance=d) for d in ("cosine", "l2"))
    assert (cosine.optimizer, l2.optimizer) == (LBFGS(lr=1e-4, sign="hard"), LBFGS(lr=1e-4))
    assert (cosine.restarts, cosine.iterations, cosine.projection) == (16, 300, "clamp")
    assert (l2.restarts, l2.iterations, l2.projection) == (2, 50, "none")
    assert (cosine.priors, l2.priors) == ((TotalVariation(weight=4e-4),), (TotalVariation(weight=4e-3),))
    sgd = attacks.ats_attack(optimizer="sgd").optimizer
    assert sgd == GradientDescent(lr=0.01, momentum=0.9, nesterov=True, sign="hard", schedule=StepDecay())


def test_ats_as_its_paper_sets_it() -> None:
    for distance in ("l2", "cosine"):
        paper = attacks.ats_attack(optimizer="lbfgs", distance=distance)
        assert (paper.optimizer, paper.restarts, paper.iterations) == (LBFGS(), 16, 300)
        assert (paper.priors, paper.projection) == ((), "none")
    published = attacks.inverting_gradients()
    assert attacks.ats_attack(optimizer="adam", distance="cosine") == published
    assert published.iterations == 4800


def test_every_part_can_be_set_from_the_command_line() -> None:
    overrides = ["per_layer=true", "sign=soft", "noise=0.1", "isotropic=true", "color_range=0.5", "projection=none"]
    built = build_attack(compose_run(["attack=inverting_gradients", *(f"attack.{each}" for each in overrides)]).attack)
    assert isinstance(built, attacks.GradientInversion)
    assert built.objective == Cosine(per_layer=True)
    assert built.optimizer == Adam(lr=0.1, sign="soft", schedule=StepDecay())
    assert built.priors == (TotalVariation(weight=4e-4, isotropic=True), ColorRange(weight=0.5))
    assert (built.noise, built.projection) == (0.1, "none")
    grouped = build_attack(compose_run(["attack=grad_inversion", "attack.first_layer=1", "attack.restarts=2"]).attack)
    assert isinstance(grouped, attacks.GradientInversion)
    assert grouped.priors[2:] == (BatchNormStatistics(weight=0.1, first=1.0), GroupConsistency(weight=0.01))
