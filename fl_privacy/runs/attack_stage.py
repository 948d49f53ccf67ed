"""Attack intercepted updates, score the reconstructions against the originals and trace them to their owners."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor, nn

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.attacks.exact.first_layer import NotFullyConnectedError, find_first_layer
from fl_privacy.attacks.gradient_inversion.targets import is_sum_of_gradients
from fl_privacy.data import Vocabulary
from fl_privacy.federation import Client, Failure, Replay, attempt
from fl_privacy.federation.interception import ObservationBuffer, ids_of
from fl_privacy.federation.parallel import attack_by_all_cores
from fl_privacy.measure import MetricFunction, VictimScore, distortion, evaluate_all, unjudged
from fl_privacy.measure.distractors import Distractors, other_updates
from fl_privacy.models import has_batch_norm
from fl_privacy.progress import counted
from fl_privacy.rng import cpu_threads, derive_generator
from fl_privacy.runs.attacker_knowledge import AttackerKnowledge
from fl_privacy.runs.folder import Attacker, RunFolder
from fl_privacy.runs.folder.leakage import AttackedUploads
from fl_privacy.runs.ground_truth import SummedReplay
from fl_privacy.runs.run_location import Monitor
from fl_privacy.types import Batch, ModelState, Observation, Reconstruction, VictimId
from fl_privacy.types.film import viewed_by
from fl_privacy.types.modality import modality_of
from fl_privacy.types.schema import Schema

PARTICIPANTS = 10  # participants among whom the images of a single client are divided, as in SPN's Algorithm 6


@dataclass(frozen=True, kw_only=True, eq=False)
class Tracer:
    """Measures how often the reconstruction nearest to an image comes from another client's update."""

    participants: int = PARTICIPANTS  # owners among whom images of a single client are divided, in order
    clients: Mapping[int, Client] = field(default_factory=dict)  # id -> client, for further images of attacked ones
    queries: int | None = None  # largest number of images to look up; ``None`` takes the attacked images alone
    seed: int = 0

    def __call__(self, scores: Sequence[VictimScore]) -> distortion.Tracing | None:
        known = [
            (score, score.originals)
            for score in scores
            if score.originals is not None
            and not (score.sentences or score.rows is not None or any(one.failure is not None for one in score.images))
        ]
        if not known:
            return None
        scores = [score for score, _ in known]
        attacked = torch.cat([originals for _, originals in known])
        at = torch.cat([torch.full((len(originals),), score.id.client) for score, originals in known])
        others, of = self._others(attacked, at)
        shared = len(at.unique()) == 1
        owners = _dealt(len(at), torch.arange(self.participants)) if shared else at
        number = len(owners.unique())
        if number < 2:
            return None
        query_owners = torch.cat([owners, _dealt(len(of), owners.unique()) if shared else of])
        # images with a guess, (B,)
        guessed = torch.cat([torch.tensor([image.guess is not None for image in score.images]) for score in scores])
        distance = of_attacked = 1.0
        if guessed.any():
            answers = torch.cat([score.guesses for score in scores])[guessed], owners[guessed]
            distance = distortion.tracing_distance(*answers, torch.cat([attacked, others]), query_owners)
            of_attacked = distortion.tracing_distance(*answers, attacked, owners)
        return distortion.Tracing(
            distance=distance, attacked_distance=of_attacked, participants=number, queries=len(query_owners)
        )

    def _others(self, attacked: Tensor, clients: Tensor) -> tuple[Tensor, Tensor]:
        room = (self.queries or 0) - len(attacked)
        if room <= 0:
            return attacked[:0], clients[:0]
        asked = [self.clients[client] for client in clients.unique().tolist()]
        owners = torch.cat([torch.full((len(client.indices),), client.id) for client in asked])
        order = torch.randperm(len(owners), generator=derive_generator(self.seed, "tracing"))
        order = order[: room + len(attacked)]
        images = asked[0].examples.batch(torch.cat([client.indices for client in asked])[order]).inputs
        new = (distortion.nearest(attacked, images)[0] > 0).nonzero().flatten()[:room]
        return images[new], owners[order[new]]


