"""Split learning: some layers stay on the clients."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import nn

from fl_privacy import checks
from fl_privacy.defenses.defense import ClientState, Defense, ModelHook, PrivateHook
from fl_privacy.effects import Part, PrivateLayers
from fl_privacy.errors import UserError
from fl_privacy.models.unwrap_model import first_names

Start = Literal["own", "shared"]
"""Initial private values: ``own`` ones of each client, or ``shared`` ones, the model's."""


def private_modules(model: nn.Module, names: Sequence[str] | None) -> list[str]:
    """Return the names of the modules that stay on the client: ``names`` or, for ``None``, a default.

    The default is the first convolution or linear layer. ``UserError`` if a module is missing or has no parameters, or
    none is shared.
    """
    modules = dict(model.named_modules())
    if names is None:
        names = [name for name, module in modules.items() if isinstance(module, nn.Conv2d | nn.Linear)][:1]
        if not names:
            raise UserError(
                f"A model is expected to have a convolution or linear layer, but {type(model).__name__} has none;"
                " name modules in defense.private."
            )
    else:
        owners = [name for name, module in modules.items() if name and any(True for _ in module.parameters())]
        if missing := [name for name in names if name not in owners]:
            raise UserError(
                f"defense.private is expected to name modules with parameters, but got {missing[0]!r};"
                f" use some of {', '.join(owners)}."
            )
    first = first_names(model)
    if {own for name, own in first.items() if _within(name, names)} == {*first.values()}:
        raise UserError("defense.private is expected to leave something to share, but names all; name fewer.")
    return list(names)


def keep_with_clients(choose: Callable[[nn.Module], Sequence[str]]) -> PrivateHook:
    """Return a hook for ``Defense.private``: it names all parameters and buffers of the modules ``choose(model)``."""

    def kept(model: nn.Module) -> list[str]:
        chosen = choose(model)
        parameters = {own: None for name, own in first_names(model).items() if _within(name, chosen)}
        return [*parameters, *(name for name, _ in model.named_buffers() if _within(name, chosen))]

    return kept


def draw_own(private: PrivateHook) -> ModelHook:
    """Return a hook for ``Defense.model`` that gives each client its own initial private parameters.

    It permutes the values of each parameter at random. ``private``: function from a model to their names.
    """

    def drawn(model: nn.Module, state: ClientState, rng: torch.Generator) -> nn.Module:
        names = set(private(model))
        own = copy.deepcopy(model)
        with torch.no_grad():
            for name, parameter in own.named_parameters():
                if name in names:
                    order = torch.randperm(parameter.numel(), generator=rng).to(parameter.device)
                    parameter.copy_(parameter.flatten()[order].view_as(parameter))
        return own

    return drawn


def _within(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def split_fed(*, private: Sequence[str] | None = None, start: Start = "own", private_passes: int = 1) -> Defense:
    """Keep some layers on the client: only the others are sent, uploaded and averaged (Gu et al. 2021, Eq. 23).

    At the end of each round a client trains its private layers alone (Algorithm 5 without the passport). An empty
    ``private`` is FedAvg.

    Args:
        private: names of the private modules; ``None`` takes the first convolution or linear layer.
        start: initial private values, ``own`` to each client or ``shared`` by all.
        private_passes: passes over the client's examples at the end of each round that train only the private layers.
    """
    checks.one_of("defense.start", start, ("own", "shared"))
    checks.whole("defense.private_passes", private_passes, at_least=0, example=1)
    hook = keep_with_clients(partial(private_modules, names=private))
    settings = {"private": "first layer" if private is None else list(private), "start": start}
    part, drawn = Part("split_fed", settings, PrivateLayers()), (draw_own(hook),) if start == "own" else ()
    return Defense(parts=(part,), private=(hook,), private_passes=private_passes, model=drawn)
