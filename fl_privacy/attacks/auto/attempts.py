"""An attempt at a victim, from rung to rung of successive halving."""

import math
from dataclasses import dataclass, replace

from torch import Tensor

from fl_privacy.attacks.auto.judgment import Judgment
from fl_privacy.attacks.gradient_inversion.preparation import Member as PreparedVictim
from fl_privacy.types import Batch

_EASED = 10.0
"""By which factor total variation is eased from one rung to the next, at most."""


@dataclass(frozen=True, eq=False)
class Attempt:
    """At a victim.

    Attributes:
        member: number of the member among the contenders.
        start: number of the start.
        roughness: weight of total variation in the next rung, as a share of the loss of a zero gradient.
        labels: (B,) that belong to the images it starts from; ``None``: those of all attempts.
        held: whether it is held to features that are known.
        variables: (N,) where it is; ``None`` before the first rung.
        mismatch, score: of :class:`fl_privacy.attacks.auto.judgment.Judgment`.
        history: of the member's own loss, one after the other of all rungs.
    """

    member: int
    start: int
    roughness: float
    labels: Tensor | None = None
    held: bool = False
    variables: Tensor | None = None
    mismatch: float = math.inf
    score: float = math.inf
    history: tuple[float, ...] = ()

    @property
    def order(self) -> tuple[float, int, int]:
        """The least is the best."""
        return self.score, self.member, self.start


@dataclass(frozen=True, eq=False)
class Winner:
    """The best attempt at a victim, as images and labels."""

    member: str
    batch: Batch
    mismatch: float
    history: tuple[float, ...]
    label_source: str
    countermeasures: tuple[str, ...]


def relabeled(victim: PreparedVictim, attempt: Attempt) -> PreparedVictim:
    """``victim`` with the labels of ``attempt``, where it has its own."""
    if attempt.labels is None or victim.labels is None:
        return victim
    return replace(victim, labels=attempt.labels.to(victim.labels.device))


def after_rung(before: Attempt, variables: Tensor, judged: Judgment, row: int, losses: Tensor) -> Attempt:
    """What was found from ``before``, or that itself where it is no better."""
    history = (*before.history, *losses[losses.isfinite()].tolist())
    mismatch, score = float(judged.mismatch[row]), float(judged.score[row])
    roughness = min(before.roughness, max(before.roughness / _EASED, float(judged.balance[row])))
    if before.variables is not None and not score < before.score:
        return replace(before, history=history, roughness=roughness)
    return replace(before, variables=variables, mismatch=mismatch, score=score, history=history, roughness=roughness)
