"""The privacy score: how soon an attacker's gradient turns to that of the transformed image."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_privacy import checks
from fl_privacy.errors import UserError
from fl_privacy.policy_search.similarity import Cosine, GradientSimilarity
from fl_privacy.rng import derive_generator
from fl_privacy.transformations import Policy, transform
from fl_privacy.types import Batch

Rule = Literal["left", "trapezoid"]
"""How the curve of similarities is integrated."""


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """How privacy is scored (Gao et al. 2023, Eq. 11); the defaults are the paper's.

    Attributes:
        points: K, at which the gradients are compared on the way to the transformed image.
        rule: ``left`` is the mean over j / K, j = 0 .. K - 1; ``trapezoid`` has its points on 0 .. 1 with both ends.
        cosine: of which gradient.
        alpha: weight of the mean of the areas below the curve.
        beta: weight of their variance.
    """

    points: int = 20
    rule: Rule = "left"
    cosine: Cosine = "whole"
    alpha: float = 0.7
    beta: float = 0.3

    def __post_init__(self) -> None:
        least = 1 if self.rule == "left" else 2
        checks.whole("points", self.points, at_least=least, example="the paper's code has 21")

    @classmethod
    def named(
        cls, variant: Literal["paper", "code"], *, points: int | None = None, alpha: float = 0.7, beta: float = 0.3
    ) -> "PrivacyPlan":
        """As in the paper, or as in its authors' code: 21 points, trapezoids, mean of the tensors' cosines."""
        if variant == "paper":
            return cls(points=20 if points is None else points, alpha=alpha, beta=beta)
        if variant == "code":
            return cls(
                points=21 if points is None else points, rule="trapezoid", cosine="layers", alpha=alpha, beta=beta
            )
        raise UserError(f"variant is expected to be paper or code, but got {variant!r}.")

    def shares(self) -> Tensor:
        """(K,) of the transformed image in each point."""
        if self.rule == "left":
            return torch.arange(self.points, dtype=torch.float64) / self.points
        return torch.linspace(0, 1, self.points, dtype=torch.float64)

    def area(self, similarities: Tensor) -> Tensor:
        """(S,) from (S, K)."""
        if self.rule == "left":
            return similarities.mean(1)
        return torch.trapezoid(similarities, dx=1 / (self.points - 1), dim=1)


@dataclass(frozen=True, kw_only=True)
class PrivacyScore:
    """Of one policy; lower is better for the client.

    Attributes:
        score: S_pri.
        mean: of the areas below the curve, over the images.
        variance: of the same.
    """

    score: float
    mean: float
    variance: float


def privacy_scores(
    similarity: GradientSimilarity, batch: Batch, policies: Sequence[Policy], *, plan: PrivacyPlan, seed: int
) -> list[PrivacyScore]:
    """S_pri of each of ``policies``; the company changes no score beyond rounding.

    Args:
        similarity: at the semi-trained model.
        batch: images of all classes, (S, C, H, W) in [0, 1].
        policies: scored in one batch.
        plan: how.
        seed: of the noise that attacks start from, the same for every policy, and of the policies' signs.
    """
    start = torch.rand(batch.inputs.shape, generator=derive_generator(seed, "search", "start")).to(batch.inputs)
    goals = torch.stack([transformed_by(batch.inputs, policy, seed) for policy in policies])
    products = similarity(start, goals.flatten(0, 1), batch.labels.repeat(len(policies)), plan.shares())
    areas = plan.area(products.cosine(plan.cosine).double()).view(len(policies), -1)
    means, variances = areas.mean(1), areas.var(1, correction=0)
    scores = plan.alpha * means + plan.beta * variances
    rows = zip(scores.tolist(), means.tolist(), variances.tolist(), strict=True)
    return [PrivacyScore(score=score, mean=mean, variance=variance) for score, mean, variance in rows]


def transformed_by(images: Tensor, policy: Policy, seed: int) -> Tensor:
    """``images`` by ``policy``, with signs from a stream of its own."""
    return transform(images, [policy], derive_generator(seed, "search", "policy", str(policy)))
