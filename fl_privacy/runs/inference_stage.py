"""Run inference attacks on each round's updates during training, and score them at the end."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from fl_privacy.attacks.inference import About, Inference, ReadRound, Rehearsal, Watch
from fl_privacy.defenses import ClientState
from fl_privacy.federation import Client, Failure, Probe, attempt
from fl_privacy.progress import counted
from fl_privacy.rng import cpu_threads
from fl_privacy.runs.another_site import SUMMED
from fl_privacy.runs.build import build_inferences, with_adaptive
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
from fl_privacy.runs.run_location import Monitor
from fl_privacy.runs.setup import Setup
from fl_privacy.types import Batch, ModelState, Observation

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class InferenceStage:
    """Runs inference attacks round by round; the training continues if they fail."""

    setup: Setup
    inferences: Mapping[str, Inference]
    asked: InferenceQuestions
    attributes: torch.Tensor  # (V,) attributes of the probed examples; empty if no attack asks about them
    rehearsing: Client | None  # simulated client of an attacker that knows the defense
    folder: RunFolder
    monitor: Monitor
    privacy: Privacy
    trains: bool  # ``True`` if the server of ``setup`` is trained in the rounds
    _watches: dict[str, Watch] = field(default_factory=dict, init=False)
    _failures: dict[str, str] = field(default_factory=dict, init=False)
    _seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float), init=False)
    _waiting: list[Observation] = field(default_factory=list, init=False)
    _rounds: int = field(default=0, init=False)
    _last_round: int = field(default=0, init=False)
    _assumed: bool = field(default=False, init=False)  # ``True`` if the final model counts as the mean of the uploads

    def __post_init__(self) -> None:
        examples = self.setup.first.examples
        clients = (SUMMED,) if self.setup.config.sites else tuple(sorted(self.setup.clients))
        for name, inference in self.inferences.items():
            size = len(self.asked.examples), examples.num_classes
            if inference.about is About.ATTRIBUTE:
                size = len(self.attributes), len(examples.attribute_names)
            self._watches[name] = inference.begin(size[0], clients, size[1])

    @classmethod
    def of(
        cls, setup: Setup, folder: RunFolder, monitor: Monitor, privacy: Privacy = UNKNOWN, *, trains: bool = False
    ) -> "InferenceStage | None":
        built = build_inferences(setup.config.inference)
        inferences = {name: one for name, one in built.items() if one.about is not About.CANARIES}
        if not inferences:
            return None
        asks_for_attribute = any(i.about is About.ATTRIBUTE for i in inferences.values())
        if asks_for_attribute:
            expect_attributes(setup)
        asked = ask(setup, inferences)
        client = rehearsing(setup, asked) if asks_for_attribute else None
        return cls(
            setup=setup,
            inferences=inferences if client is None else with_adaptive(inferences),
            asked=asked,
            attributes=attributes_of(setup) if asks_for_attribute else torch.empty(0, dtype=torch.int64),
            rehearsing=client,
            folder=folder,
            monitor=monitor,
            privacy=privacy,
            trains=trains,
        )

    def see(self, observation: Observation) -> None:
        if self._waiting and self._waiting[0].id.round != observation.id.round:
            self.end_round(observation)
        self._waiting.append(observation)

    def end_round(self, following: Observation | None = None) -> None:
        """Pass the round's observations to the inference attacks; ``following``: observation of a later round."""
        if not self._waiting:
            return
        probed = [o for o in self._waiting if o.id.probe is not None]
        probes = dict(zip(self.setup.audit.probes, range(len(self.attributes)), strict=False))
        rows = [probes.get(Probe(o.id.client, o.id.probe or 0)) for o in probed]
        device = torch.device(self.setup.first.device)
        read = ReadRound(
            observations=tuple(o for o in self._waiting if o.id.probe is None),
            candidates=_on_device(self.asked.examples, device),
            public=_on_device(self.asked.public, device) if self.asked.public else None,
            public_attributes=self.asked.public_attributes,
            rehearsal=self._rehearsal(probed[0]) if probed else None,
            victims=tuple((row, o) for row, o in zip(rows, probed, strict=True) if row is not None),
            sent_next=self._sent_next(following),
            remaining=max(0, len(self.setup.audit.rounds) - self._rounds - 1),
            seed=self.setup.config.seed,
            device=device,
        )
        self._waiting = []
        self._rounds, self._last_round = self._rounds + 1, read.round
        with cpu_threads(self.setup.config.attack_threads):
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

    def _sent_next(self, following: Observation | None) -> ModelState | None:
        server, first = self.setup.server, self._waiting[0]
        if server.personal or self.setup.config.sites:  # a site subtracts its own update
            return None
        if self.trains:
            return server.state
        if self.setup.server_attack is not None:
            return None
        if following is not None and following.id.round == first.id.round + 1:
            return following.sent
        uploads = {one.id.client: one.upload for one in self._waiting if one.id.probe is None}
        plain = server.plan.optimizer.name == "sgd" and not server.plan.noise
        if not plain or set(uploads) != set(server.select(first.id.round)):
            self._assumed = following is None
            return None
        again = replace(server, state=first.sent, heard=None)
        return None if isinstance(attempt(lambda: again.receive(uploads, first.id.round)), Failure) else again.state

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
        epsilon = self.privacy.epsilon(self._last_round)
        last, total, early = self._last_round, self.setup.rounds, list[str]()
        if last < total:
            early = [f"The model after round {last} of {total} counts as the final one: no later round is intercepted."]
        if self._assumed:
            early.append("The final model counts as the mean of the last uploads: the server's own is not captured.")
        judge = InferenceJudge(setup=self.setup, asked=self.asked, attributes=self.attributes, epsilon=epsilon)
        for name, inference in self.inferences.items():
            for finding in self._findings(judge, name, inference):
                known = replace(finding, rounds=self._rounds, last_round=last)
                if finding.failure is None and finding.method.startswith(("final_", "rounds_")):
                    known = replace(known, notes=[*finding.notes, *early])
                self.folder.add_finding(replace(known, seconds=self._seconds[name]))

    def _findings(self, judge: InferenceJudge, name: str, inference: Inference) -> Sequence[Finding]:
        watch, reason = self._watches[name], self._failures.get(name)
        if not self._rounds:
            reason = "no update of a client was intercepted"
        if reason is None:
            found = attempt(lambda: judge.findings(inference.about, watch.answers(), watch.titles()))
            if not isinstance(found, Failure):
                return found
            reason = found.reason
        return [Finding(about=inference.about, method=name, title=name, failure=reason)]


def _on_device(batch: Batch, device: torch.device) -> Batch:
    return Batch(batch.inputs.to(device), batch.labels.to(device))
