"""Inference attacks beside the training: shown each round's updates as they come, judged in the end."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from fl_privacy.experiment.build import Federation
from fl_privacy.experiment.inference_judge import InferenceJudge, Spending, Watched
from fl_privacy.experiment.inferences import Asked, ask, build_inferences, pool_size
from fl_privacy.experiment.protocols import Monitor
from fl_privacy.federation import Failure
from fl_privacy.federation.guard import attempt
from fl_privacy.inference import Inference, ReadRound, Watch
from fl_privacy.results import Finding, RunFolder
from fl_privacy.rng import cpu_threads
from fl_privacy.types import Batch, Observation

logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class InferenceStage:
    """Keeps the updates of one round at a time; whatever an attack does, the training goes on.

    Attributes:
        inferences: the attacks by name.
        asked: what they are asked about.
        clients: ids of all.
        classes: K.
        seed: of the attackers' draws.
        threads: of the CPU that they take.
        device: where they compute.
        folder: where findings go.
        monitor: told of the progress.
    """

    inferences: Mapping[str, Inference]
    asked: Asked
    clients: tuple[int, ...]
    classes: int
    seed: int
    threads: int
    device: torch.device
    folder: RunFolder
    monitor: Monitor
    _watches: dict[str, Watch] = field(default_factory=dict, init=False)
    _failures: dict[str, str] = field(default_factory=dict, init=False)
    _seconds: dict[str, float] = field(default_factory=dict, init=False)
    _waiting: list[Observation] = field(default_factory=list, init=False)
    _rounds: int = field(default=0, init=False)
    _last_round: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        for name, inference in self.inferences.items():
            self._watches[name] = inference.begin(len(self.asked.examples), self.clients, self.classes)
            self._seconds[name] = 0.0

    @classmethod
    def of(cls, federation: Federation, folder: RunFolder, monitor: Monitor) -> "InferenceStage | None":
        """That of ``federation``; ``None`` where nothing is asked.

        Raises:
            UserError: there are too few examples.
        """
        config, dataset, clients = federation.config, federation.dataset, federation.clients
        inferences = build_inferences(config)
        if not inferences:
            return None
        members, others = pool_size(list(inferences.values()))
        return cls(
            inferences=inferences,
            asked=ask(config, dataset, clients, members, others),
            clients=tuple(sorted(clients)),
            classes=dataset.train.num_classes,
            seed=config.seed,
            threads=config.attack_threads,
            device=federation.device,
            folder=folder,
            monitor=monitor,
        )

    def see(self, observation: Observation) -> None:
        """An update of the training; those of the round before are read and forgotten."""
        if self._waiting and self._waiting[0].id.round != observation.id.round:
            self.read()
        self._waiting.append(observation)

    def read(self) -> None:
        """Show the attacks what was seen of the round that is over."""
        if not self._waiting:
            return
        read = ReadRound(
            observations=tuple(self._waiting),
            candidates=self._on_device(self.asked.examples),
            public=self._on_device(self.asked.public) if self.asked.public else None,
            seed=self.seed,
            device=self.device,
        )
        self._waiting = []
        self._rounds, self._last_round = self._rounds + 1, read.round
        with cpu_threads(self.threads):
            for name, watch in self._watches.items():
                if name in self._failures:
                    continue
                started = time.perf_counter()
                with self.monitor.working(f"Asking about {name} in round {read.round}"):
                    result = attempt(partial(watch.add, read))
                self._seconds[name] += time.perf_counter() - started
                if isinstance(result, Failure):
                    logger.warning("Inference of %s failed in round %d: %s", name, read.round, result.reason)
                    self._failures[name] = result.reason

    def finish(self, spending: Spending) -> None:
        """Judge what the attacks answer and record it."""
        self.read()
        judge = InferenceJudge(asked=self.asked, spending=spending, seed=self.seed)
        watched = Watched(rounds=self._rounds, last_round=self._last_round, clients=self.clients)
        for name, inference in self.inferences.items():
            for finding in self._findings(judge, name, inference, watched):
                self.folder.add_finding(finding)

    def _findings(self, judge: InferenceJudge, name: str, inference: Inference, watched: Watched) -> Sequence[Finding]:
        watch, reason = self._watches[name], self._failures.get(name)
        if not watched.rounds:
            reason = "no update of a client was intercepted"
        if reason is None:
            found = attempt(lambda: judge.findings(inference.about, watch.answers(), watch.titles(), watched))
            if not isinstance(found, Failure):
                return found
            reason = found.reason
        failed = Finding(about=inference.about, method=name, title=name, failure=reason)
        return [replace(failed, rounds=watched.rounds, last_round=watched.last_round)]

    def _on_device(self, batch: Batch) -> Batch:
        return Batch(batch.inputs.to(self.device), batch.labels.to(self.device))
