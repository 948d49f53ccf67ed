"""Attack what was intercepted, judge it, write it down."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.experiment.attacker_knowledge import AttackerKnowledge
from fl_privacy.experiment.ground_truth import GroundTruth, Transformed
from fl_privacy.experiment.monitor import Monitor
from fl_privacy.experiment.previous_reconstructions import PreviousReconstructions
from fl_privacy.experiment.tracing import Tracer
from fl_privacy.experiment.update_distortion import UpdateDistortion
from fl_privacy.federation import Failure
from fl_privacy.federation.guard import attempt
from fl_privacy.metrics import MetricFunction, VictimScore, evaluate_all
from fl_privacy.models import has_batch_norm
from fl_privacy.progress import counted
from fl_privacy.results import Attacker, RunFolder
from fl_privacy.rng import cpu_threads
from fl_privacy.types import Batch, Observation, Reconstruction

logger = logging.getLogger(__name__)

VICTIMS_PER_CALL = 256
"""Results are written down after so many victims; the attack's numbers do not depend on it."""

ROUNDS_TOGETHER = 8
"""The adaptive attacker matches the last so many updates of the same examples."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttackStage:
    """Attacks observations and records the scores; whatever the attack does, the run goes on.

    Attributes:
        attack: what is run.
        truth: what was behind an observation; asked only after the attack.
        folder: where scores and pictures go.
        seed: of the attack's random streams.
        knows_labels: hand the attacker the labels of the client's loss first, mixed where the defense mixed them.
        public: images with their classes, handed to the attacker as well, where there are any.
        threads: of the CPU that attack and measurement take; part of their last bits, hence of the configuration.
        monitor: told of the progress.
        disturbance: measures what the defense did to an update; ``None`` where there is no defense.
        functions: of metrics that have none of their own.
        guesses: memory of the attacker that starts from what it made of the same examples before.
        tracer: runs the tracing attack on what was reconstructed.
        transformed: what a defense of the data put in place of the truth; ``None`` where there is no such defense.
        informed: makes the adaptive attacker, which attacks each victim after the plain one; ``None`` without it.
    """

    attack: ReconstructionAttack
    truth: GroundTruth
    folder: RunFolder
    seed: int
    knows_labels: bool
    threads: int
    monitor: Monitor
    public: Batch | None = None
    disturbance: UpdateDistortion | None = None
    guesses: PreviousReconstructions | None = None
    informed: AttackerKnowledge | None = None
    functions: Mapping[str, MetricFunction] = field(default_factory=dict)
    tracer: Tracer = field(default_factory=Tracer)
    transformed: Transformed | None = None
    _seen: dict[str, list[Observation]] = field(default_factory=dict, init=False)

    def __call__(self, observations: Sequence[Observation]) -> None:
        """Attack ``observations``, round by round."""
        with cpu_threads(self.threads):
            self._attack_all(observations)

    def _attack_all(self, observations: Sequence[Observation]) -> None:
        for round, of_round in groupby(observations, key=lambda o: o.id.round):
            waiting = [self._told(o) for o in of_round]
            plain: list[VictimScore] = []
            adaptive: list[VictimScore] = []
            for start in range(0, len(waiting), VICTIMS_PER_CALL):
                some = waiting[start : start + VICTIMS_PER_CALL]
                which = _in_words(round, start, len(some), len(waiting))
                plain += self._attack_some(round, some, which)
                if self.disturbance:
                    with self.monitor.working(f"Comparing {which} with undefended ones"):
                        self._measure(round, some, self.disturbance)
                if self.informed:
                    some = [self.informed(o) for o in some]
                    adaptive += self._attack_some(round, some, which, earlier=self._recall(some), attacker="adaptive")
            self._trace(round, plain, "plain")
            self._trace(round, adaptive, "adaptive")

    def _told(self, observation: Observation) -> Observation:
        plain = observation.told(defense=None, same_data=None)
        if self.public is not None:
            plain = plain.told(public_images=self.public.inputs, public_labels=self.public.labels)
        if not self.knows_labels:
            return plain
        trained = self.transformed(plain) if self.transformed else self.truth(plain.id)
        return plain.told(labels=trained.labels)

    def _recall(self, observations: Sequence[Observation]) -> list[Observation]:
        """Updates of earlier rounds from the same examples as ``observations``, which are remembered for later ones."""
        earlier = []
        for observation in observations:
            if (name := observation.knowledge.same_data) is not None:
                known = self._seen.setdefault(name, [])
                earlier += known
                self._seen[name] = [*known, observation][-ROUNDS_TOGETHER + 1 :]
        return earlier

    def _attack_some(
        self,
        round: int,
        observations: Sequence[Observation],
        which: str,
        *,
        earlier: Sequence[Observation] = (),
        attacker: Attacker = "plain",
    ) -> list[VictimScore]:
        """Attack ``observations``, ``which`` in words; those of ``earlier`` rounds are there to be matched."""
        started = time.perf_counter()
        if self.guesses:
            observations = [self.guesses.tell(o, attacker) for o in observations]
        everything = [*earlier, *observations]
        who = f"{which}, {attacker} attacker" if self.informed else which
        with self.monitor.attacking(who) as progress:
            found = attempt(
                lambda: _expect_answers(self.attack(everything, seed=self.seed, progress=progress), everything)
            )
        if isinstance(found, Failure):
            logger.warning("The %s attack on round %d failed: %s", attacker, round, found.reason)
            result = [Reconstruction(id=o.id, batch=None, failure=found.reason) for o in observations]
        else:
            result = found[len(earlier) :]
        if self.guesses:
            self.guesses.keep(result, attacker)
        self.folder.add_attack(
            round=round,
            victims=len(result),
            seconds=time.perf_counter() - started,
            batch_norm=_batch_norm(observations[0]),
            attacker=attacker,
            countermeasures=list(dict.fromkeys(sentence for r in result for sentence in r.countermeasures)),
        )
        with self.monitor.working(f"Judging what was made of {who}"):
            scores = evaluate_all(
                result,
                [self.truth(r.id) for r in counted("victim", result)],
                functions=self.functions,
                transformed=[self.transformed(o) for o in counted("what the model saw of victim", observations)]
                if self.transformed
                else None,
            )
        for score in scores:
            self.folder.add_victim(score, round=round, client=score.id.client, attacker=attacker)
        self.folder.save_reconstructions(round, scores, attacker=attacker)
        return scores

    def _trace(self, round: int, scores: Sequence[VictimScore], attacker: Attacker) -> None:
        tracing = self.tracer(scores) if scores else None
        if tracing:
            self.folder.add_tracing(tracing, round=round, attacker=attacker)

    def _measure(self, round: int, observations: Sequence[Observation], disturbance: UpdateDistortion) -> None:
        for observation in counted("update", observations):
            measured = attempt(partial(disturbance, observation))
            if isinstance(measured, Failure):
                logger.warning("The defense of %s could not be measured: %s", observation.id, measured.reason)
            else:
                moved, solving = measured
                id = observation.id
                self.folder.add_perturbation(id, moved, round=round, client=id.client, solving=solving)


def _in_words(round: int, start: int, number: int, total: int) -> str:
    """``4 updates of round 20``; of more than are attacked at once, which; fresh models have no round."""
    some = f"updates {start + 1} to {start + number} of {total}" if number < total else f"{total} updates"
    return (some if total > 1 else "1 update") + (f" of round {round}" if round else "")


def _batch_norm(observation: Observation) -> str | None:
    """The mode in which the client ran batch norm; ``None`` for a model without."""
    return observation.plan.batch_norm if has_batch_norm(observation.model) else None


def _expect_answers(found: object, asked: Sequence[Observation]) -> list[Reconstruction]:
    """What an attack, which may be somebody else's code, returned for ``asked``; ``TypeError`` if it is no answer."""
    if not isinstance(found, Sequence) or not all(isinstance(each, Reconstruction) for each in found):
        kinds = sorted({type(each).__name__ for each in found}) if isinstance(found, list | tuple) else []
        got = f"{type(found).__name__} of {', '.join(kinds)}" if kinds else type(found).__name__
        raise TypeError(f"an attack is expected to return a list of Reconstruction, but returned {got}")
    if [each.id for each in found] != [observation.id for observation in asked]:
        raise TypeError(f"an attack is expected to return one Reconstruction for each of {len(asked)} observations")
    return list(found)
