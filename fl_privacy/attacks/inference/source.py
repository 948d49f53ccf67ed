"""Infer whose an example is: the client whose model fits it best."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fl_privacy import checks
from fl_privacy.attacks.inference.kinds import About
from fl_privacy.attacks.inference.membership import MembershipWatch, cosines
from fl_privacy.attacks.inference.read_round import ReadRound
from fl_privacy.attacks.inference.shadow_models import MembershipMethod, MethodOptions


class LowestLoss(MembershipMethod):
    """Compares the loss at each client's model with the mean over those that replied, averaged over rounds."""

    title = "Lowest loss (SIA)"
    source = "Hu et al. 2021"

    def evidence(self, read: ReadRound) -> Tensor:
        losses = read.losses_after
        return losses.nanmean(1, keepdim=True) - losses


class LargestCosine(MembershipMethod):
    """Compares the cosine of the example's gradient and each client's update, averaged over rounds."""

    title = "Largest cosine"
    source = "Li et al. 2022"

    def evidence(self, read: ReadRound) -> Tensor:
        found = cosines(read)
        return found - found.nanmean(1, keepdim=True)


METHODS: dict[str, type[MembershipMethod]] = {"loss": LowestLoss, "cosine": LargestCosine}


@dataclass(frozen=True, kw_only=True)
class SourceInference:
    """Infers which client has an example (Hu et al. 2021, "Source inference attacks").

    Attributes:
        methods: ``loss`` is the paper's, ``cosine`` compares gradients.
        members: number of the clients' examples in question.
    """

    about: ClassVar[About] = About.SOURCE
    methods: Sequence[str] = tuple(METHODS)
    members: int = 1000

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", tuple(dict.fromkeys(self.methods)))
        for name in self.methods:
            checks.one_of("inference.source.methods", name, METHODS)
        checks.whole("inference.source.members", self.members, at_least=2, example=1000)

    def begin(self, candidates: int, clients: Sequence[int], classes: int) -> MembershipWatch:
        return MembershipWatch({name: METHODS[name](candidates, clients, MethodOptions()) for name in self.methods})
