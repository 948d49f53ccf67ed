"""Settings of canaries, which a run inserts to bound epsilon from below by their detection."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NoReturn

from fl_privacy import checks
from fl_privacy.attacks.inference.kinds import About
from fl_privacy.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Canaries:
    """Number and kind of a run's canaries.

    Attributes:
        number: m; each takes part with probability 1/2, independently.
        unit: ``client``, an update of the clipping norm that passes the upload's defense in each round; ``example``, a
            gradient of the clipping norm, sampled in local steps like an example; ``auto``, the unit that the defense
            protects.
    """

    about: ClassVar[About] = About.CANARIES
    number: int = 500
    unit: Literal["auto", "client", "example"] = "auto"

    def __post_init__(self) -> None:
        checks.whole("inference.canaries.number", self.number, at_least=20, at_most=100_000, example=500)
        checks.one_of("inference.canaries.unit", self.unit, ("auto", "client", "example"))

    def begin(self, candidates: int, clients: Sequence[int], classes: int) -> NoReturn:
        """Refuse, since a run inserts canaries by itself.

        Raises:
            UserError: always.
        """
        raise UserError(
            "inference=canaries is expected of fl-privacy run, which inserts them, but something else asked for them;"
            " choose another inference here."
        )
