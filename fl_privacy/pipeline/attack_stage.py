"""Attack what was intercepted, judge it, write it down."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torch import Tensor

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.federation import Failure, parse_observation_id
from fl_privacy.federation.attempt import attempt
from fl_privacy.metrics import VictimScore, evaluate_all
from fl_privacy.pipeline.monitor import Monitor
from fl_privacy.pipeline.truth import Truth
from fl_privacy.results import RunFolder
from fl_privacy.types import Observation, Reconstruction

VICTIMS_PER_CALL = 256
"""Results are written down after so many victims; the attack's numbers do not depend on it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class AttackStage:
    """Attacks observations and records the scores; whatever the attack does, the run goes on.

    Attributes:
        attack: what is run.
        name: of the attack, for the records.
        truth: what was behind an observation; asked only after the attack.
        folder: where scores and pictures go.
        seed: of the attack's random streams.
        knows_labels: hand the attacker the true labels first.
        monitor: told of the progress.
    """

    attack: ReconstructionAttack
    name: str
    truth: Truth
    folder: RunFolder
    seed: int
    knows_labels: bool
    monitor: Monitor

    def __call__(self, observations: Sequence[Observation]) -> None:
        """Attack ``observations``, round by round."""
        for round, of_round in groupby(observations, key=lambda o: parse_observation_id(o.id)[0]):
            waiting = list(of_round)
            for start in range(0, len(waiting), VICTIMS_PER_CALL):
                self._attack_some(round, waiting[start : start + VICTIMS_PER_CALL], part=start // VICTIMS_PER_CALL)

    def _attack_some(self, round: int, observations: list[Observation], *, part: int) -> None:
        started = time.perf_counter()
        if self.knows_labels:
            observations = [o.told(labels=self.truth(o.id).labels) for o in observations]
        with self.monitor.attacking(len(observations)) as progress:
            result = attempt(
                f"Attack on {len(observations)} updates of round {round}",
                lambda: self.attack(observations, seed=self.seed, progress=progress),
            )
        if isinstance(result, Failure):
            result = [Reconstruction(id=o.id, batch=None, failure=result.reason) for o in observations]
        seconds = time.perf_counter() - started
        self.folder.record("attack", round=round, attack=self.name, victims=len(result), seconds=seconds)
        scores = evaluate_all([_on_cpu(r) for r in result], [self.truth(r.id) for r in result])
        self._write(round, scores, result, part)

    def _write(self, round: int, scores: list[VictimScore], guesses: list[Reconstruction], part: int) -> None:
        for score, guess in zip(scores, guesses, strict=True):
            _, client, _ = parse_observation_id(score.id)
            for image in score.images:
                self.folder.record(
                    "victim",
                    id=score.id,
                    round=round,
                    client=client,
                    image=image.image,
                    attack=self.name,
                    attack_loss=score.attack_loss,
                    label_source=guess.label_source,
                    failure=image.failure,
                    **image.values,
                )
        self.folder.write_reconstructions(round, scores, part=part)


def _on_cpu(guess: Reconstruction) -> Reconstruction:
    if guess.batch is None:
        return guess
    return replace(
        guess, batch=replace(guess.batch, inputs=_plain(guess.batch.inputs), labels=_plain(guess.batch.labels))
    )


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()
