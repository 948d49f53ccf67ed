"""Run inference attacks on each round's updates during training, and score them at the end."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from fl_privacy.attacks.inference import About, Inference, ReadRound, Rehearsal, Watch
from fl_privacy.defenses import ClientState
from fl_privacy.federation import Client, Failure, Probe
from fl_privacy.federation.replies import attempt
from fl_privacy.progress import counted
from fl_privacy.rng import cpu_threads
from fl_privacy.runs.build import build_inferences, pool_size, with_adaptive
from fl_privacy.runs.destination import Monitor
from fl_privacy.runs.folder import Finding, RunFolder
from fl_privacy.runs.inference_judge import (
    InferenceJudge,
    InferenceQuestions,
    ask,
    attributes_of,
    expect_attributes,
    rehearsing,
)
from fl_privacy.runs.privacy import UNKNOWN, Privacy
from fl_privacy.runs.setup import Setup
from fl_privacy.types import Batch, ModelState, Observation

logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class InferenceStage:
    """Runs inference attacks one round at a time; the training continues if they fail.

    Attributes:
        classes: number K of classes.
        victims: probe -> row of the answer, for attributes.
        attribute_count: number A of attribute values.
        rehearsing: client of an attacker who knows the defense, for attributes.
        expected: number of rounds to intercept.
    """

    inferences: Mapping[str, Inference]
    asked: InferenceQuestions
    clients: tuple[int, ...]
    classes: int
    victims: Mapping[Probe, int]
    attributes: torch.Tensor
    attribute_count: int
    rehearsing: Client | None
    seed: int
    threads: int
    device: torch.device
    folder: RunFolder
    monitor: Monitor
    privacy: Privacy
    delta: float
    _watches: dict[str, Watch] = field(default_factory=dict, init=False)
    _failures: dict[str, str] = field(default_factory=dict, init=False)
    _seconds: dict[str, float] = field(default_factory=dict, init=False)
    _waiting: list[Observation] = field(default_factory=list, init=False)
    expected: int = 1
    _rounds: int = field(default=0, init=False)
    _last_round: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        for name, inference in self.inferences.items():
            size = len(self.asked.examples), self.classes
            if inference.about is About.ATTRIBUTE:
                size = len(self.victims), self.attribute_count
            self._watches[name] = inference.begin(size[0], self.clients, size[1])
            self._seconds[name] = 0.0

    @classmethod
    def of(
        cls, setup: Setup, folder: RunFolder, monitor: Monitor, privacy: Privacy = UNKNOWN
    ) -> "InferenceStage | None":
        """Build the stage; ``None`` without inference attacks.

        Raises:
            UserError: there are too few examples, or no attributes are known.
        """
        config, clients = setup.config, setup.clients
        inferences = {
            name: one for name, one in build_inferences(config.inference).items() if one.about is not About.CANARIES
        }
        if not inferences:
            return None
        examples = next(iter(clients.values())).examples
        asks_for_attribute = any(i.about is About.ATTRIBUTE for i in inferences.values())
        if asks_for_attribute:
            expect_attributes(setup)
        asked = ask(setup, *pool_size(list(inferences.values())))
        client = rehearsing(setup, asked) if asks_for_attribute else None
        return cls(
            inferences=inferences if client is None else with_adaptive(inferences),
            asked=asked,
            clients=tuple(sorted(clients)),
            classes=examples.num_classes,
            victims={probe: row for row, probe in enumerate(setup.audit.probes)} if asks_for_attribute else {},
            attributes=attributes_of(setup) if asks_for_attribute else torch.empty(0, dtype=torch.int64),
            attribute_count=len(examples.attribute_names),
            rehearsing=client,
            seed=config.seed,
            threads=config.attack_threads,
            device=torch.device(next(iter(clients.values())).device),
            folder=folder,
            monitor=monitor,
            privacy=privacy,
            delta=config.privacy.delta,
            expected=len(setup.audit.rounds),
        )

    def see(self, observation: Observation) -> None:
        if self._waiting and self._waiting[0].id.round != observation.id.round:
            self.end_round()
        self._waiting.append(observation)

    def end_round(self) -> None:
        if not self._waiting:
            return
        probed = [o for o in self._waiting if o.id.probe is not None]
        rows = [self.victims.get(Probe(o.id.client, o.id.probe or 0)) for o in probed]
        read = ReadRound(
            observations=tuple(o for o in self._waiting if o.id.probe is None),
            candidates=self._on_device(self.asked.examples),
            public=self._on_device(self.asked.public) if self.asked.public else None,
            public_attributes=self.asked.public_attributes,
            rehearsal=self._rehearsal(probed[0]) if probed else None,
            victims=tuple((row, o) for row, o in zip(rows, probed, strict=True) if row is not None),
            remaining=max(0, self.expected - self._rounds - 1),
            seed=self.seed,
            device=self.device,
        )
        self._waiting = []
        self._rounds, self._last_round = self._rounds + 1, read.round
        with cpu_threads(self.threads):
            for name, watch in self._watches.items():
                about_updates = self.inferences[name].about is not About.ATTRIBUTE
                if name in self._failures or (about_updates and not read.observations):
                    continue
                started = time.perf_counter()
                with self.monitor.working(f"Asking about {name} in round {read.round}"):
                    result = attempt(partial(watch.add, read))
                self._seconds[name] += time.perf_counter() - started
                if isinstance(result, Failure):
                    logger.warning("Inference of %s failed in round %d: %s", name, read.round, result.reason)
                    self._failures[name] = result.reason

    def _rehearsal(self, like: Observation) -> Rehearsal | None:
        client = self.rehearsing
        if client is None:
            return None
        known = client.examples.attributes
        assert known is not None
        order = client.probed_examples(0, len(client.indices))

        def uploads(sent: ModelState, number: int) -> Iterator[Observation]:
            state = ClientState()
            for probe in counted("public example", range(min(number, len(order)))):
                made = client.probe(sent, state, round=like.id.round, probe=probe, batch_size=1)
                yield replace(like, sent=sent, upload=made.upload)

        return Rehearsal(attributes=known[order], uploads=uploads)

    def finish(self) -> None:
        self.end_round()
        judge = InferenceJudge(
            asked=self.asked,
            attributes=self.attributes,
            epsilon=self.privacy.epsilon(self._last_round),
            delta=self.delta,
            seed=self.seed,
            clients=self.clients,
            rounds=self._rounds,
            last_round=self._last_round,
        )
        for name, inference in self.inferences.items():
            for finding in self._findings(judge, name, inference):
                self.folder.add_finding(replace(finding, seconds=self._seconds[name]))

    def _findings(self, judge: InferenceJudge, name: str, inference: Inference) -> Sequence[Finding]:
        watch, reason = self._watches[name], self._failures.get(name)
        if not self._rounds:
            reason = "no update of a client was intercepted"
        if reason is None:
            found = attempt(lambda: judge.findings(inference.about, watch.answers(), watch.titles()))
            if not isinstance(found, Failure):
                return found
            reason = found.reason
        failed = Finding(about=inference.about, method=name, title=name, failure=reason)
        return [replace(failed, rounds=self._rounds, last_round=self._last_round)]

    def _on_device(self, batch: Batch) -> Batch:
        return Batch(batch.inputs.to(self.device), batch.labels.to(self.device))
