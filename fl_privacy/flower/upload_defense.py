"""Apply a defense's upload hooks to the weights in a third-party client's reply."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from flwr.app import RecordDict
from torch import nn

from fl_privacy import checks
from fl_privacy.defenses import ClientState, Defense
from fl_privacy.defenses.privacy import promises_privacy
from fl_privacy.effects import ClippedExamples, Noise, PrivateRelease
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import UnfitMessageError, norm
from fl_privacy.flower.records import ROUND, STATISTICS, load_state, save_state, to_array
from fl_privacy.models.unwrap_model import all_parameter_names, first_names, made_of
from fl_privacy.rng import Secret, SecretGenerator, derive_generator
from fl_privacy.types import Tensors

BufferPolicy = Literal["kept", "withheld", "defended"]
Shares = Literal["weights", "change"]  # content of a client's reply: the weights after its training, or their change

LOOKS_LIKE_CHANGE = 0.5
"""A reply counts as a change if its norm is below this share of its distance from the model sent."""

_WITHIN = {
    "model": "changes the model",
    "private": "keeps layers of the model private",
    "examples": "exchanges the client's examples",
    "data": "changes each batch",
    "loss": "changes the loss",
    "gradient": "changes the gradient of each step",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class DefendedUpload:
    """Upload hooks of ``defense``, applied to the difference between replied and sent weights.

    Arrays that hooks withhold or that are not defended are returned as the server sent them, except for ``kept``
    buffers of the model. A renamed or retyped array thus never leaves undefended.

    Attributes:
        buffers: treatment of the model's other arrays, such as running statistics: ``kept`` as replied, ``withheld``
            (returned as sent), or ``defended`` like parameters if floating-point.
        of_model: ``True`` if ``parameters`` come from a model; then integer parameters are refused.
        tied: second name of a shared weight -> its first name; both get one value, so that noise is drawn once.
        frozen: parameters that the client does not train; they come back as sent, without noise.
    """

    defense: Defense
    parameters: frozenset[str] | None = None  # defended names; ``None`` takes every floating-point array
    buffers: BufferPolicy = "kept"
    tied: Mapping[str, str] = field(default_factory=dict)
    of_model: bool = False
    frozen: frozenset[str] = frozenset()
    shares: Shares = "weights"  # ``weights``, or ``change`` if clients reply it, which is then defended itself

    def __post_init__(self) -> None:
        checks.one_of("shares", self.shares, ("weights", "change"))
        checks.one_of("buffers", self.buffers, ("kept", "withheld", "defended"))
        if inside := acts_within(self.defense):
            raise UserError(
                f"A defense around a third-party client is expected to act on the upload only, but {self.defense.name}"
                f" acts within the training: it {' and '.join(inside)}. Call it there (fl_privacy.flower.train_step),"
                " or make the client a PrivacyClient."
            )
        if self.parameters is None and is_differentially_private(self.defense):
            raise UserError(
                f"{self.defense.name} is expected to know which arrays are parameters, since noise makes batch norm's"
                " statistics useless, but got neither model nor names; give model=Net or names=[...]."
            )

    @classmethod
    def around(
        cls,
        defense: Defense,
        model: nn.Module | Callable[[], nn.Module] | None,
        names: Sequence[str] | None,
        buffers: BufferPolicy,
        shares: Shares = "weights",
    ) -> "DefendedUpload":
        """Build hooks for ``model``'s parameters or the arrays ``names``, not both; by default for all float arrays."""
        if model is None:
            own = None if names is None else frozenset(n for n in names if n.rpartition(".")[2] not in STATISTICS)
            return cls(defense=defense, parameters=own, buffers=buffers, shares=shares)
        if names is not None:
            raise UserError("model and names are expected one at a time, but got both; leave names out.")
        made = made_of(model)
        trained = made.named_parameters(remove_duplicate=False)
        return cls(
            defense=defense,
            parameters=all_parameter_names(made),
            buffers=buffers,
            tied={name: first for name, first in first_names(made).items() if name != first},
            of_model=True,
            frozen=frozenset(name for name, parameter in trained if not parameter.requires_grad),
            shares=shares,
        )

    def __call__(
        self, before: Tensors, after: Tensors, state: ClientState, rng: torch.Generator
    ) -> dict[str, torch.Tensor]:
        """Return the defended upload, by name, of a client that was sent ``before`` and replied ``after``.

        If the defense promises differential privacy, a reply that is not finite is replaced by ``before``, since an
        error would break the promise; else it is a ``UserError``, as is a parameter that is missing or not a float.
        """
        if not self.of_model and (missing := sorted((self.parameters or set()) - before.keys())):
            raise UnfitMessageError(
                f"The defense is expected to find the parameter {missing[0]} among the arrays of the message, but they"
                f" are {', '.join(list(before)[:4])}...; give the model or names of this app."
            )
        if not all(value.isfinite().all() for value in after.values()):
            if not promises_privacy(self.defense):
                raise UserError("A client's reply is expected to be finite, but is not; lower the learning rate.")
            after = self.unchanged(before, {name: value.dtype for name, value in after.items()})
        acted = [name for name in before if self._acts_on(name, before[name], after[name])]
        if not acted:
            unfit = not any(value.is_floating_point() for value in before.values())
            raise (UnfitMessageError if unfit else UserError)(
                "A defense is expected to find floating-point arrays in the message, but there are none; send weights"
                " as floating-point numbers."
            )
        own = [name for name in acted if name not in self.tied]
        start = self._start(before)
        change: Tensors = {name: after[name] - start[name] for name in own}
        if self.shares == "weights":
            replied, moved = (norm({name: held[name] for name in change}) for held in (after, change))
            if replied < LOOKS_LIKE_CHANGE * moved:  # near zero and far from the model sent: the change itself
                raise UserError(
                    "A defended client is expected to reply its weights, but replies their change; set shares='change'."
                )
        for hook in self.defense.upload:
            change = hook(change, state, rng)
        defended = {name: start[name] + change[name] if name in change else start[name] for name in own}
        defended |= {name: defended[self.tied[name]] for name in acted if name in self.tied}
        others = set[str]() if self.parameters is None else before.keys() - self.parameters
        kept = after if self.buffers == "kept" else before
        return {n: defended[n] if n in defended else kept[n] if n in others else start[n] for n in before}

    def remembering(
        self, memory: RecordDict, before: Tensors, after: Tensors, rng: torch.Generator
    ) -> list[np.ndarray]:
        state = load_state(memory)
        defended = self(before, after, state, rng)
        save_state(memory, state)
        return [to_array(value) for value in defended.values()]

    def unchanged(self, before: Tensors, kinds: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
        return {name: value.to(kinds[name]) for name, value in self._start(before).items()}

    def _start(self, before: Tensors) -> Tensors:
        return before if self.shares == "weights" else {name: torch.zeros_like(t) for name, t in before.items()}

    def _acts_on(self, name: str, sent: torch.Tensor, replied: torch.Tensor) -> bool:
        floating = sent.is_floating_point() and replied.is_floating_point()
        named = self.parameters is None or self.buffers == "defended" or name in self.parameters
        if not floating and self.of_model and name in (self.parameters or ()):
            raise (UserError if sent.is_floating_point() else UnfitMessageError)(
                f"{name} is expected as floating-point numbers, but was sent as {sent.dtype} and replied as"
                f" {replied.dtype}; convert it, since the defense does not act on those."
            )
        return named and floating and name not in self.frozen


def generator_of_round(
    seed: int | None, config: Mapping[str, object], client: int | str, *purpose: str
) -> torch.Generator:
    """Return a generator for ``client`` and the round in ``config``, seeded by ``seed``; ``None`` seeds it at random.

    ``purpose``: words that separate streams. ``UserError`` if ``seed`` is set, and ``config`` names no round.
    """
    if seed is None:
        return SecretGenerator(Secret.draw())
    if ROUND not in config:
        raise UserError(
            f"A seeded defense expects the number of the round as {ROUND!r} in the server's config, but it is"
            " missing; send it, or leave seed out."
        )
    return derive_generator(seed, "client", client, f"round-{config[ROUND]!r}", *purpose, "defense")


def acts_within(defense: Defense) -> list[str]:
    """Say what ``defense`` changes within a training, such as ``changes the model``; empty for defenses of uploads."""
    return [why for hook, why in _WITHIN.items() if getattr(defense, hook)]


def is_differentially_private(defense: Defense) -> bool:
    """Return whether a part of ``defense`` adds noise that privacy accountants count."""
    return any(isinstance(part.effect, Noise | ClippedExamples | PrivateRelease) for part in defense.parts)
