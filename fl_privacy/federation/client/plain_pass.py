"""The undefended pass of a local step, which a defense that computes the gradient anew spares the client."""

from collections.abc import Iterator, Mapping
from functools import cached_property

from torch import Tensor

from fl_privacy.defenses import Defense, LocalStep
from fl_privacy.errors import UserError
from fl_privacy.gradients import GradientResult, loss_gradients
from fl_privacy.types import Tensors


class PlainPass(Mapping[str, Tensor]):
    """The gradient of the mean loss by name, of a step; computed at once, or when it is first looked at.

    Args:
        step: whose gradient it is.
        defense: of the client; where its first hook computes the gradient itself, nobody may look.
    """

    def __init__(self, step: LocalStep, defense: Defense) -> None:
        self._step, self._hidden = step, defense.computes_gradient
        if not defense.computes_gradient:
            _ = self._result

    def __getitem__(self, name: str) -> Tensor:
        if self._hidden:
            raise UserError(
                f"A defense that computes the gradient itself is expected to give that of {name}, too, but it does not:"
                " a gradient hook behind it takes it away."
            )
        return self._result.gradients[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._step.sent.parameters)

    def __len__(self) -> int:
        return len(self._step.sent.parameters)

    @property
    def loss(self) -> Tensor:
        """The mean loss, the defense's own where it has computed it."""
        return self._step.losses[-1] if self._step.losses else self._result.loss

    @property
    def buffers(self) -> Tensors:
        """After the pass; those before it where there was none."""
        return self._result.buffers if "_result" in vars(self) else self._step.sent.buffers

    def only(self, names: frozenset[str]) -> "Tensors":
        """Of ``names``, looked at as late."""
        return _Chosen(self, names)

    @cached_property
    def _result(self) -> GradientResult:
        step = self._step
        return loss_gradients(
            step.model,
            step.sent,
            step.batch,
            batch_norm=step.plan.batch_norm,
            loss_scale=step.plan.loss_scale,
            changes=step.changes,
        )


class _Chosen(Mapping[str, Tensor]):
    def __init__(self, whole: PlainPass, names: frozenset[str]) -> None:
        self._whole, self._names = whole, [name for name in whole if name in names]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._whole[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
