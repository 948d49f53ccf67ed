"""Without a member's gradient, the update of its client is shorter."""

from torch import Tensor

from fl_privacy.inference.membership.method import MembershipMethod
from fl_privacy.inference.read_round import ReadRound


class GradientNormDifference(MembershipMethod):
    """Squared norm of the client's mean gradient minus that without the example's, 2 <u, g> - |g|^2.

    Gradients of members are short (Nasr et al. 2019) and lie along the update (Li et al. 2022, eq. 4).
    """

    title = "Gradient norm difference"
    source = "Nasr et al. 2019; Li et al. 2022"

    def evidence(self, read: ReadRound) -> Tensor:
        return 2 * read.products - read.squares
