"""Gradient inversion: find inputs whose gradient is the one observed, for many victims at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fl_privacy.attacks.attack import Progress, no_progress
from fl_privacy.attacks.gradient_inversion.compile import check_compiler
from fl_privacy.attacks.gradient_inversion.grouping import Group, NotAttackableError, failure, group_victims, victims_of
from fl_privacy.attacks.gradient_inversion.prepare import prepare
from fl_privacy.attacks.gradient_inversion.restarts import attack_members
from fl_privacy.attacks.gradient_inversion.settings import Settings
from fl_privacy.types import Observation, Reconstruction


@dataclass(frozen=True, kw_only=True)
class GradientInversion(Settings):
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
    """

    def __post_init__(self) -> None:
        super().__post_init__()
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
            prepared = prepare(self, group, seed)
        except NotAttackableError as reason:
            return {p: Reconstruction(id=o.id, batch=None, failure=str(reason)) for p, o in group.members}
        ids = {position: observation.id for position, observation in group.members}
        results = {p: Reconstruction(id=ids[p], batch=None, failure=why) for p, why in prepared.failures.items()}
        if prepared.members:
            results |= attack_members(prepared, meter)
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
