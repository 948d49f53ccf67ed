"""Methods that ask how well an example fits a client's update: by its loss, its gradient's length and direction."""

from torch import Tensor

from fl_privacy.inference.membership.method import MembershipMethod
from fl_privacy.inference.read_round import ReadRound


class LossThreshold(MembershipMethod):
    """The loss at the client's model, averaged over rounds (Yeom et al. 2018, Adversary 2)."""

    title = "Loss threshold"
    source = "Yeom et al. 2018"

    def evidence(self, read: ReadRound) -> Tensor:
        return -read.losses_after


class GradientNormDifference(MembershipMethod):
    """Squared norm of the client's mean gradient minus that without the example's, 2 <u, g> - |g|^2.

    Gradients of members are short (Nasr et al. 2019) and lie along the update (Li et al. 2022, eq. 4).
    """

    title = "Gradient norm difference"
    source = "Nasr et al. 2019; Li et al. 2022"

    def evidence(self, read: ReadRound) -> Tensor:
        return 2 * read.products - read.squares


class GradientCosine(MembershipMethod):
    """Cosine of the example's gradient and the client's update, averaged over rounds.

    Li et al. 2022, "Effective passive membership inference attacks in federated learning against overparameterized
    models", Sec. 4.
    """

    title = "Gradient cosine"
    source = "Li et al. 2022"

    def evidence(self, read: ReadRound) -> Tensor:
        return cosines(read)


def cosines(read: ReadRound) -> Tensor:
    """(C, K) of the candidates' gradients and the clients' updates."""
    norms = (read.squares * read.update_squares.to(read.squares)).sqrt()
    return read.products / norms.clamp(min=1e-30)
