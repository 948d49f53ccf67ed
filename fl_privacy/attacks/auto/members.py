"""The descents that ``attack=auto`` chooses from: published ones and what improves on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from fl_privacy.attacks.gradient_inversion import GradientInversion, LabelPolicy
from fl_privacy.attacks.gradient_inversion.initialization import PublicMean, Uniform
from fl_privacy.attacks.gradient_inversion.labels import output_layer
from fl_privacy.attacks.gradient_inversion.objectives import L2, Cosine
from fl_privacy.attacks.gradient_inversion.priors import BatchNormStatistics
from fl_privacy.attacks.optimizers import LBFGS, Adam, StepDecay
from fl_privacy.attacks.presets import inverting_gradients
from fl_privacy.types import Observation

_MOVES = 20
"""Of an iteration of L-BFGS."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """A descent, whose attempts are told apart by nothing but where they start.

    Attributes:
        name: as records and pages show it.
        attack: without total variation, which ``roughness`` says.
        evaluations: of the loss in one iteration, at most.
        roughness: weight of total variation in the first rung, as a share of the loss of a zero gradient; it is eased
            from rung to rung as far as the update is fitted.
        lower: factor on the learning rate after the first rung, which starts from an image and not from noise.
    """

    name: str
    attack: GradientInversion
    evaluations: int = 1
    roughness: float = 1e-3
    lower: float = 1.0

    def settings(self, evaluations: int, *, first: bool) -> GradientInversion:
        """For a rung of so many evaluations."""
        optimizer, iterations = self.attack.optimizer, max(1, evaluations // self.evaluations)
        if isinstance(optimizer, Adam) and not first:
            optimizer = replace(optimizer, lr=self.lower * optimizer.lr)
        return replace(self.attack, optimizer=optimizer, iterations=iterations)


def attempts_at(
    observation: Observation, most: int, placed: Callable[[GradientInversion], GradientInversion]
) -> list[tuple[Contender, int]]:
    """At most so many pairs of a member and the number of its start, those first that read most alone.

    Args:
        observation: of a victim.
        most: attempts, at least 1.
        placed: an attack on the device and in the dtype that are asked for.
    """
    members = [replace(member, attack=placed(member.attack)) for member in _members(observation)]
    curved, signed, smooth, squared, usual = members
    chosen = [(curved, 0), (signed, 0), (smooth, 0), (squared, 0)]
    if _shares_statistics(observation):
        chosen.insert(1, (usual, 0))
    chosen += [(curved, 1), (curved, 2), (signed, 1)]
    chosen += [(member, start) for start in range(3, most) for member in (curved, signed, squared)]
    return chosen[:most]


def _members(observation: Observation) -> Sequence[Contender]:
    start = Uniform() if observation.knowledge.public_images is None else PublicMean()
    base = replace(
        inverting_gradients(),
        priors=(),
        start=start,
        labels=_labels(observation),
        compile="off",
    )
    lbfgs = LBFGS(inner=_MOVES, line_search="strong_wolfe", tolerance_grad=0.0, tolerance_change=0.0)
    quasi_newton = replace(base, optimizer=lbfgs, projection="none")
    adam = replace(base, optimizer=Adam(lr=0.1, sign="hard", schedule=StepDecay()))
    per_iteration = _MOVES * 5 // 4
    return (
        Contender(
            name="cosine by L-BFGS",
            attack=replace(quasi_newton, objective=Cosine()),
            evaluations=per_iteration,
        ),
        Contender(name="cosine by signed Adam", attack=adam, lower=0.3),
        Contender(name="cosine by signed Adam, smooth", attack=adam, roughness=4e-2, lower=0.3),
        Contender(
            name="L2 by L-BFGS",
            attack=replace(quasi_newton, objective=L2(relative=True)),
            evaluations=per_iteration,
        ),
        Contender(
            name="cosine and batch-norm statistics by signed Adam",
            attack=replace(adam, priors=(BatchNormStatistics(weight=1e-3),)),
            lower=0.3,
        ),
    )


def _labels(observation: Observation) -> LabelPolicy:
    """Optimized with the images where nothing tells them."""
    layer = output_layer(observation.model, observation.num_classes)
    seen = layer is not None and any(name in observation.upload.tensors for name in layer if name)
    return "auto" if seen or observation.knowledge.labels is not None else "optimize"


def _shares_statistics(observation: Observation) -> bool:
    """Whether running statistics of batch norm were sent, of a model that has learned some."""
    layers = [m for m in observation.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    return any(layer.track_running_stats for layer in layers) and any(
        name.endswith("running_mean") and bool(value.any()) for name, value in observation.sent.buffers.items()
    )
