"""An attack by its name, on one observation or many: what a notebook needs."""

import inspect
from collections.abc import Sequence
from typing import Any, overload

from fl_privacy.attacks.attack import Progress, ReconstructionAttack, no_progress
from fl_privacy.attacks.named import attack_named, attack_names
from fl_privacy.checks import one_of
from fl_privacy.errors import UserError
from fl_privacy.types import Observation, Reconstruction


@overload
def reconstruct(
    observed: Observation,
    attack: str | ReconstructionAttack = ...,
    *,
    seed: int = ...,
    progress: Progress = ...,
    **options: Any,
) -> Reconstruction: ...


@overload
def reconstruct(
    observed: Sequence[Observation],
    attack: str | ReconstructionAttack = ...,
    *,
    seed: int = ...,
    progress: Progress = ...,
    **options: Any,
) -> list[Reconstruction]: ...


def reconstruct(
    observed: Observation | Sequence[Observation],
    attack: str | ReconstructionAttack = "auto",
    *,
    seed: int = 0,
    progress: Progress = no_progress,
    **options: Any,
) -> Reconstruction | list[Reconstruction]:
    """Attack one observation or a sequence of them at once, and return the reconstructions.

    Args:
        observed: one observation, or a sequence of them.
        attack: a name that ``fl-privacy list attack`` has, or an attack.
        seed: of its random streams.
        progress: told of the work done.
        options: of the attack that is named, such as ``iterations=500``.

    Raises:
        UserError: there is no such attack or option.

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
    if isinstance(attack, str):
        one_of("attack", attack, attack_names())
        make = attack_named(attack)
        known = inspect.signature(make).parameters
        if unknown := [name for name in options if name not in known]:
            raise UserError(f"{attack} is expected to get options among {', '.join(known)}, but got {unknown[0]}.")
        attack = make(**options)
    elif options:
        raise UserError(f"Options are expected with an attack's name, but got {', '.join(options)} with an attack.")
    if isinstance(observed, Observation):
        return attack([observed], seed=seed, progress=progress)[0]
    return attack(list(observed), seed=seed, progress=progress)
