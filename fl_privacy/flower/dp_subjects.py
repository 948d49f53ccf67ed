"""Subjects of a differential privacy check, named on a command line: mods, strategies, defenses and functions."""

import importlib
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    Strategy,
)

from fl_privacy.defenses import Defense
from fl_privacy.dp_check.check import DpCheckRequest, tested
from fl_privacy.dp_check.of_defense import on_defense
from fl_privacy.dp_check.verdict import ClaimVerdict
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.flower.dp_mechanisms import mechanism_of_mod, mechanism_of_strategy, stated_by
from fl_privacy.types import Tensors


def located(name: str) -> Any:
    """Import the object ``module:attribute``, with the working directory on the path; ``UserError`` without one."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UserError(
            f"A subject is expected to be the folder of a run or an app, or module:attribute, but got {name!r}; put"
            " my_mod = LocalDpMod(1.0, 1.0, 1.0, 1e-5) into my_module.py, and name it as my_module:my_mod."
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    found: Any = attempt(lambda: importlib.import_module(module))
    if isinstance(found, Failure):
        raise UserError(f"{module!r} can't be imported ({found.reason}); run where it can be.")
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UserError(f"{module} is expected to have {attribute!r}, but has not; see its names by dir({module}).")
        found = getattr(found, part)
    return found


def verdicts_on(
    subject: object, asked: DpCheckRequest, *, name: str = "", mods: Sequence[Any] = ()
) -> list[ClaimVerdict]:
    """Recompute and test each claim that ``subject`` makes.

    Args:
        subject: a mod, a strategy, one of the package's defenses, a function from an update to the upload, or a
            function without arguments that makes one of these.

    Raises:
        UserError: it is none of these.
    """
    if inspect.isfunction(subject) and not inspect.signature(subject).parameters:
        made = attempt(subject)
        if isinstance(made, Failure):
            raise UserError(f"{name or subject.__name__}() is expected to make a mechanism, but raised {made.reason}.")
        return verdicts_on(made, asked, name=name, mods=mods)
    name = name or getattr(subject, "__name__", type(subject).__name__)
    if isinstance(subject, Defense):
        return on_defense(subject, asked)
    if isinstance(subject, Strategy):
        sampled: Any = getattr(subject, "num_sampled_clients", 2)
        if not mods and isinstance(subject, DifferentialPrivacyClientSideFixedClipping):
            mods = (fixedclipping_mod,)
        if not mods and isinstance(subject, DifferentialPrivacyClientSideAdaptiveClipping):
            mods = (adaptiveclipping_mod,)
        mean = mechanism_of_strategy(subject, clients=int(asked.clients or sampled), mods=mods)
        return [tested(name, mean, stated_by(subject, rounds=asked.rounds), asked)]
    if not callable(subject) or isinstance(subject, type):
        arguments = None
    else:
        parameters = inspect.signature(subject).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        arguments = sum(p.kind in kinds and p.default is p.empty for p in parameters)
    if arguments is None or arguments not in (1, 3):
        raise UserError(
            f"{name} is expected to be a mod (message, context, call_next), a strategy, a defense of the package or a"
            f" function from an update to what is sent, but is a {type(subject).__name__}; wrap it into a function."
        )
    stated = stated_by(subject, rounds=asked.rounds)
    if arguments == 3:
        return [tested(name, mechanism_of_mod(subject), stated, asked)]  # type: ignore[arg-type]

    function: Any = subject

    def mechanism(update: Any) -> Tensors:
        sent = function(update)
        return {"value": torch.as_tensor(sent)} if not hasattr(sent, "items") else sent

    return [tested(name, mechanism, stated, asked)]
