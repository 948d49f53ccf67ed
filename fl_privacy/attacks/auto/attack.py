"""``attack=auto``: exact solutions if possible, else the best of several descents."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fl_privacy.attacks.attack import Progress, Report, no_progress, part_of, seconds_left, within
from fl_privacy.attacks.auto import stages
from fl_privacy.attacks.auto.stages import AutoStage, StageState
from fl_privacy.attacks.auto.sub_attacks import EVALUATIONS, SOLVED, Budget
from fl_privacy.attacks.auto.tables import TableMembers
from fl_privacy.attacks.auto.texts import TextMembers
from fl_privacy.attacks.gradient_inversion.evident_defense import seen_through
from fl_privacy.attacks.gradient_inversion.grouping import Group, Groups, failed
from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError
from fl_privacy.checks import number, one_of, whole
from fl_privacy.errors import UserError
from fl_privacy.types import Observation, Reconstruction
from fl_privacy.types.modality import ROWS, TEXTS, Modality, modality_of

logger = logging.getLogger(__name__)

SOLUTIONS = (
    AutoStage("model inversion", stages.has_features, stages.invert_features, until=0.1),
    AutoStage("cocktail party", stages.has_equations_of_batch, stages.separate, until=0.05),
    AutoStage("exact", stages.has_equations, stages.solve, until=0.1),
    AutoStage("hidden features", stages.has_gradient, stages.solve_features, until=0.1),
)
"""Stages that share at most three quarters of a budget in seconds, in order."""

SEARCHES = (
    AutoStage("blind deconvolution", stages.has_private_convolution, stages.deconvolve, until=0.9),
    AutoStage("surrogate model", stages.has_several_steps, stages.surrogate, until=0.3),
    AutoStage("maximum a posteriori", stages.has_likelihood, stages.find_likeliest, until=0.3),
    AutoStage("descents", lambda first: True, stages.descend, until=1.0),
)
"""Stages on the victims that are left, in order."""

_MEMBERS: Mapping[Modality, type[TextMembers] | type[TableMembers]] = {TEXTS: TextMembers, ROWS: TableMembers}
"""Attacks on examples other than images."""


@dataclass(frozen=True, kw_only=True)
class AutoAttack:
    """The strongest attacker without a setting, like AutoAttack (Croce and Hein 2020) for gradient inversion.

    Exact solutions come first: ``attack=cocktail_party`` for batches, then ``attack=exact``. Victims that are proven,
    or whose update is reproduced to rounding, need no descent.

    For the others descents from several starts compete under successive halving. Smooth models get L-BFGS on angle and
    distance of the updates, others signed Adam with little and with much total variation. Batch-norm statistics are
    used if they were sent. Unproven solutions are starts, too. Features leaked by a hidden layer in front of a ReLU
    give labels to all, and one attempt is held to them. All answer a defense that is known or that the update shows
    (zeros, few levels, empty columns, noise). If it leaves fewer values than pixels, or added noise, images are smooth
    (:mod:`fl_privacy.attacks.gradient_inversion.evident_defense`).

    Attributes:
        budget: work for a victim: ``quick``, ``standard`` or ``thorough``, reproducible numbers of evaluations; or
            seconds, not reproducible, shared among all victims. Exact solutions take at most three quarters of the
            seconds. An attempt always has 25 evaluations.
        evaluations: evaluations of loss and gradient for each victim, instead of ``budget``. The number logged for a
            budget in seconds repeats its descents. It repeats their starts unless a search for exact solutions took
            more than ``evaluations / 12`` rounds or was cut by the clock.
        device: device of the computation; ``None``: that of the values sent.
        most_victims: most victims in one chunk; ``None``: found from the free memory.
    """

    budget: Budget | float = "standard"
    evaluations: int | None = None
    dtype: Literal["float32", "float64"] = "float32"
    device: str | None = None
    most_victims: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.budget, str):
            number("attack.budget", self.budget, above=0, example=30)
        elif self.budget not in EVALUATIONS:
            raise UserError(
                f"attack.budget is expected to be {', '.join(EVALUATIONS)} or seconds a victim,"
                f" but got {self.budget!r}."
            )
        if self.evaluations is not None:
            whole("attack.evaluations", self.evaluations, at_least=1, example=EVALUATIONS["standard"])
        one_of("attack.dtype", self.dtype, ("float32", "float64"))
        if self.most_victims is not None:
            whole("attack.most_victims", self.most_victims, at_least=1, example=64)

    def __call__(
        self, observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
    ) -> list[Reconstruction]:
        kinds = {modality_of(observation.model) for observation in observations}
        with within(len(observations) * (math.inf if self._evaluations else float(self.budget))):
            if len(kinds) == 1 and (own := _MEMBERS.get(kinds.pop())) is not None:
                members = own(evaluations=self._evaluations, device=self.device, most_victims=self.most_victims)
                return members(observations, seed=seed, progress=progress)
            left = len(observations)
            groups = Groups(observations, progress=progress, see=seen_through)
            for group in groups:
                size = len(group.observations)
                with groups.attempt(group) as report, within(seconds_left() * size / max(size, left)):
                    left -= size  # victims that are attacked again no longer count
                    groups.results |= self._attack(group, seed, report)
            return groups.reconstructions()

    @property
    def _evaluations(self) -> int | None:
        """Return the evaluations of a victim; ``None`` for a budget in seconds."""
        return self.evaluations or EVALUATIONS.get(str(self.budget))

    def _attack(self, group: Group, seed: int, report: Report) -> dict[int, Reconstruction]:
        placed = {"dtype": self.dtype, "device": self.device, "most_victims": self.most_victims}
        state = StageState(group=group, seed=seed, evaluations=self._evaluations, **placed)  # type: ignore[arg-type]
        done, why = 0.0, ""
        for stages_in_order, share in ((SOLUTIONS, SOLVED), (SEARCHES, 1.0)):
            with within(share * seconds_left()) as limit:
                for stage in stages_in_order:
                    if not state.victims or not stage.applies(state.group.first):
                        continue
                    try:
                        state.take(stage.run(state, part_of(report, done, max(done, stage.until))))
                    except NotAttackableError as reason:
                        why = str(reason)
                        logger.debug("%s left out: %s", stage.name, why)
                    done = max(done, stage.until)
            state.cut = state.cut or limit.cut
        return state.results | {position: failed(one, why) for position, one in state.victims.items()}
