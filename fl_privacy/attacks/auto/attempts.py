"""Attempts at a victim, and the best one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fl_privacy.attacks.auto.judgment import Judgment
from fl_privacy.types import Batch
from fl_privacy.types.film import Snapshot, joined

_EASED = 10.0
"""Largest factor by which total variation is eased from one rung to the next."""


@dataclass(frozen=True, eq=False)
class Attempt:
    """One contender's attempt at one victim.

    Attributes:
        roughness: weight of total variation in the next rung, as a share of a zero gradient's loss.
        labels: labels (B,) of its own; ``None``: the common ones.
        held: ``True`` if it is held to known features.
        given: attack that found its first images, or empty.
        margin: least fall of the logarithm of ``widest`` before these images are left.
        variables: (N,); ``None`` before the first rung.
        mismatch, widest, score: values of :class:`fl_privacy.attacks.auto.judgment.Judgment`.
        history: losses of all rungs.
    """

    member: int
    start: int
    roughness: float
    labels: Tensor | None = None
    held: bool = False
    given: str = ""
    margin: float = 0.0
    variables: Tensor | None = None
    mismatch: float = math.inf
    widest: float = math.inf
    score: float = math.inf
    history: tuple[float, ...] = ()
    film: tuple[Snapshot, ...] = ()

    @property
    def order(self) -> tuple[float, int, int]:
        return self.score, self.member, self.start

    @property
    def left_below(self) -> float:
        return self.widest * math.exp(-self.margin)

    def judged(self, judged: Judgment, row: int) -> "Attempt":
        mismatch, widest = float(judged.mismatch[row]), float(judged.widest[row])
        return replace(self, mismatch=mismatch, widest=widest, score=float(judged.score[row]))

    def after(
        self, variables: Tensor, judged: Judgment, row: int, losses: Tensor, film: Sequence[Snapshot]
    ) -> "Attempt":
        """Return the result in the ``row`` of ``judged``, or itself if that is no better.

        Images given by a layer's equations are left only if others suit the widest tensor better by more than noise.
        """
        history = (*self.history, *losses[losses.isfinite()].tolist())
        roughness = min(self.roughness, max(self.roughness / _EASED, float(judged.balance[row])))
        tried = replace(self, history=history, roughness=roughness, film=joined(self.film, len(self.history), film))
        found = replace(tried.judged(judged, row), variables=variables, margin=0.0)
        worse = not found.score < self.score or (bool(self.given) and found.widest > self.left_below)
        return tried if self.variables is not None and worse else found


def ranked(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Sort attempts, the best first; those that suit the widest tensor worse come after given images."""
    given = [attempt for attempt in attempts if attempt.given]
    known = min((attempt.widest for attempt in given), default=math.inf)
    below = min((attempt.left_below for attempt in given), default=math.inf)
    return sorted(attempts, key=lambda each: (each.widest > (known if each.given else below), *each.order))


@dataclass(frozen=True, eq=False)
class Winner:
    """The best attempt at a victim, as images and labels."""

    member: str
    batch: Batch
    mismatch: float
    history: tuple[float, ...]
    label_source: str
    countermeasures: tuple[str, ...]
    film: tuple[Snapshot, ...] = ()
