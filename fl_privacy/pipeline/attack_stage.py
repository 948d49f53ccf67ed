"""Attack what was intercepted, judge it, write it down."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.federation import Failure, parse_observation_id
from fl_privacy.federation.attempt import attempt
from fl_privacy.metrics import evaluate_all
from fl_privacy.pipeline.disturbance import Disturbance
from fl_privacy.pipeline.monitor import Monitor
from fl_privacy.pipeline.truth import Truth
from fl_privacy.results import RunFolder
from fl_privacy.types import Observation, Reconstruction

logger = logging.getLogger(__name__)

VICTIMS_PER_CALL = 256
"""Results are written down after so many victims; the attack's numbers do not depend on it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttackStage:
    """Attacks observations and records the scores; whatever the attack does, the run goes on.

    Attributes:
        attack: what is run.
        truth: what was behind an observation; asked only after the attack.
        folder: where scores and pictures go.
        seed: of the attack's random streams.
        knows_labels: hand the attacker the true labels first.
        monitor: told of the progress.
        disturbance: measures what the defense did to an update; ``None`` where there is no defense.
    """

    attack: ReconstructionAttack
    truth: Truth
    folder: RunFolder
    seed: int
    knows_labels: bool
    monitor: Monitor
    disturbance: Disturbance | None = None

    def __call__(self, observations: Sequence[Observation]) -> None:
        """Attack ``observations``, round by round."""
        for round, of_round in groupby(observations, key=lambda o: parse_observation_id(o.id)[0]):
            waiting = list(of_round)
            for start in range(0, len(waiting), VICTIMS_PER_CALL):
                self._attack_some(round, waiting[start : start + VICTIMS_PER_CALL])

    def _attack_some(self, round: int, observations: list[Observation]) -> None:
        started = time.perf_counter()
        if self.knows_labels:
            observations = [o.told(labels=self.truth(o.id).labels) for o in observations]
        with self.monitor.attacking(len(observations)) as progress:
            result = attempt(lambda: self.attack(observations, seed=self.seed, progress=progress))
        if isinstance(result, Failure):
            logger.warning("The attack on round %d failed: %s", round, result.reason)
            result = [Reconstruction(id=o.id, batch=None, failure=result.reason) for o in observations]
        seconds = time.perf_counter() - started
        self.folder.add_attack(round=round, victims=len(result), seconds=seconds)
        if self.disturbance:
            self._measure(round, observations, self.disturbance)
        scores = evaluate_all(result, [self.truth(r.id) for r in result])
        for score in scores:
            self.folder.add_victim(score, round=round, client=parse_observation_id(score.id)[1])
        self.folder.save_reconstructions(round, scores)

    def _measure(self, round: int, observations: Sequence[Observation], disturbance: Disturbance) -> None:
        for observation in observations:
            measured = attempt(partial(disturbance, observation))
            if isinstance(measured, Failure):
                logger.warning("The defense of %s could not be measured: %s", observation.id, measured.reason)
            else:
                client = parse_observation_id(observation.id)[1]
                self.folder.add_perturbation(observation.id, measured, round=round, client=client)
