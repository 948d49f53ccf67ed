"""Gradient inversion: find inputs whose gradient is the one observed, for many victims at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from fl_privacy.attacks.attack import Progress, no_progress
from fl_privacy.attacks.gradient_inversion.compile import Compile, check_compiler
from fl_privacy.attacks.gradient_inversion.grouping import Group, group_victims
from fl_privacy.attacks.gradient_inversion.initialization import Normal, Start
from fl_privacy.attacks.gradient_inversion.objectives import L2, Objective
from fl_privacy.attacks.gradient_inversion.prepare import NotAttackableError, Workload
from fl_privacy.attacks.gradient_inversion.priors import Prior
from fl_privacy.attacks.gradient_inversion.restarts import attack_members
from fl_privacy.attacks.gradient_inversion.rounds import victims_of
from fl_privacy.attacks.gradient_inversion.space import Projection, Space
from fl_privacy.attacks.gradient_inversion.targets import LocalSteps
from fl_privacy.attacks.gradient_inversion.validation import failure
from fl_privacy.attacks.optimizers import LBFGS, Optimizer
from fl_privacy.errors import UserError
from fl_privacy.types import Observation, Reconstruction

LabelPolicy = Literal["auto", "known", "infer", "optimize"]
"""``known``: those the attacker was told; ``infer``: from the output layer's gradient; ``optimize``: jointly with the
images; ``auto``: those told, else inferred."""


@dataclass(frozen=True, kw_only=True)
class GradientInversion:
    """Minimize ``objective(gradient(guess), observed) + priors(guess)`` over the guess of each victim.

    Victims that share model, values sent, plan and shapes are attacked together; each keeps to itself and draws from
    ``derive_generator(seed, "attack", observation.id, restart)``. What it draws, when it ends and which attempt is
    taken depend on nothing but its own numbers. Those do depend on the company in their last bits, since products of
    several victims at once add up in other orders than those of one: nearly the same results where a step follows
    from few digits, others of the same kind where rounding errors grow from step to step, as in dozens of moves of
    L-BFGS or where the sign of a gradient decides. With ``most_victims=1`` each victim is computed alone, and its
    result does not depend on the company, to the last bit. The same call with as many CPU threads ends in the same
    bits.
    An update of several local steps is matched by replaying them.

    Attributes:
        objective: distance of gradients.
        optimizer: of the guesses.
        labels: where they come from.
        priors: terms added to the objective.
        start: the first guess.
        space: in which pixels are optimized.
        projection: brings the images back to [0, 1] after each iteration.
        iterations: of the optimizer.
        restarts: most attempts from different starts. The first that ends below ``accept`` is taken, else the one with
            the least loss.
        enough: a victim has finished when its loss is below this share of the loss of a zero gradient (with ``L2``:
            of the observed gradient's squared norm), which makes it independent of how large gradients are.
        accept: such a share as well; a victim below is not attacked again.
        noise: standard deviation of Gaussian noise on the pixels' gradient.
        local_steps: how several local steps are matched.
        compile: whether the computation is compiled; see :data:`fl_privacy.attacks.gradient_inversion.compile.Compile`.
        dtype: of the computation, ``float32`` or ``float64``.
        device: of the computation; that of the values sent if ``None``.
        most_victims: in one chunk; found from the free memory if ``None``.
    """

    objective: Objective = field(default_factory=L2)
    optimizer: Optimizer = field(default_factory=LBFGS)
    labels: LabelPolicy = "auto"
    priors: tuple[Prior, ...] = ()
    start: Start = field(default_factory=Normal)
    space: Space = field(default_factory=Space)
    projection: Projection = "none"
    iterations: int = 300
    restarts: int = 1
    enough: float = 0.0
    accept: float = 0.0
    noise: float = 0.0
    local_steps: LocalSteps = "unroll"
    compile: Compile = "auto"
    dtype: Literal["float32", "float64"] = "float32"
    device: str | None = None
    most_victims: int | None = None

    def __post_init__(self) -> None:
        for name in ("iterations", "restarts"):
            if getattr(self, name) < 1:
                raise UserError(f"attack.{name} is expected to be at least 1, but got {getattr(self, name)}.")
        for name, allowed in (
            ("labels", ("auto", "known", "infer", "optimize")),
            ("projection", ("none", "clamp", "minmax")),
            ("local_steps", ("unroll", "first_order")),
            ("compile", ("auto", "on", "off")),
            ("dtype", ("float32", "float64")),
        ):
            if getattr(self, name) not in allowed:
                raise UserError(
                    f"attack.{name} is expected to be one of {', '.join(allowed)}, but got {getattr(self, name)!r}."
                )

        if self.compile == "on":
            check_compiler()

    def __call__(
        self, observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
    ) -> list[Reconstruction]:
        """Attack all ``observations``; see :class:`fl_privacy.attacks.attack.ReconstructionAttack`."""
        results: dict[int, Reconstruction] = {}
        sound = []
        for position, observation in enumerate(observations):
            wrong = failure(observation)
            if wrong is None:
                sound.append((position, observation))
            else:
                results[position] = Reconstruction(id=observation.id, batch=None, failure=wrong)
        victims = victims_of(sound)
        total = 1000 * len(victims)
        done = 0
        for group in group_victims(victims):
            meter = _Meter(progress, done, 1000 * len(group.members), total)
            results |= self._attack(group, seed, meter)
            done = meter.end()
        for victim in victims:
            for position in victim.positions:
                results[position] = replace(results[victim.position], id=observations[position].id)
        return [results[position] for position in range(len(observations))]

    def _attack(self, group: Group, seed: int, meter: "_Meter") -> dict[int, Reconstruction]:
        try:
            workload = Workload(self, group, seed)
        except NotAttackableError as reason:
            return {p: Reconstruction(id=o.id, batch=None, failure=str(reason)) for p, o in group.members}
        ids = {position: observation.id for position, observation in group.members}
        results = {p: Reconstruction(id=ids[p], batch=None, failure=why) for p, why in workload.failures.items()}
        if workload.members:
            results |= attack_members(self, workload, meter)
        return results


class _Meter:
    """Progress of one group within the whole."""

    def __init__(self, progress: Progress, before: int, size: int, total: int) -> None:
        self._progress, self._before, self._size, self._total = progress, before, size, total

    def __call__(self, share: float) -> None:
        self._progress(self._before + int(share * self._size), self._total)

    def end(self) -> int:
        self(1.0)
        return self._before + self._size
