"""Rows of a table for ``attack=auto``: exact solutions if possible, else TabLeak."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fl_privacy.attacks.attack import Progress, part_of_work, seconds_left, within
from fl_privacy.attacks.auto.sub_attacks import LEAST, SOLVED, evaluations_in_time
from fl_privacy.attacks.exact import ExactInversion
from fl_privacy.attacks.exact.certificate import ROUNDING, Reproduction, model_as_sent
from fl_privacy.attacks.gradient_inversion import GradientInversion
from fl_privacy.attacks.gradient_inversion.targets import needs_unrolling
from fl_privacy.attacks.presets import tableak
from fl_privacy.types import Batch, Certainty, Observation, Reconstruction
from fl_privacy.types.schema import schema_of

_SHOWN = 0.5
"""Share of the progress for exact solutions: descents take about as long as a failing search."""

_ATTEMPTS = 10
"""Attempts at a victim, which are pooled."""


@dataclass(frozen=True, kw_only=True)
class TableMembers:
    """Exact solutions by the first layer, and TabLeak for the rest; the result nearer to the update is kept.

    Attributes:
        evaluations: evaluations of loss and gradient for each victim; ``None``: as many as there is time for.
    """

    evaluations: int | None
    device: str | None = None
    most_victims: int | None = None

    def __call__(self, observations: Sequence[Observation], *, seed: int, progress: Progress) -> list[Reconstruction]:
        rounds = max(1, min(400, self.evaluations // 12)) if self.evaluations else 400
        with within(SOLVED * seconds_left()) as limit:
            found = ExactInversion(rounds=rounds)(observations, seed=seed, progress=part_of_work(progress, 0.0, _SHOWN))
        best = [_as_rows(o, replace(one, member="exact")) for o, one in zip(observations, found, strict=True)]
        left = [k for k, one in enumerate(best) if one.batch is None or one.certainty is Certainty.APPROXIMATE]
        if not left:
            return best
        asked = [observations[k] for k in left]
        evaluations = self.evaluations or evaluations_in_time(
            lambda number: self._member(number)(asked, seed=seed), len(asked), cut=limit.cut
        )
        shown = part_of_work(progress, _SHOWN, 1.0)
        sought = self._member(evaluations)(asked, seed=seed, progress=shown)
        for k, one in zip(left, sought, strict=True):
            best[k] = _nearer(observations[k], best[k], replace(one, member="tableak"))
        return best

    def _member(self, evaluations: int) -> GradientInversion:
        attempts = min(_ATTEMPTS, max(1, evaluations // LEAST))
        attack = tableak(iterations=max(1, evaluations // attempts), restarts=attempts)
        return replace(attack, device=self.device, most_victims=self.most_victims)


def _as_rows(observation: Observation, found: Reconstruction) -> Reconstruction:
    """Return a solution as rows of the schema, marked approximate if they give another update.

    Mixtures of rows explain an update of a linear model as well.
    """
    schema = schema_of(observation.model)
    if found.certainty is not Certainty.CONSISTENT or found.batch is None or schema is None:
        return found
    rows = replace(found, batch=Batch(schema.nearest(found.batch.inputs), found.batch.labels))
    return found if _apart(observation, rows) < ROUNDING else replace(rows, certainty=Certainty.APPROXIMATE)


def _nearer(observation: Observation, one: Reconstruction, other: Reconstruction) -> Reconstruction:
    if other.batch is None:
        return one if one.batch is not None else other
    apart = _apart(observation, other)
    sure = Certainty.CONSISTENT if apart < ROUNDING else Certainty.APPROXIMATE
    other = replace(other, certainty=sure)
    return other if one.batch is None or apart <= _apart(observation, one) else one


def _apart(observation: Observation, found: Reconstruction) -> float:
    """Return the distance of the rows' gradient from the update; infinite if that is no gradient."""
    assert found.batch is not None
    if needs_unrolling(observation.plan, observation.upload.num_examples, "unroll"):
        return math.inf
    reproduction = Reproduction(observation, model_as_sent(observation))
    distance = reproduction.distance(Batch(found.batch.inputs, found.batch.labels))
    return distance if math.isfinite(distance) else math.inf
