"""An attack by its name, on one observation or many: what a notebook needs."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from fl_privacy.attacks.attack import Progress, ReconstructionAttack, no_progress
from fl_privacy.attacks.auto import AutoAttack
from fl_privacy.attacks.exact import AnalyticInversion, CocktailParty, ExactInversion
from fl_privacy.attacks.presets import adam_dlg, dlg, ggl, gifd, grad_inversion, idlg, inverting_gradients, sapag, tag
from fl_privacy.attacks.text import Dager
from fl_privacy.checks import one_of
from fl_privacy.errors import UserError
from fl_privacy.types import Observation, Reconstruction

NAMED: Mapping[str, Callable[..., ReconstructionAttack]] = {
    "auto": AutoAttack,
    "dlg": dlg,
    "idlg": idlg,
    "adam_dlg": adam_dlg,
    "inverting_gradients": inverting_gradients,
    "grad_inversion": grad_inversion,
    "sapag": sapag,
    "ggl": ggl,
    "gifd": gifd,
    "analytic": AnalyticInversion,
    "cocktail_party": CocktailParty,
    "exact": ExactInversion,
    "dager": Dager,
    "tag": tag,
}
"""Attacks by the names that ``fl-privacy list`` has for them."""


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
    """What ``attack`` makes of ``observed``; many observations are attacked at once.

    Args:
        observed: one observation, or a sequence of them.
        attack: a name of ``NAMED``, or an attack.
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
        one_of("attack", attack, NAMED)
        make = NAMED[attack]
        known = inspect.signature(make).parameters
        if unknown := [name for name in options if name not in known]:
            raise UserError(f"{attack} is expected to get options among {', '.join(known)}, but got {unknown[0]}.")
        attack = make(**options)
    elif options:
        raise UserError(f"Options are expected with an attack's name, but got {', '.join(options)} with an attack.")
    if isinstance(observed, Observation):
        return attack([observed], seed=seed, progress=progress)[0]
    return attack(list(observed), seed=seed, progress=progress)
