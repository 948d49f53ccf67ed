"""Membership inference by several methods over the same rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fl_privacy import checks
from fl_privacy.inference.kinds import About
from fl_privacy.inference.membership.fedmia import FedMIA, LossFedMIA
from fl_privacy.inference.membership.method import MembershipMethod, MethodOptions
from fl_privacy.inference.membership.shadows import ShadowModels
from fl_privacy.inference.membership.similarity import GradientCosine, GradientNormDifference, LossThreshold
from fl_privacy.inference.read_round import ReadRound

METHODS: dict[str, type[MembershipMethod]] = {
    "loss": LossThreshold,
    "cosine": GradientCosine,
    "fedmia": FedMIA,
    "fedmia_loss": LossFedMIA,
    "gradient_norm": GradientNormDifference,
    "lira": ShadowModels,
}


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Was an example among what a client trains on?

    Attributes:
        methods: which of ``METHODS`` are tried.
        members: so many of the clients' examples are asked about.
        others: and so many that no client has.
        shadows: models that `lira` trains in a round, each as a client does, on examples of the attacker's.
        shadow_rounds: the last so many of the rounds read are those.
    """

    about: ClassVar[About] = About.MEMBERSHIP
    methods: Sequence[str] = tuple(METHODS)
    members: int = 1000
    others: int = 1000
    shadows: int = 64
    shadow_rounds: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", tuple(dict.fromkeys(self.methods)))
        for name in self.methods:
            checks.one_of("inference.membership.methods", name, METHODS)
        for name in ("members", "others"):
            checks.whole(f"inference.membership.{name}", getattr(self, name), at_least=2, example=1000)
        checks.whole("inference.membership.shadows", self.shadows, at_least=4, at_most=100_000, example=64)
        checks.whole("inference.membership.shadow_rounds", self.shadow_rounds, at_least=1, example=1)

    def begin(self, candidates: int, clients: Sequence[int], classes: int) -> "MembershipWatch":
        """See :class:`fl_privacy.inference.Inference`."""
        options = MethodOptions(shadows=self.shadows, shadow_rounds=self.shadow_rounds)
        return MembershipWatch({name: METHODS[name](candidates, clients, options) for name in self.methods})


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
