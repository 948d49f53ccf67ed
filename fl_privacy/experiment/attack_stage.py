"""Attack what was intercepted, judge it, write it down."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.experiment.attacker_knowledge import AttackerKnowledge
from fl_privacy.experiment.judge import Judge, update_distortion
from fl_privacy.experiment.protocols import Monitor
from fl_privacy.federation import Failure
from fl_privacy.federation.replies import attempt
from fl_privacy.film import viewed_by
from fl_privacy.interception import ids_of
from fl_privacy.metrics import VictimScore
from fl_privacy.models import has_batch_norm
from fl_privacy.progress import counted
from fl_privacy.results import Attacker, RunFolder
from fl_privacy.results.attack_facts import AttackedUploads
from fl_privacy.rng import cpu_threads
from fl_privacy.types import Observation, Reconstruction

logger = logging.getLogger(__name__)

FILMED = 3
"""Victims of a round, unless a run says otherwise."""

VICTIMS_PER_CALL = 256
"""Results are written down after so many victims; the attack's numbers do not depend on it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttackStage:
    """Attacks observations and records the scores; whatever the attack does, the run goes on.

    Attributes:
        attack: what is run.
        seed: of the attack's random streams.
        threads: of the CPU that attack and measurement take; part of their last bits, hence of the configuration.
        knowledge: what the attackers are told.
        judge: scores what they made.
        folder: where scores and pictures go.
        films: victims of a round, the first ones, of which it is filmed how they were read.
        monitor: told of the progress.
        rehearsed: whether no client made the uploads, but the server itself.
    """

    attack: ReconstructionAttack
    seed: int
    threads: int
    knowledge: AttackerKnowledge
    judge: Judge
    folder: RunFolder
    monitor: Monitor
    films: int = FILMED
    rehearsed: bool = False

    def run(self, observations: Sequence[Observation]) -> None:
        """Attack ``observations``, round by round."""
        with cpu_threads(self.threads):
            ids = ids_of(observations)
            for round, of_round in groupby(range(len(ids)), key=lambda place: ids[place].round):
                places = list(of_round)
                self._attack_round(round, observations[places[0] : places[-1] + 1])

    def _attack_round(self, round: int, observations: Sequence[Observation]) -> None:
        scores: dict[Attacker, list[VictimScore]] = {attacker: [] for attacker in Attacker}
        for start in range(0, len(observations), VICTIMS_PER_CALL):
            chunk = [
                replace(self.knowledge.of_plain(o), filmed=number < self.films)
                for number, o in enumerate(observations[start : start + VICTIMS_PER_CALL], start)
            ]
            which = _in_words(round, start, len(chunk), len(observations))
            scores[Attacker.PLAIN] += self._attack_chunk(chunk, which)
            if self.judge.distorts:
                with self.monitor.working(f"Comparing {which} with undefended ones"):
                    self._measure_distortion(chunk)
            if self.knowledge.defense is not None:
                chunk = [self.knowledge.of_adaptive(o) for o in chunk]
                earlier = self.knowledge.earlier(chunk)
                scores[Attacker.ADAPTIVE] += self._attack_chunk(
                    chunk, which, earlier=earlier, attacker=Attacker.ADAPTIVE
                )
        for attacker, found in scores.items():
            if found and (tracing := self.judge.tracer(found)):
                self.folder.add_tracing(tracing, round=round, attacker=attacker)

    def _attack_chunk(
        self,
        observations: Sequence[Observation],
        which: str,
        *,
        earlier: Sequence[Observation] = (),
        attacker: Attacker = Attacker.PLAIN,
    ) -> list[VictimScore]:
        """Attack ``observations`` of one round, ``which`` in words; ``earlier`` ones are there to be matched."""
        started, round = time.perf_counter(), observations[0].id.round
        observations = [self.knowledge.with_previous(o, attacker) for o in observations]
        who = which if self.knowledge.defense is None else f"{which}, {attacker} attacker"
        result = self._reconstruct([*earlier, *observations], who, attacker)[len(earlier) :]
        self.knowledge.remember(result, attacker)
        self.folder.add_attack(
            round=round,
            victims=len(result),
            seconds=time.perf_counter() - started,
            batch_norm=_batch_norm(observations[0]),
            attacker=attacker,
            countermeasures=list(dict.fromkeys(sentence for r in result for sentence in r.countermeasures)),
            candidates_from=None if (others := self.judge.others.candidates) is None else others.name,
            uploads=self._uploads(observations),
        )
        with self.monitor.working(f"Judging what was made of {who}"):
            scores = self.judge.scores(result, observations)
        for score in scores:
            self.folder.add_victim(score, attacker=attacker)
        self.folder.save_reconstructions(round, scores, attacker=attacker)
        self.folder.save_films(result, scores, pieces=self.judge.pieces, attacker=attacker)
        return scores

    def _uploads(self, observations: Sequence[Observation]) -> AttackedUploads:
        """What is attacked, for the verdict."""
        if self.rehearsed:
            return AttackedUploads.SERVER
        trained = all(observation.id.probe is None for observation in observations)
        return AttackedUploads.TRAINING if trained else AttackedUploads.PROBES

    def _reconstruct(self, asked: Sequence[Observation], who: str, attacker: Attacker) -> list[Reconstruction]:
        """One for each of ``asked``; failures where the attack raised or gave no answer."""
        with self.monitor.attacking(who) as shown:
            progress = self.folder.teller.telling(f"Attacking {who}", shown)
            with viewed_by(partial(self.folder.teller.picture, pieces=self.judge.pieces)):
                found = attempt(lambda: _expect_answers(self.attack(asked, seed=self.seed, progress=progress), asked))
        self.folder.teller.clear()
        if not isinstance(found, Failure):
            return found
        logger.warning("The %s attack on round %d failed: %s", attacker, asked[-1].id.round, found.reason)
        return [Reconstruction(id=o.id, batch=None, failure=found.reason) for o in asked]

    def _measure_distortion(self, observations: Sequence[Observation]) -> None:
        for observation in counted("update", observations):
            measured = attempt(partial(update_distortion, self.judge.truth, observation))
            if isinstance(measured, Failure):
                logger.warning("The defense of %s could not be measured: %s", observation.id, measured.reason)
            else:
                self.folder.add_update_distortion(observation.id, *measured)


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
