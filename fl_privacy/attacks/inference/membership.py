"""Infer membership by several methods over the same rounds; other clients' updates serve as non-members."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fl_privacy import checks
from fl_privacy.attacks.inference.final_model import (
    BY_REFERENCES,
    ByReferences,
    FinalLoss,
    FinalLowestTokens,
    FinalReference,
    by_references,
    ratio_to_others,
)
from fl_privacy.attacks.inference.kinds import About
from fl_privacy.attacks.inference.read_round import ReadRound, lowest_of
from fl_privacy.attacks.inference.shadow_models import MembershipMethod, MethodOptions, ShadowModels, averaged
from fl_privacy.errors import UserError


def cosines(read: ReadRound) -> Tensor:
    """Return the cosine (C, K) of each of C candidates' gradient and each of K clients' update."""
    products, squares = read.products
    norms = torch.tensor([sum(float(t.double().square().sum()) for t in d.values()) for d in read.directions])
    return products / (squares * norms.to(squares)).sqrt().clamp(min=1e-30)


OTHERS = 2  # least number of other clients for an estimate of their spread


def share_below_others(values: Tensor) -> Tensor:
    """Return the probability (C, K) that each value exceeds another client's, if the other clients' are normal.

    It is NaN if fewer than two other values are finite. For statistics that are higher for members, this is a one-sided
    likelihood ratio of a client against the others (Zhu et al. 2024, "FedMIA", Sec. 4).
    """
    finite = values.isfinite()
    known, number = values.double().where(finite, 0.0), finite.sum(1, keepdim=True)
    centered = (known - known.sum(1, keepdim=True) / number).where(finite, 0.0)
    others = (number - 1).double()
    mean = -centered / others  # mean of the others, since all together are centered
    variance = (centered.square().sum(1, keepdim=True) - centered.square() - others * mean.square()) / (others - 1)
    z = (centered - mean) / variance.clamp(min=1e-30).sqrt()
    return (0.5 * torch.erfc(-z / math.sqrt(2))).where(finite & (others >= OTHERS), torch.nan)


def norm_difference(read: ReadRound) -> Tensor:
    """Return a membership score (C, K) of C candidates for K clients: |u|^2 - |u - g|^2 = 2 <u, g> - |g|^2.

    u is a client's update, g an example's gradient. Members score higher: their gradients are short (Nasr et al. 2019)
    and lie along the update (Li et al. 2022, eq. 4).
    """
    products, squares = read.products
    return 2 * products - squares


METHODS: dict[str, type[MembershipMethod]] = {
    "loss": averaged("Loss threshold", "Yeom et al. 2018", lambda read: -read.losses_after),  # Adversary 2
    "cosine": averaged("Gradient cosine", "Li et al. 2022", cosines),  # Sec. 4
    "fedmia": averaged("FedMIA, cosine", "Zhu et al. 2024", lambda read: share_below_others(cosines(read))),
    "fedmia_loss": averaged("FedMIA, loss", "Zhu et al. 2024", lambda read: share_below_others(-read.losses_after)),
    "gradient_norm": averaged("Gradient norm difference", "Nasr et al. 2019; Li et al. 2022", norm_difference),
    "lira": ShadowModels,
    "min_k": averaged(
        "Least likely tokens (Min-K%)", "Shi et al. 2024", lambda read: read.after_each(lowest_of), tokens=True
    ),
    "final_loss": FinalLoss,
    "final_reference": FinalReference,
    "final_min_k": FinalLowestTokens,
    "rmia": averaged("RMIA, other clients' models", "Zarifzadeh et al. 2024", ratio_to_others),
    **{f"{models}_{name}": by_references(models, name) for models in ("final", "rounds") for name in BY_REFERENCES},
}
BY_DEFAULT = tuple(name for name, method in METHODS.items() if name != "rmia" and not issubclass(method, ByReferences))


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Attack that infers whether an example was among a client's training data.

    Attributes:
        methods: names from ``METHODS``; ``min_k`` and ``final_min_k`` only for next-token prediction.
        members: number of tested examples that belong to clients.
        others: number of tested examples that belong to no client.
        shadows: number of shadow models that ``lira`` trains in each round, in the same way as a client.
        shadow_rounds: number of rounds with shadow models, the last ones of the training.
        references: number of reference models, each from a simulated federated training on the attacker's examples.
            Methods such as ``final_rmia`` and ``rounds_rmia`` need them, ``final_stacked`` and ``rounds_stacked`` at
            least two.
    """

    about: ClassVar[About] = About.MEMBERSHIP
    methods: Sequence[str] = BY_DEFAULT
    members: int = 1000
    others: int = 1000
    shadows: int = 64
    shadow_rounds: int = 1
    references: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", tuple(dict.fromkeys(self.methods)))
        for name in self.methods:
            checks.one_of("inference.membership.methods", name, METHODS)
        for name in ("members", "others"):
            checks.whole(f"inference.membership.{name}", getattr(self, name), at_least=2, example=1000)
        checks.whole("inference.membership.shadows", self.shadows, at_least=4, at_most=100_000, example=64)
        checks.whole("inference.membership.shadow_rounds", self.shadow_rounds, at_least=1, example=1)
        checks.whole("inference.membership.references", self.references, at_least=1, at_most=256, example=2)

    def begin(self, candidates: int, clients: Sequence[int], classes: int) -> "MembershipWatch":
        options = MethodOptions(shadows=self.shadows, shadow_rounds=self.shadow_rounds, references=self.references)
        return MembershipWatch({name: METHODS[name](candidates, clients, options) for name in self.methods})


@dataclass(frozen=True, eq=False)
class MembershipWatch:
    """Observer that passes each round to several membership methods, by name."""

    methods: dict[str, MembershipMethod]

    def add(self, read: ReadRound) -> None:
        """Add a round; raise ``UserError`` if all methods need next tokens, but the model predicts none."""
        labels = read.candidates.labels
        words = labels.dim() > 1 and not labels.is_floating_point()
        for name in [name for name, method in self.methods.items() if method.of_tokens and not words]:
            del self.methods[name]
        if not self.methods:
            raise UserError(
                "inference.membership.methods are expected to suit the data, but got those of next tokens, and"
                " none is predicted; set data.target=next_token, or name others."
            )
        for method in self.methods.values():
            method.add(read)

    def answers(self) -> dict[str, Tensor]:
        return {name: method.scores() for name, method in self.methods.items()}

    def titles(self) -> dict[str, tuple[str, str]]:
        return {name: (method.title, method.source) for name, method in self.methods.items()}
