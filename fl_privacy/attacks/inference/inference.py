"""Interface of inference attacks, which observe every round and answer at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NoReturn, Protocol

from torch import Tensor

from fl_privacy import checks
from fl_privacy.attacks.inference.kinds import About
from fl_privacy.attacks.inference.read_round import ReadRound
from fl_privacy.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Canaries:
    """Number and kind of the canaries that a run inserts to audit differential privacy.

    ``unit``: ``client``, an update as long as the clipping norm, to which the defense of uploads applies in each round;
    ``example``, a gradient as long as the clipping norm, sampled in local steps like an example; ``auto``, the unit
    that the defense protects.
    """

    about: ClassVar[About] = About.CANARIES
    number: int = 500  # number of canaries; each takes part with probability 1/2, independently
    unit: Literal["auto", "client", "example"] = "auto"

    def __post_init__(self) -> None:
        checks.whole("inference.canaries.number", self.number, at_least=20, at_most=100_000, example=500)
        checks.one_of("inference.canaries.unit", self.unit, ("auto", "client", "example"))

    def begin(self, candidates: int, clients: Sequence[int], classes: int) -> NoReturn:
        raise UserError(
            "inference=canaries is expected from fl-privacy run, which inserts them, but got another caller;"
            " choose another inference here."
        )


class Inference(Protocol):
    """Settings of an inference attack."""

    @property
    def about(self) -> About: ...

    def begin(self, candidates: int, clients: Sequence[int], classes: int) -> "Watch":
        """Return an observer of all rounds, for C candidate examples, the ids of N ``clients`` and K ``classes``."""
        ...


class Watch(Protocol):
    """Observer that processes each round of a training as it ends, and stores none."""

    def add(self, read: ReadRound) -> None: ...

    def answers(self) -> Mapping[str, Tensor]:
        """Return results by method: scores (C, N) of C candidates for N clients, or class shares (N, K)."""
        ...

    def titles(self) -> Mapping[str, tuple[str, str]]: ...