def _dealt(number: int, owners: Tensor) -> Tensor:
    return owners[torch.arange(number) * len(owners) // max(1, number)]


class Truth(Protocol):
    """Protocol of an object that looks up the examples behind an upload."""

    def batch(self, victim: VictimId) -> Batch | None: ...

    def replay(self, observation: Observation) -> Replay | SummedReplay: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Judge:
    """Scores reconstructions against their originals."""

    # originals behind an observation; queried only after the attack. Without them, a guess is shown, not scored.
    truth: Truth
    # ``True`` if the model sees other images than the originals; guesses are compared with both
    transforms: bool = False
    distorts: bool = False  # ``True`` if a defense changes updates; they are compared with undefended ones
    functions: Mapping[str, MetricFunction] = field(default_factory=dict)  # see ``build_metrics``
    tracer: Tracer = field(default_factory=Tracer)
    vocabulary: Vocabulary | None = None
    schema: Schema | None = None
    # distractors and controls with which guesses are compared, for the outcome of each
    others: Distractors = field(default_factory=Distractors)
    # ``True`` if the model sees the client's own crops and flips of the originals and no defense changes them;
    # reconstructions are then scored against the augmented images
    augments: bool = False
    # ``True`` if the attack searches a generator's images; its results on other clients' updates are the control
    prior: bool = False

    def scores(self, found: Sequence[Reconstruction], observations: Sequence[Observation]) -> list[VictimScore]:
        seen = counted("what the model saw of victim", observations) if self.transforms else ()
        transformed = [self.truth.replay(o).transformed for o in seen] or None
        originals = [self.truth.batch(result.id) for result in counted("victim", found)]
        known = [(r, o) for r, o in zip(found, originals, strict=True) if o is not None]
        judged: Iterator[VictimScore] = iter(())
        if known:
            results, truths = zip(*known, strict=True)
            judged = iter(self._judged(results, truths, transformed))
        return [
            unjudged(r, (o.upload.num_examples, *o.input_shape), modality_of(o.model))
            if truth is None
            else next(judged)
            for r, o, truth in zip(found, observations, originals, strict=True)
        ]

    def pieces(self, tokens: Tensor) -> Sequence[str]:
        return [] if self.vocabulary is None else self.vocabulary.pieces(tokens.tolist())

    def _judged(
        self, found: Sequence[Reconstruction], truths: Sequence[Batch], transformed: Sequence[Batch] | None
    ) -> list[VictimScore]:
        others = self.others
        if self.prior:
            guesses = [None if each.batch is None else each.batch.inputs for each in found]
            controls = other_updates([each.id for each in found], guesses, [truth.inputs for truth in truths])
            others = replace(others, controls={**others.controls, **controls})
        scores = evaluate_all(
            found,
            truths,
            functions=self.functions,
            transformed=transformed,
            language=self.vocabulary,
            schema=self.schema,
            others=others,
            augmented=self.augments,
        )
        if self.vocabulary is None:
            return scores
        judged, pieces = [], self.vocabulary.pieces
        for score in scores:
            true = [None] * len(score.images) if score.originals is None else score.originals.tolist()
            made = [None if i.guess is None else g for i, g in zip(score.images, score.guesses.tolist(), strict=True)]
            both = ([None if text is None else pieces(text) for text in texts] for texts in (true, made))
            judged.append(replace(score, sentences=tuple(zip(*both, strict=True))))
        return judged


def update_distortion(
    truth: Truth, observation: Observation
) -> tuple[distortion.UpdateDistortion, Mapping[str, float]]:
    """Measure how far the defense moved an intercepted update from the undefended one.

    For one example and a model that begins with a fully connected layer, also return how well this layer's gradients
    determine its input, as name -> figure (see ``LinearSystem``); otherwise the mapping is empty.
    """
    clean, seen = replace(observation, upload=truth.replay(observation).undefended()).update(), observation.update()
    alone = observation.upload.num_examples == 1 and is_sum_of_gradients(observation.plan)
    names = _fully_connected(observation.model, observation.input_shape) if alone else None
    if names is None or not seen.keys() >= set(names):
        return distortion.distortion_of(clean, seen), {}
    tensors = [(update[names[0]], update[names[1]]) for update in (clean, seen)]
    every, trusted = distortion.linear_system(*tensors), distortion.linear_system(*tensors, rows=1)
    of_trusted = {"contraction": trusted.contraction, "error_bound": trusted.error_bound}
    figures = {"condition": every.condition, **of_trusted, "solvable": float(trusted.solvable)}
    return distortion.distortion_of(clean, seen), figures


@lru_cache(maxsize=1)
def _fully_connected(model: nn.Module, input_shape: tuple[int, ...]) -> tuple[str, str] | None:
    if not modality_of(model).continuous:
        return None
    try:
        found = find_first_layer(model, ModelState.of(model), input_shape)
    except NotFullyConnectedError:
        return None
    return found.weight, found.bias


logger: logging.Logger = logging.getLogger(__name__)
FILMED = 3  # default number of filmed victims of a round
VICTIMS_PER_CALL = 256  # victims after which results are saved; the attack's results do not depend on it


@dataclass(frozen=True, kw_only=True, eq=False)
class AttackStage:
    """Runs the reconstruction attack on intercepted uploads and records the scores; an error does not stop the run."""

    attack: ReconstructionAttack
    seed: int
    # CPU threads of attack and measurement, which decide last bits; ``None``: one for each part, else PyTorch's default
    threads: int | None
    knowledge: AttackerKnowledge
    judge: Judge
    folder: RunFolder
    monitor: Monitor
    films: int = FILMED  # number of victims of a round, from the first, whose attack is filmed
    rehearsed: bool = False  # ``True`` if the server itself computed the uploads, not a client
    jobs: int | None = None  # maximum number of processes that attack at once; ``None`` takes all cores

    def run(self, observations: Sequence[Observation]) -> None:
        with cpu_threads(self.threads or torch.get_num_threads()):
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
                    for observation in counted("update", chunk):
                        measured = attempt(partial(update_distortion, self.judge.truth, observation))
                        if isinstance(measured, Failure):
                            reason = measured.reason
                            logger.warning("The defense of %s could not be measured: %s", observation.id, reason)
                        else:
                            self.folder.add_update_distortion(observation.id, *measured)
            if known := [self.knowledge.of_adaptive(o) for o in chunk if self.knowledge.attacks_adaptively(o.id)]:
                which = which if len(known) == len(chunk) else _in_words(round, 0, len(known), len(known))
                scores[Attacker.ADAPTIVE] += self._attack_chunk(
                    known, which, earlier=self.knowledge.earlier(known), attacker=Attacker.ADAPTIVE
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
        started, round = time.perf_counter(), observations[0].id.round
        observations = [self.knowledge.with_previous(o, attacker) for o in observations]
        who = which if self.knowledge.defense is None else f"{which}, {attacker} attacker"
        result = self._reconstruct([*earlier, *observations], who, attacker)[len(earlier) :]
        self.knowledge.remember(result, attacker)
        trained = all(observation.id.probe is None for observation in observations)
        uploads = AttackedUploads.TRAINING if trained else AttackedUploads.PROBES
        self.folder.add_attack(
            round=round,
            victims=len(result),
            seconds=time.perf_counter() - started,
            batch_norm=observations[0].plan.batch_norm if has_batch_norm(observations[0].model) else None,
            attacker=attacker,
            countermeasures=list(dict.fromkeys(sentence for r in result for sentence in r.countermeasures)),
            candidates_from=None if (others := self.judge.others.candidates) is None else others.name,
            uploads=AttackedUploads.SERVER if self.rehearsed else uploads,
        )
        with self.monitor.working(f"Judging what was made of {who}"):
            scores = self.judge.scores(result, observations)
        for score in scores:
            self.folder.add_victim(score, attacker=attacker)
        self.folder.save_reconstructions(round, scores, attacker=attacker)
        self.folder.save_films(result, scores, pieces=self.judge.pieces, attacker=attacker)
        return scores

    def _reconstruct(self, asked: Sequence[Observation], who: str, attacker: Attacker) -> list[Reconstruction]:
        with self.monitor.attacking(who) as shown:
            progress = self.folder.teller.telling(f"Attacking {who}", shown)
            work = partial(attack_by_all_cores, self.attack, asked, seed=self.seed, threads=self.threads)
            with viewed_by(partial(self.folder.teller.picture, pieces=self.judge.pieces)):
                found = attempt(lambda: _expect_answers(work(processes=self.jobs, progress=progress), asked))
        self.folder.teller.clear()
        if not isinstance(found, Failure):
            return found
        logger.warning("The %s attack on round %d failed: %s", attacker, asked[-1].id.round, found.reason)
        by_client: dict[int, list[int]] = {}
        for place, observation in enumerate(asked):
            by_client.setdefault(observation.id.client, []).append(place)
        if len(by_client) == 1:
            return [Reconstruction(id=o.id, batch=None, failure=found.reason) for o in asked]
        made: dict[int, Reconstruction] = {}
        for client, places in by_client.items():
            alone = self._reconstruct([asked[place] for place in places], f"{who}, client {client} alone", attacker)
            made |= dict(zip(places, alone, strict=True))
        return [made[place] for place in range(len(asked))]


@dataclass(frozen=True, kw_only=True, eq=False)
class WaitingAttack:
    """Buffer of training updates or probes (extra uploads for the attack), attacked each round or at the end."""

    stage: AttackStage
    waiting: ObservationBuffer
    of_training: bool  # ``True`` to attack training updates, ``False`` to attack probes
    during: bool  # ``True`` to attack after each round, ``False`` to attack at the end

    def see(self, observation: Observation) -> None:
        if (observation.id.probe is None) == self.of_training:
            self.waiting.append(observation)

    def end_round(self) -> None:
        if self.during:
            self.finish()

    def finish(self) -> None:
        if self.waiting:
            self.stage.run(self.waiting)
            self.waiting.clear()


def _in_words(round: int, start: int, number: int, total: int) -> str:
    some = f"updates {start + 1} to {start + number} of {total}" if number < total else f"{total} updates"
    return (some if total > 1 else "1 update") + (f" of round {round}" if round else "")


def _expect_answers(found: object, asked: Sequence[Observation]) -> list[Reconstruction]:
    if not isinstance(found, Sequence) or not all(isinstance(each, Reconstruction) for each in found):
        kinds = sorted({type(each).__name__ for each in found}) if isinstance(found, list | tuple) else []
        got = f"{type(found).__name__} of {', '.join(kinds)}" if kinds else type(found).__name__
        raise TypeError(f"an attack is expected to return a list of Reconstruction, but returned {got}")
    if [each.id for each in found] != [observation.id for observation in asked]:
        raise TypeError(f"an attack is expected to return one Reconstruction for each of {len(asked)} observations")
    return list(found)
