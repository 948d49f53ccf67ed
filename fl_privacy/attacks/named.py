"""Run an attack by its name, as in ``conf/attack``, on one observation or many."""

import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch

from fl_privacy.attacks.attack import ReconstructionAttack
from fl_privacy.checks import meant_by, one_of
from fl_privacy.errors import UserError
from fl_privacy.files import CONFIG_DIR
from fl_privacy.models.gradients.memory import resolve_device
from fl_privacy.models.unwrap_model import detached_copy
from fl_privacy.progress import Progress, no_progress
from fl_privacy.types import Batch, Observation, Reconstruction

Make = Callable[..., ReconstructionAttack]
_FOLDER = CONFIG_DIR / "attack"
_EXPONENT = re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+$")
_TARGET = re.compile(r"_target_:\s*fl_privacy\.attacks\.(\w+)")


def attack_names() -> list[str]:
    """List the sorted names of all attacks that run by their name alone."""
    return [path.stem for path in sorted(_FOLDER.glob("*.yaml")) if path.stem not in ("none", "custom")]


def attack_named(name: str) -> Make:
    """Return the factory of attack ``name`` with the options in ``conf/attack``; ``UserError`` if PyYAML is missing."""
    settings = dict(_settings(_FOLDER / f"{name}.yaml"))
    target = _TARGET.fullmatch(f"_target_: {settings.pop('_target_', None)}")
    if target is None:
        raise UserError(f"{name}.yaml is expected to have a _target_ in fl_privacy.attacks, but has none; restore it.")
    make: Make = getattr(importlib.import_module("fl_privacy.attacks"), target[1])
    return partial(make, **settings) if settings else make


def _settings(file: Path) -> Mapping[str, Any]:
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    if len(lines) == 1 and (found := _TARGET.fullmatch(lines[0])):
        return {"_target_": f"fl_privacy.attacks.{found[1]}"}
    try:
        import yaml  # noqa: PLC0415  (the core goes without)
    except ImportError as error:
        raise UserError(
            f"The attack {file.stem} is expected to find the package PyYAML, which reads its settings, but it is not"
            " installed; run `pip install PyYAML`."
        ) from error

    class Loader(yaml.SafeLoader):
        """YAML loader that parses 1.0e6 as a number, like YAML 1.2 and OmegaConf."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))
    content = yaml.load("\n".join(lines), Loader)
    settings = dict[str, Any]()
    for base in (entry.partition("@")[0] for entry in content.pop("defaults", []) if entry != "_self_"):
        settings |= _settings(file.with_name(f"{base}.yaml"))
    settings |= content
    return settings


@overload
def reconstruct(
    observed: Observation,
    attack: str | ReconstructionAttack = ...,
    *,
    seed: int = ...,
    progress: Progress = ...,
    device: str | None = ...,
    **options: Any,
) -> Reconstruction: ...


@overload
def reconstruct(
    observed: Sequence[Observation],
    attack: str | ReconstructionAttack = ...,
    *,
    seed: int = ...,
    progress: Progress = ...,
    device: str | None = ...,
    **options: Any,
) -> list[Reconstruction]: ...


def reconstruct(
    observed: Observation | Sequence[Observation],
    attack: str | ReconstructionAttack = "auto",
    *,
    seed: int = 0,
    progress: Progress = no_progress,
    device: str | None = None,
    **options: Any,
) -> Reconstruction | list[Reconstruction]:
    """Attack one or several observations, and return their reconstructions in order, on the CPU.

    Float64 weights and updates are attacked in float64, unless the option ``dtype`` says otherwise. A reconstruction
    that failed has no ``batch``, and gives the reason in ``failure``. ``UserError`` if there is no such attack, option
    or device.

    Args:
        attack: name listed by ``fl-privacy list attack``, or an attack.
        device: device that computes, ``cpu``, ``cuda`` or ``auto``; ``None``: the device of the sent values.
        options: options of a named attack, such as ``iterations=500``.

    >>> import torch
    >>> from fl_privacy.types import Observation
    >>> net, image = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(9, 3)), torch.eye(3).view(1, 1, 3, 3)
    >>> loss = torch.nn.functional.cross_entropy(net(image), torch.tensor([1]))
    >>> gradients = torch.autograd.grad(loss, list(net.parameters()))
    >>> observation = Observation.of_gradients(net, gradients, input_shape=(1, 3, 3))
    >>> reconstruct(observation, "analytic").batch.inputs.view(3, 3).round(decimals=3).abs()
    tensor([[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]])
    """
    asked = [observed] if isinstance(observed, Observation) else list(observed)
    if wrong := [type(one).__name__ for one in asked if not isinstance(one, Observation)]:
        raise UserError(
            f"reconstruct is expected to get observations, but got {wrong[0]}; Observation.of_gradients"
            " makes one of a gradient, Observation.of_update of weights."
        )
    if isinstance(attack, str):
        one_of("attack", attack, attack_names())
        make = attack_named(attack)
        known = inspect.signature(make).parameters
        if unknown := [name for name in options if name not in known]:
            meant = f" (did you mean {like}?)" if (like := meant_by(unknown[0], list(known))) else ""
            raise UserError(f"{attack} expects options among {', '.join(known)}, but got {unknown[0]}{meant}; omit it.")
        if "dtype" in known and all(one.precision == torch.float64 for one in asked):
            options.setdefault("dtype", "float64")
        attack = make(**options)
    elif options:
        raise UserError(f"Options are expected with a name, but got {', '.join(options)} with an attack; omit them.")
    run: Callable[..., list[Reconstruction]]
    run = attack if device is None else partial(_on, resolve_device(device), attack)
    found = run(asked, seed=seed, progress=progress)
    return found[0] if isinstance(observed, Observation) else found


def _on(
    device: torch.device, attack: ReconstructionAttack, asked: Sequence[Observation], *, seed: int, progress: Progress
) -> list[Reconstruction]:
    models = {id(one.model): detached_copy(one.model).to(device) for one in asked}  # one for all: they are batched
    sent = {id(one.sent): one.sent.to(device) for one in asked}
    moved = [replace(one.to(device), model=models[id(one.model)], sent=sent[id(one.sent)]) for one in asked]
    return [
        one if one.batch is None else replace(one, batch=Batch(one.batch.inputs.cpu(), one.batch.labels.cpu()))
        for one in attack(moved, seed=seed, progress=progress)
    ]
