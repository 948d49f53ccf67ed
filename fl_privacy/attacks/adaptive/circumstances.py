"""What an attack does and sees, as far as countermeasures against a defense depend on it."""

from collections.abc import Sequence
from dataclasses import dataclass

from fl_privacy.types import LocalPlan


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """The circumstances of an attack.

    Attributes:
        head: weight of the output layer, if there is one.
        batch_size: examples behind the update.
        plan: of the clients.
        unrolls: whether local steps are replayed.
        matched_per_uploaded: how much larger what is matched is than what was uploaded.
        scales: whether the objective sees how large the whole gradient is.
        complete: whether every parameter is matched.
        smooths: whether the attack prefers smooth images anyway.
        learnable: weights of the linear layers into whose input unknown gradients can be guessed.
    """

    head: str | None
    batch_size: int
    plan: LocalPlan
    unrolls: bool
    matched_per_uploaded: float
    scales: bool
    complete: bool
    smooths: bool
    learnable: Sequence[str]
