"""Which canaries took part? They are inserted to be found: what finds them bounds epsilon from below."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NoReturn

from fl_privacy import checks
from fl_privacy.attacks.inference.kinds import About
from fl_privacy.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Canaries:
    """Canaries of a run: how many there are, and what each of them is.

    Attributes:
        number: m; each takes part with probability 1/2, independently.
        unit: ``client``, an update of the clipping norm that passes the defense of the upload in each round;
            ``example``, a gradient of the clipping norm that a client's local steps sample as they sample examples;
            ``auto`` takes what the defense promises to protect.
    """

    about: ClassVar[About] = About.CANARIES
    number: int = 500
    unit: Literal["auto", "client", "example"] = "auto"

    def __post_init__(self) -> None:
        checks.whole("inference.canaries.number", self.number, at_least=20, at_most=100_000, example=500)
        checks.one_of("inference.canaries.unit", self.unit, ("auto", "client", "example"))

    def begin(self, candidates: int, clients: Sequence[int], classes: int) -> NoReturn:
        """Refuse: canaries are no examples that are asked about; a run inserts them by itself.

        Raises:
            UserError: always.
        """
        raise UserError(
            "inference=canaries is expected of fl-privacy run, which inserts them, but something else asked for them;"
            " choose another inference here."
        )
