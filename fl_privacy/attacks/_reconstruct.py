"""Run an attack by its name on one observation or many."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

import torch

from fl_privacy.attacks.attack import Progress, ReconstructionAttack, no_progress
from fl_privacy.attacks.named import attack_named, attack_names
from fl_privacy.checks import meant_by, one_of
from fl_privacy.errors import UserError
from fl_privacy.models.gradients.memory import resolve_device
from fl_privacy.models.unwrap_model import detached_copy
from fl_privacy.types import Batch, Observation, Reconstruction


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
    """Attack one observation or a sequence of them, and return the reconstructions, in order and on the CPU.

    Float64 weights and updates are attacked in float64, unless ``dtype`` says otherwise. After a failure ``batch`` is
    ``None`` and ``failure`` gives the reason.

    Args:
        attack: name listed by ``fl-privacy list attack``, or an attack.
        seed: seed of its random streams.
        progress: callback for the work done.
        device: ``cpu``, ``cuda`` or ``auto``; ``None``: that of the values sent.
        options: options of a named attack, such as ``iterations=500``.

    Raises:
        UserError: there is no such attack, option or device.

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
    _expect_observations(asked)
    if isinstance(attack, str):
        one_of("attack", attack, attack_names())
        make = attack_named(attack)
        known = inspect.signature(make).parameters
        if unknown := [name for name in options if name not in known]:
            meant = f" (did you mean {like}?)" if (like := meant_by(unknown[0], list(known))) else ""
            raise UserError(
                f"{attack} is expected to get options among {', '.join(known)}, but got {unknown[0]}{meant}."
            )
        if "dtype" in known and all(one.precision == torch.float64 for one in asked):
            options.setdefault("dtype", "float64")
        attack = make(**options)
    elif options:
        raise UserError(f"Options are expected with an attack's name, but got {', '.join(options)} with an attack.")
    if device is None:
        found = attack(asked, seed=seed, progress=progress)
    else:
        found = _on(resolve_device(device), attack, asked, seed, progress)
    return found[0] if isinstance(observed, Observation) else found


def _expect_observations(asked: Sequence[object]) -> None:
    for one in asked:
        if not isinstance(one, Observation):
            raise UserError(
                f"reconstruct is expected to get observations, but got {type(one).__name__}; Observation.of_gradients"
                " makes one of a gradient, Observation.of_update of weights."
            )


def _on(
    device: torch.device, attack: ReconstructionAttack, asked: Sequence[Observation], seed: int, progress: Progress
) -> list[Reconstruction]:
    models = {id(one.model): detached_copy(one.model).to(device) for one in asked}  # one for all: they are batched
    sent = {id(one.sent): one.sent.to(device) for one in asked}
    moved = [replace(one.to(device), model=models[id(one.model)], sent=sent[id(one.sent)]) for one in asked]
    found = attack(moved, seed=seed, progress=progress)
    return [
        one if one.batch is None else replace(one, batch=Batch(one.batch.inputs.cpu(), one.batch.labels.cpu()))
        for one in found
    ]
