"""The upload hooks of a defense on the weights that a foreign client replies: on which arrays they act."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fl_privacy import checks
from fl_privacy.defenses import ClientState, Defense
from fl_privacy.effects.kinds import ClippedExamples, Noise, PrivateRelease
from fl_privacy.errors import UserError
from fl_privacy.flower.one_record import STATISTICS
from fl_privacy.types import Tensors

BufferPolicy = Literal["kept", "withheld", "defended"]

_WITHIN = {
    "model": "changes the model",
    "private": "keeps layers of the model private",
    "examples": "exchanges the client's examples",
    "data": "changes each batch",
    "loss": "changes the loss",
    "gradient": "changes the gradient of each step",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class GuardedUpload:
    """A defense on replied weights: its hooks see their change by name, reply minus sent.

    What they make of it is added to what was sent; a name that they withhold comes back as it was sent. Arrays of
    whole numbers pass as they are.

    Attributes:
        defense: with upload hooks only.
        parameters: names that it acts on; ``None`` takes every floating-point array but batch norm's statistics.
        buffers: of the other floating-point arrays, such as running statistics: ``kept`` as the client replies them,
            ``withheld`` (they come back as they were sent), or ``defended`` like parameters.
    """

    defense: Defense
    parameters: frozenset[str] | None = None
    buffers: BufferPolicy = "kept"

    def __post_init__(self) -> None:
        checks.one_of("buffers", self.buffers, ("kept", "withheld", "defended"))
        inside = [why for hook, why in _WITHIN.items() if getattr(self.defense, hook)]
        if inside:
            raise UserError(
                f"A defense around a foreign client is expected to act on the upload only, but {self.defense.name} acts"
                f" within the training: it {' and '.join(inside)}. Call it there (fl_privacy.flower.train_step),"
                " or make the client a PrivacyClient."
            )
        if self.parameters is None and is_differentially_private(self.defense):
            raise UserError(
                f"{self.defense.name} adds noise for differential privacy and is expected to be told which arrays are"
                " parameters: noise makes batch norm's statistics useless, and clips along with them; give model=Net or"
                " names=[...]."
            )

    def expect_known(self, names: Sequence[str]) -> None:
        """Raise ``UserError`` if a parameter that is to be defended is not among ``names``, the arrays of a message."""
        if self.parameters is not None and (missing := sorted(self.parameters - set(names))):
            raise UserError(
                f"The defense is expected to find the parameter {missing[0]} among the arrays of the message, but they"
                f" are {', '.join(names[:4])}...; give the model or names of this app."
            )

    def __call__(
        self, before: Tensors, after: Tensors, state: ClientState, rng: torch.Generator
    ) -> dict[str, torch.Tensor]:
        """What is uploaded instead of ``after`` by a client that was sent ``before``, under the same names."""
        self.expect_known(list(before))
        acted = [name for name, t in before.items() if t.is_floating_point() and self._acts_on(name)]
        change: Tensors = {name: after[name] - before[name] for name in acted}
        for hook in self.defense.upload:
            change = hook(change, state, rng)
        defended = {name: before[name] + change[name] if name in change else before[name] for name in acted}
        withheld = {} if self.buffers != "withheld" else {n: t for n, t in before.items() if n not in defended}
        return {name: defended.get(name, withheld.get(name, after[name])) for name in before}

    def _acts_on(self, name: str) -> bool:
        if self.buffers == "defended":
            return True
        return is_statistic(name) is False if self.parameters is None else name in self.parameters


def is_statistic(name: str) -> bool:
    """Whether an array of this name is a running statistic of batch norm."""
    return name.rpartition(".")[2] in STATISTICS


def is_differentially_private(defense: Defense) -> bool:
    """Whether a part of ``defense`` adds noise that accountants count."""
    return any(isinstance(part.effect, Noise | ClippedExamples | PrivateRelease) for part in defense.parts)


def parameter_names(
    model: nn.Module | Callable[[], nn.Module] | None, names: Sequence[str] | None
) -> frozenset[str] | None:
    """The names of the parameters of ``model``, or those of ``names`` that are no statistics.

    Raises:
        UserError: the model is none, or both are given.
    """
    if model is None:
        return None if names is None else frozenset(name for name in names if not is_statistic(name))
    if names is not None:
        raise UserError("model and names are expected one at a time, but got both; leave names out.")
    return frozenset(name for name, _ in made_of(model).named_parameters())


def made_of(model: object, options: Mapping[str, object] | None = None) -> nn.Module:
    """``model`` itself, or what the class or function ``model`` makes.

    Raises:
        UserError: it is neither, or needs arguments.
    """
    if isinstance(model, nn.Module):
        return model
    name = getattr(model, "__name__", type(model).__name__)
    if not callable(model):
        raise UserError(f"model is expected to be a torch.nn.Module or its class, but got {type(model).__name__}.")
    try:
        made = model(**(options or {}))
    except TypeError as error:
        raise UserError(
            f"model={name} is expected to be made without arguments, but: {error}; give an instance, model={name}(...)."
        ) from error
    if not isinstance(made, nn.Module):
        raise UserError(f"model={name} is expected to make a torch.nn.Module, but makes {type(made).__name__}.")
    return made
