"""All clients for one: what the others' updates say of an example is what a non-member looks like."""

import math

import torch
from torch import Tensor

from fl_privacy.inference.membership.method import MembershipMethod
from fl_privacy.inference.membership.similarity import cosines
from fl_privacy.inference.read_round import ReadRound

OTHERS = 2
"""Clients beside the one asked about whose spread can be told."""


class FedMIA(MembershipMethod):
    """One-sided likelihood ratio of a client against the others (Zhu et al. 2024, "FedMIA", Sec. 4).

    In each round the statistics of the other clients' updates are taken for a normal distribution, that of a client
    without the example; the score is the share of it below the statistic of the client asked about, averaged over
    rounds. This one compares cosines of gradients. In a round with fewer than three clients there is no evidence.
    """

    title = "FedMIA, cosine"
    source = "Zhu et al. 2024"

    def evidence(self, read: ReadRound) -> Tensor:
        return share_below_others(self.statistic(read))

    def statistic(self, read: ReadRound) -> Tensor:
        """(C, K) that is higher for members."""
        return cosines(read)


class LossFedMIA(FedMIA):
    """Likewise, comparing losses at the clients' models."""

    title = "FedMIA, loss"

    def statistic(self, read: ReadRound) -> Tensor:
        return -read.losses_after


def share_below_others(values: Tensor) -> Tensor:
    """(C, K) normal probability, by mean and deviation of the other columns, of being below each value.

    Columns that are not finite count as nobody's; NaN where fewer than two others are left.
    """
    finite = values.isfinite()
    known, number = values.double().where(finite, 0.0), finite.sum(1, keepdim=True)
    centered = (known - known.sum(1, keepdim=True) / number).where(finite, 0.0)
    others = (number - 1).double()
    mean = -centered / others  # of the others, as all together are centered
    variance = (centered.square().sum(1, keepdim=True) - centered.square() - others * mean.square()) / (others - 1)
    z = (centered - mean) / variance.clamp(min=1e-30).sqrt()
    share = 0.5 * torch.erfc(-z / math.sqrt(2))
    return share.where(finite & (others >= OTHERS), torch.nan)
