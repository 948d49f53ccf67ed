"""Members have a low loss under the model that their client made."""

from torch import Tensor

from fl_privacy.inference.membership.method import MembershipMethod
from fl_privacy.inference.read_round import ReadRound


class LossThreshold(MembershipMethod):
    """The loss at the client's model, averaged over rounds (Yeom et al. 2018, Adversary 2)."""

    title = "Loss threshold"
    source = "Yeom et al. 2018"

    def evidence(self, read: ReadRound) -> Tensor:
        return -read.losses_after
