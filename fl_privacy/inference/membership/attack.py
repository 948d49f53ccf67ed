"""Membership inference by several methods over the same rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fl_privacy import checks
from fl_privacy.inference.kinds import About
from fl_privacy.inference.membership.cosine import GradientCosine
from fl_privacy.inference.membership.fedmia import FedMIA, LossFedMIA
from fl_privacy.inference.membership.gradient_norm import GradientNormDifference
from fl_privacy.inference.membership.loss import LossThreshold
from fl_privacy.inference.membership.method import MembershipMethod
from fl_privacy.inference.read_round import ReadRound

METHODS: dict[str, type[MembershipMethod]] = {
    "loss": LossThreshold,
    "cosine": GradientCosine,
    "fedmia": FedMIA,
    "fedmia_loss": LossFedMIA,
    "gradient_norm": GradientNormDifference,
}


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Was an example among what a client trains on?

    Attributes:
        methods: which of ``METHODS`` are tried.
        members: so many of the clients' examples are asked about.
        others: and so many that no client has.
    """

    about: ClassVar[About] = About.MEMBERSHIP
    methods: Sequence[str] = tuple(METHODS)
    members: int = 1000
    others: int = 1000

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", tuple(dict.fromkeys(self.methods)))
        for name in self.methods:
            checks.one_of("inference.membership.methods", name, METHODS)
        for name in ("members", "others"):
            checks.whole(f"inference.membership.{name}", getattr(self, name), at_least=2, example=1000)

    def begin(self, candidates: int, clients: Sequence[int], classes: int) -> "MembershipWatch":
        """See :class:`fl_privacy.inference.Inference`."""
        return MembershipWatch({name: METHODS[name](candidates, clients) for name in self.methods})


@dataclass(frozen=True, eq=False)
class MembershipWatch:
    """Methods that look at the same rounds."""

    methods: dict[str, MembershipMethod]

    def add(self, read: ReadRound) -> None:
        """Take in what was read in a round."""
        for method in self.methods.values():
            method.add(read)

    def answers(self) -> dict[str, Tensor]:
        """(C, N) of each method, higher for members."""
        return {name: method.scores() for name, method in self.methods.items()}

    def titles(self) -> dict[str, tuple[str, str]]:
        """Title and source of each method."""
        return {name: (method.title, method.source) for name, method in self.methods.items()}
