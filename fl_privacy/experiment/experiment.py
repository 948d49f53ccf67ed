"""The parts of an experiment, put together in one way for runs, attacks and measurements."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.attacks.attack import trained_on
from fl_privacy.config import RunSettings
from fl_privacy.data import Dataset, LabelledExamples, TextExamples, Vocabulary
from fl_privacy.defenses import ClientState, Defense
from fl_privacy.experiment.attack_stage import PARTICIPANTS, AttackStage, Judge, Tracer
from fl_privacy.experiment.attacker_knowledge import AttackerKnowledge, data_names, public_examples, side_information_of
from fl_privacy.experiment.build import Federation, build_metrics
from fl_privacy.experiment.candidates import unattacked_others
from fl_privacy.experiment.ground_truth import ClientStates, GroundTruth, fresh_states, sees_other_images
from fl_privacy.experiment.run_folder import Monitor
from fl_privacy.experiment.server_reading import ServerReading
from fl_privacy.experiment.threat_model import describe_threats
from fl_privacy.federation import Audit, Client, private_names
from fl_privacy.interception import Interceptor
from fl_privacy.interception.interceptor import Sink
from fl_privacy.malicious import ServerAttack
from fl_privacy.progress import counted
from fl_privacy.results import RunFolder
from fl_privacy.schema import schema_of
from fl_privacy.types import Knowledge, LocalPlan, ModelState, Observation, Upload


@dataclass(frozen=True, kw_only=True, eq=False)
class Experiment:
    """The attacked clients: how they train and defend themselves, and what is intercepted of them.

    Attributes:
        config: of the experiment.
        dataset: what the clients share.
        model: the architecture, holding the initial values.
        clients: by id; those attacked and those that collude.
        audit: what is intercepted.
        unattacked: examples without victims, which the attacker may be given some of.
        states: what the clients keep for themselves by the time that they are attacked.
        server_attack: what the server does beyond the protocol; ``None`` for an honest one.
    """

    config: RunSettings
    dataset: Dataset
    model: nn.Module
    clients: Mapping[int, Client]
    audit: Audit
    unattacked: LabelledExamples
    states: ClientStates = field(default_factory=fresh_states)
    server_attack: ServerAttack | None = None

    @classmethod
    def of_federation(cls, federation: Federation) -> "Experiment":
        """Build the experiment that attacks the clients of ``federation``, during or after the training."""
        return cls(
            config=federation.config,
            dataset=federation.dataset,
            model=federation.model,
            clients=federation.clients,
            audit=federation.audit,
            unattacked=federation.dataset.test,
            server_attack=federation.server_attack,
        )

    @property
    def defense(self) -> Defense:
        return next(iter(self.clients.values())).defense

    @property
    def plan(self) -> LocalPlan:
        return next(iter(self.clients.values())).plan

    @property
    def _input_shape(self) -> tuple[int, ...]:
        return next(iter(self.clients.values())).examples.input_shape

    @property
    def transforms(self) -> bool:
        """Say whether the model sees other images than the truth behind what is intercepted."""
        return sees_other_images(self.defense, self.plan, self.audit.uploads)

    def interceptor(self, sink: Sink) -> Interceptor:
        """Build the interceptor that turns uploads into observations and passes them to ``sink``."""
        examples = next(iter(self.clients.values())).examples
        return Interceptor(
            model=self.model,
            plan=self.plan,
            input_shape=self._input_shape,
            num_classes=examples.num_classes,
            sink=sink,
            side_information=side_information_of(
                self.config.threat_model, self.clients, batch_size=self.config.batch_size, seed=self.config.seed
            ),
        )

    def observe(self, sent: ModelState, *, round: int = 0) -> list[Observation]:
        """Intercept the audit's probes where clients are sent ``sent``, without a training.

        Or what a malicious server makes of it.
        """
        found: list[Observation] = []
        interceptor = self.interceptor(found.append)
        for probe in counted("victim", self.audit.probes):
            client, state = self.clients[probe.client], self.states[probe.client]

            def ask(
                values: ModelState, client: Client = client, state: ClientState = state, number: int = probe.number
            ) -> Upload:
                return client.probe(values, state, round=round, probe=number, batch_size=self.audit.batch_size).upload

            given = (
                self.server_attack.question(self.model, sent, probe.client, ask)
                if self.server_attack
                else (sent, ask(sent))
            )
            interceptor.capture(probe.in_round(round), sent=given[0], upload=given[1], states=self.states.__getitem__)
        return found

    def ground_truth(self) -> GroundTruth:
        """Return what was behind the updates."""
        return GroundTruth(clients=self.clients, batch_size=self.config.batch_size, states=self.states)

    def knowledge(self, truth: GroundTruth) -> AttackerKnowledge:
        """Return what the attackers know; the labels are those of ``truth``."""

        def labels(observation: Observation) -> Tensor:
            return (truth.replay(observation).transformed if self.transforms else truth.batch(observation.id)).labels

        def lengths(observation: Observation) -> Tensor:
            return (truth.batch(observation.id).inputs >= 0).sum(1)

        return AttackerKnowledge(
            same_data=data_names(self.clients),
            labels=labels if self.config.threat_model.knows_labels else None,
            public=public_examples(self.config.threat_model.public_images, self.unattacked),
            defense=(self.defense.parts or None) if self.config.threat_model.knows_defense else None,
            remembers=self.config.attack.get("start") == "previous",
            lengths=lengths if self._tells_lengths else None,
        )

    def judge(self, truth: GroundTruth) -> Judge:
        """Build the judge that scores by ``truth``."""
        return Judge(
            truth=truth,
            transforms=self.transforms,
            distorts=bool(self.defense.parts) and not private_names(self.model, self.defense),
            functions=build_metrics(self.config.bpki, self.config.evaluator, self.dataset),
            tracer=Tracer(
                participants=PARTICIPANTS if self.config.tracing is None else self.config.tracing,
                clients=self.clients,
                queries=self.config.tracing_queries,
                seed=self.config.seed,
            ),
            vocabulary=self._vocabulary,
            schema=schema_of(self.model),
            others=unattacked_others(
                self.unattacked,
                self.config.candidates,
                seed=self.config.seed,
                name=self.dataset.name,
                moved=self.transforms,
            ),
            augments=self.transforms and not (self.defense.examples or self.defense.data),
        )

    def stage(self, attack: ReconstructionAttack, folder: RunFolder, monitor: Monitor) -> AttackStage:
        """Build the stage that attacks what is intercepted, by ``attack``, and records the results in ``folder``."""
        truth = self.ground_truth()
        return AttackStage(
            attack=ServerReading(server=self.server_attack, attack=attack) if self.server_attack else attack,
            seed=self.config.seed,
            threads=self.config.attack_threads,
            knowledge=self.knowledge(truth),
            judge=replace(self.judge(truth), prior=trained_on(attack, self._input_shape) is not None),
            folder=folder,
            monitor=monitor,
            films=self.config.films,
        )

    @property
    def _vocabulary(self) -> Vocabulary | None:
        train = self.dataset.train
        return train.vocabulary if isinstance(train, TextExamples) else None

    def threat_model(self) -> list[str]:
        """Say in sentences who attacks, and what is seen and known."""
        return describe_threats(
            self.model,
            self.plan,
            self.audit,
            self.defense,
            self._assumed_knowledge(),
            secure_aggregation=self.config.secure_aggregation["name"],
            server=self.server_attack,
            guarded="_target_" in self.config.guard,
        )

    def _assumed_knowledge(self) -> Knowledge:
        """Return the knowledge of the strongest attacker, before there is an update: its tensors are empty."""
        given, nothing, defense = self.config.threat_model, torch.empty(0), self.defense
        adaptive = given.knows_defense and bool(defense.parts)
        kind = torch.float if self._vocabulary is None else torch.long
        return Knowledge(
            labels=nothing if given.knows_labels else None,
            defense=defense.parts if adaptive else None,
            same_data="" if adaptive and not defense.changes_images else None,
            public_images=torch.empty(given.public_images, dtype=kind) if given.public_images else None,
            previous=nothing if self.config.attack.get("start") == "previous" else None,
            private=ModelState({}, {}) if defense.private else None,
            colluder=given.colluder if defense.private or given.features_of == "trained" else None,
            features=nothing if given.knows_features else None,
            features_at=given.features_at,
            front=ModelState({}, {}) if given.knows_features and given.features_of == "trained" else None,
            lengths=nothing if self._tells_lengths else None,
        )

    @property
    def _tells_lengths(self) -> bool:
        return self._vocabulary is not None and self.config.threat_model.knows_lengths
