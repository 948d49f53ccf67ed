"""An attempt at a victim, and the best one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fl_privacy.attacks.auto.judgment import Judgment
from fl_privacy.types import Batch
from fl_privacy.types.film import Snapshot, joined

_EASED = 10.0
"""By which factor total variation is eased from one rung to the next, at most."""


@dataclass(frozen=True, eq=False)
class Attempt:
    """One contender's attempt at one victim.

    Attributes:
        member: number of the member among the contenders.
        start: number of the start.
        roughness: weight of total variation in the next rung, as a share of the loss of a zero gradient.
        labels: (B,) that belong to the images it starts from; ``None``: those of all attempts.
        held: whether it is held to features that are known.
        given: by which attack the images were found that it starts from; empty: by none.
        margin: by which the logarithm of ``widest`` has to fall for these images to be left.
        variables: (N,) where it is; ``None`` before the first rung.
        mismatch, widest, score: of :class:`fl_privacy.attacks.auto.judgment.Judgment`.
        history: of the member's own loss, one after the other of all rungs.
        film: as ``history``, where the victim is filmed.
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
        """Return the key that sorts attempts, the best first."""
        return self.score, self.member, self.start

    @property
    def left_below(self) -> float:
        """Return the mismatch of the widest tensor below which other images may replace the given ones."""
        return self.widest * math.exp(-self.margin)

    def judged(self, judged: Judgment, row: int) -> "Attempt":
        """Copy the attempt with its judgment written into ``row``."""
        mismatch, widest = float(judged.mismatch[row]), float(judged.widest[row])
        return replace(self, mismatch=mismatch, widest=widest, score=float(judged.score[row]))

    def after(
        self, variables: Tensor, judged: Judgment, row: int, losses: Tensor, film: Sequence[Snapshot]
    ) -> "Attempt":
        """Return what was found from it, in the ``row`` of ``judged``, or itself where that is no better.

        Images that equations of a layer gave are left only for others that suit the widest tensor better as well, by
        more than free pixels suit noise: where noise was added, a smoother guess that does not is none of theirs.
        """
        history = (*self.history, *losses[losses.isfinite()].tolist())
        roughness = min(self.roughness, max(self.roughness / _EASED, float(judged.balance[row])))
        tried = replace(self, history=history, roughness=roughness, film=joined(self.film, len(self.history), film))
        found = replace(tried.judged(judged, row), variables=variables, margin=0.0)
        worse = not found.score < self.score or (bool(self.given) and found.widest > self.left_below)
        return tried if self.variables is not None and worse else found


def ranked(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Sort attempts by their judgment, the best first.

    Behind images that were given stand others that suit the widest tensor worse, as in ``after``.
    """
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
