"""Gradient inversion: find inputs whose gradient is the one observed, for many victims at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from fl_privacy.attacks.attack import Progress, Report, no_progress
from fl_privacy.attacks.gradient_inversion.compile import check_compiler
from fl_privacy.attacks.gradient_inversion.evidence import seen_through
from fl_privacy.attacks.gradient_inversion.grouping import Group, attack_in_groups, failed
from fl_privacy.attacks.gradient_inversion.preparation import prepare
from fl_privacy.attacks.gradient_inversion.restarts import attack_victims
from fl_privacy.attacks.gradient_inversion.settings import Settings
from fl_privacy.generator import Provenance
from fl_privacy.rng import cpu_threads
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
    bits; where layers are small it takes one, however many are set (:mod:`.threads`).
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
        return attack_in_groups(
            observations,
            lambda group, report: self._attack(group, seed, report),
            progress=progress,
            see=partial(seen_through, clips=True) if self.evident else list,
        )

    def provenance(self, image: Sequence[int]) -> Provenance | None:
        """What its generator of images (C, H, W) was trained on; ``None`` where it has none.

        Raises:
            UserError: there is no such generator.
        """
        return None if self.source is None else self.source.provenance(image)

    def _attack(self, group: Group, seed: int, report: Report) -> dict[int, Reconstruction]:
        with cpu_threads(1):  # a few evaluations, of which none is known yet to be worth more
            prepared = prepare(self, group, seed)
        results = {position: failed(group.observations[position], why) for position, why in prepared.failures.items()}
        return results | attack_victims(prepared, report) if prepared.victims else results
