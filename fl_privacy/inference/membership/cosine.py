"""The update of a client points along the gradients of the examples that it is made of."""

from torch import Tensor

from fl_privacy.inference.membership.method import MembershipMethod
from fl_privacy.inference.read_round import ReadRound


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
