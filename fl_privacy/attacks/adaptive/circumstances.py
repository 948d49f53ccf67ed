"""What an attack does and sees, as far as measures against a defense depend on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fl_privacy.attacks.gradient_inversion.labels import output_layer
from fl_privacy.attacks.gradient_inversion.priors import TotalVariation
from fl_privacy.types import LocalPlan, Observation

if TYPE_CHECKING:
    from fl_privacy.attacks.gradient_inversion.attack import GradientInversion


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The circumstances of an attack.

    Attributes:
        head: weight of the output layer, if there is one.
        batch_size: examples behind the update.
        plan: of the clients.
        unrolls: whether local steps are replayed.
        scales: whether the objective sees how large the whole gradient is.
        complete: whether every parameter is matched.
        smooths: whether the attack prefers smooth images anyway.
        learnable: weights of the linear layers into whose input unknown gradients can be guessed.
    """

    head: str | None
    batch_size: int
    plan: LocalPlan
    unrolls: bool
    scales: bool
    complete: bool
    smooths: bool
    learnable: Sequence[str]

    @classmethod
    def of(
        cls,
        observation: Observation,
        attack: "GradientInversion",
        names: Sequence[str],
        *,
        unrolls: bool,
        learnable: Sequence[str],
    ) -> "Scene":
        """The scene of ``attack`` on ``observation``, in which it matches the tensors ``names``."""
        layer = output_layer(observation.model, observation.num_classes)
        return cls(
            head=layer[0] if layer else None,
            batch_size=observation.upload.num_examples,
            plan=observation.plan,
            unrolls=unrolls,
            scales=attack.objective.elementwise,
            complete=set(names) == set(observation.sent.parameters),
            smooths=any(isinstance(prior, TotalVariation) for prior in attack.priors),
            learnable=learnable,
        )
