"""A client's guard: a model that looks crafted is not trained on."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor, nn

from fl_privacy.checks import number, whole
from fl_privacy.errors import UserError
from fl_privacy.inspection.signs import Architecture, behavior_of, strange_structure
from fl_privacy.types import Batch, ModelState

LAST = "guard/"
"""Prefix of the values of the last model that was trained on, among what a client keeps."""

_LEAST_VALUES = 64
"""Of a tensor, below which its direction says little."""

_LEAST_EXAMPLES = 8
"""Below which a neuron that fires for one of them, or one that leads, says little."""


class RefusedModelError(UserError):
    """Why a client does not train on a model that it was sent, in one line."""


@dataclass(frozen=True, kw_only=True)
class ModelGuard:
    """What a model must be to be trained on; thresholds are between those of honest and of crafted models.

    It is no proof: a server that knows the guard can stay within all of it, and reads what ordinary models give away.

    Attributes:
        examples: of the client's own that a model is shown.
        dead: a layer lets at least this share of examples through, over its units.
        alone: at most this share of the units of the first layer with a threshold, which sees the pixels, fire for one
            of the examples or none.
        alone_later: likewise of later layers, which honest training makes sparser.
        leading: at most this share of the gradient comes from a single example.
        turned: no weight points at less than this cosine from the one trained on before.
        grown: no weight has more than so many times its length before.
        agreed: the architecture agreed on, see ``agreeing_on``; ``None`` takes any.
    """

    examples: int = 16
    dead: float = 0.04
    alone: float = 0.35
    alone_later: float = 0.6
    leading: float = 0.7
    turned: float = 0.3
    grown: float = 5.0
    agreed: Architecture | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        whole("guard.examples", self.examples, at_least=2, example=16)
        number("guard.dead", self.dead, at_least=0, below=1, example=0.04)
        number("guard.alone", self.alone, above=0, at_most=1, example=0.35)
        number("guard.alone_later", self.alone_later, above=0, at_most=1, example=0.6)
        number("guard.leading", self.leading, above=0, at_most=1, example=0.7)
        number("guard.turned", self.turned, at_least=-1, below=1, example=0.3)
        number("guard.grown", self.grown, above=1, infinite=True, example=5.0)

    def agreeing_on(self, model: nn.Module) -> Self:
        """The same guard that takes no other architecture than that of ``model``."""
        known = copy.copy(self)
        object.__setattr__(known, "agreed", Architecture.of(model))
        return known

    def refusal(self, model: nn.Module, sent: ModelState, batch: Batch, kept: Mapping[str, Tensor]) -> str | None:
        """Why not to train on ``sent``, in one line; ``None`` where nothing speaks against it.

        Args:
            model: the architecture that would be trained.
            sent: the values received; those of a private part are not looked at.
            batch: the client's own examples, of which the first are shown.
            kept: what the client keeps, with the last model under ``LAST``.
        """
        if self.agreed and (different := self.agreed.difference(Architecture.of(model))):
            return f"its architecture is not the one agreed on: {different}"
        if strange := next(filter(None, (strange_structure(n, p) for n, p in sent.parameters.items())), None):
            return strange
        if far := self._far(sent, kept):
            return far
        return self._misbehaved(model, sent, Batch(batch.inputs[: self.examples], batch.labels[: self.examples]))

    def expect_honest(self, model: nn.Module, sent: ModelState, batch: Batch, kept: Mapping[str, Tensor]) -> None:
        """Raise ``RefusedModelError`` where there is a ``refusal``."""
        if reason := self.refusal(model, sent, batch, kept):
            raise RefusedModelError(f"The model was refused: {reason}.")

    def remembered(self, sent: ModelState) -> dict[str, Tensor]:
        """What to keep of a model that is trained on."""
        return {LAST + name: p.detach().clone() for name, p in sent.parameters.items()}

    def _far(self, sent: ModelState, kept: Mapping[str, Tensor]) -> str | None:
        for name, new in sent.parameters.items():
            old = kept.get(LAST + name)
            if old is None or new.dim() < 2 or new.numel() < _LEAST_VALUES or old.shape != new.shape:
                continue
            flat, before = new.detach().flatten(), old.to(new).flatten()
            length, former = float(flat.dot(flat)) ** 0.5, float(before.dot(before)) ** 0.5
            if length > self.grown * former > 0:
                return f"{name} is {length / former:.1f} times as large as in the round before"
            cosine = float(flat.dot(before)) / max(length * former, 1e-30)
            if former > 0 and cosine < self.turned:
                return f"{name} was replaced since the round before (cosine {cosine:.2f})"
        return None

    def _misbehaved(self, model: nn.Module, sent: ModelState, batch: Batch) -> str | None:
        if not sent.parameters.keys() >= dict(model.named_parameters()).keys() or len(batch) < 2:
            return None
        seen, few = behavior_of(model, sent, batch), len(batch) < _LEAST_EXAMPLES
        for place, (name, firing) in enumerate(seen.firing.items()):
            if float(firing.mean()) < self.dead:
                return f"{name} lets {float(firing.mean()):.1%} of this client's examples through"
            if few:
                continue
            if seen.alone[name] > (self.alone_later if place else self.alone):
                return f"{seen.alone[name]:.0%} of the units of {name} fire for one of {len(batch)} examples or none"
        if seen.leading > self.leading and not few:
            return f"one of {len(batch)} examples sends {seen.leading:.0%} of the gradient"
        return None
