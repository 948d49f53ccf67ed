"""Build all parts of a run, an attack or a measurement."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.attacks.attack import trained_on
from fl_privacy.attacks.malicious import ServerAttack, ThreatLevel
from fl_privacy.attacks.malicious.server_attack import BLOCK
from fl_privacy.data import Dataset, LabelledExamples, Vocabulary, texts_of
from fl_privacy.defenses import ClientState, Defense
from fl_privacy.effects import Description, mixing
from fl_privacy.errors import UserError
from fl_privacy.federation import Audit, Client, Probe, Server, ServerPlan, private_names, public_state
from fl_privacy.federation.interception import Interceptor
from fl_privacy.federation.server_optimizer import ServerOptimizer
from fl_privacy.models.gradients.memory import resolve_device
from fl_privacy.progress import counted
from fl_privacy.runs import build
from fl_privacy.runs.attack_stage import PARTICIPANTS, AttackStage, Judge, Tracer
from fl_privacy.runs.attacker_knowledge import (
    MOST_PUBLIC,
    AttackerKnowledge,
    data_names,
    public_examples,
    side_information_of,
)
from fl_privacy.runs.config import RunSettings
from fl_privacy.runs.distractors import unattacked_others
from fl_privacy.runs.folder import RunFolder
from fl_privacy.runs.ground_truth import ClientStates, GroundTruth, SummedProbes, sees_other_images
from fl_privacy.runs.run_location import Monitor
from fl_privacy.runs.server_attack import ServerReading, build_server_attack
from fl_privacy.runs.weights import load_weights
from fl_privacy.types import Knowledge, LocalPlan, ModelState, Observation, Upload, VictimId
from fl_privacy.types.schema import schema_of

VICTIM = 0  # attacked client if nobody trains


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """Objects that a run, an attack or a measurement needs, built from its configuration."""

    config: RunSettings
    dataset: Dataset
    model: nn.Module
    clients: Mapping[int, Client]  # clients by id; without a training, those attacked and those that collude
    server: Server  # server at the initial values, or at ``config.weights``
    audit: Audit
    unattacked: LabelledExamples  # examples without victims
    # private states of the clients when they are attacked
    states: ClientStates = field(default_factory=lambda: defaultdict(ClientState))
    server_attack: ServerAttack | None = None
    # sums over clients that the attacker sees if nobody trains; ``None`` if it sees each upload
    masking: SummedProbes | None = None
    excluded: dict[int, frozenset[int]] = field(default_factory=dict)  # clients left out of a round's mean, by round

    @property
    def rounds(self) -> int:
        return self.config.federation.rounds

    @property
    def device(self) -> torch.device:
        return resolve_device(self.config.device)

    @property
    def first(self) -> Client:
        return next(iter(self.clients.values()))

    @property
    def defense(self) -> Defense:
        return self.first.defense

    @property
    def plan(self) -> LocalPlan:
        return self.first.plan

    @property
    def transforms(self) -> bool:
        return sees_other_images(self.defense, self.plan, self.audit.uploads)

    def interceptor(self) -> Interceptor:
        examples, config = self.first.examples, self.config
        size = self.audit.batch_size
        side = side_information_of(config.threat_model, self.clients, batch_size=size, seed=config.seed)
        return Interceptor(
            model=self.model,
            plan=self.plan,
            input_shape=examples.input_shape,
            num_classes=examples.num_classes,
            side_information=side,
        )

    def observe(self, sent: ModelState, *, round: int = 0) -> list[Observation]:
        """For each probe, send the model ``sent`` (or a malicious server's own); return the intercepted uploads."""
        found: list[Observation] = []
        interceptor = self.interceptor()
        for probe in counted("victim", self.audit.probes):
            ask = partial(self._ask, probe, round)
            crafts, client = self.server_attack, probe.client
            if crafts and self.masking is not None and self.config.sites:
                aim, victim = crafts.craft(self.model, sent, client), self.clients[client]
                given = self.masking.poisoned(victim, self.states[client], sent, aim, round=round, probe=probe.number)
                upload = ask(given)
            else:
                given, upload = crafts.question(self.model, sent, client, ask) if crafts else (sent, ask(sent))
            seen = interceptor.observe(probe.in_round(round), sent=given, upload=upload, states=self.states.__getitem__)
            found += [seen] if seen else []
        return found

    def _ask(self, probe: Probe, round: int, values: ModelState) -> Upload:
        client, state, number = self.clients[probe.client], self.states[probe.client], probe.number
        if self.masking is not None:
            return self.masking.mean_of_clients(client, state, values, round=round, probe=number)
        return client.probe(values, state, round=round, probe=number, batch_size=self.audit.batch_size).upload

    def ground_truth(self) -> GroundTruth:
        return GroundTruth(
            clients=self.clients, batch_size=self.audit.batch_size, behind=self.behind, states=self.states
        )

    def behind(self, victim: VictimId) -> Sequence[int]:
        """Return the ids of the clients whose data are in the upload ``victim``: several if it is a mean."""
        if not self.config.sites or victim.probe is not None or self.config.threat_model.differences:
            return [victim.client]
        without = {*self.config.sites, *self.excluded.get(victim.round, ())}
        return [client for client in self.server.select(victim.round) if client not in without]

    def knowledge(self, truth: GroundTruth) -> AttackerKnowledge:
        def labels(observation: Observation) -> Tensor:
            return (truth.replay(observation).transformed if self.transforms else truth.batch(observation.id)).labels

        def lengths(observation: Observation) -> Tensor:
            return (truth.batch(observation.id).inputs >= 0).sum(1)

        rule, same_data = self.server.plan, data_names(self.clients)
        changes = bool(self.config.sites) and (rule.fraction < 1 or rule.aggregation == "round_robin")
        return AttackerKnowledge(
            same_data=(lambda victim: None) if changes else same_data,
            labels=labels if self.config.threat_model.knows_labels else None,
            public=public_examples(self.config.threat_model.public_images, self.unattacked),
            defense=self._described if self.config.threat_model.knows_defense else None,
            remembers=self.config.attack.get("start") == "previous",
            lengths=lengths if self._knows_lengths else None,
        )

    @property
    def _described(self) -> Description | None:
        summed = self.masking.parts if self.masking is not None else ()
        return (*self.defense.parts, *summed) or None

    def judge(self, truth: GroundTruth) -> Judge:
        config = self.config
        return Judge(
            truth=truth,
            transforms=self.transforms,
            distorts=bool(self.defense.parts) and not private_names(self.model, self.defense),
            functions=build.build_metrics(config.bpki, config.evaluator, self.dataset, self.unattacked),
            tracer=Tracer(
                participants=PARTICIPANTS if config.tracing is None else config.tracing,
                clients=self.clients,
                queries=config.tracing_queries,
                seed=config.seed,
            ),
            vocabulary=self._vocabulary,
            schema=schema_of(self.model),
            others=unattacked_others(self.unattacked, config.candidates, seed=config.seed, name=self.dataset.name),
            augments=self.transforms and not (self.defense.examples or self.defense.data),
        )

    def stage(self, attack: ReconstructionAttack, folder: RunFolder, monitor: Monitor) -> AttackStage:
        truth, public = self.ground_truth(), self.config.threat_model.public_images
        # with an image prior, guesses need a control
        prior = self.dataset.train.modality.pixels and (
            public != 0 or trained_on(attack, self.first.examples.input_shape) is not None
        )
        return AttackStage(
            attack=ServerReading(server=self.server_attack, attack=attack) if self.server_attack else attack,
            seed=self.config.seed,
            threads=self.config.attack_threads,
            jobs=self.config.jobs,
            knowledge=self.knowledge(truth),
            judge=replace(self.judge(truth), prior=prior),
            folder=folder,
            monitor=monitor,
            films=self.config.films,
        )

    @property
    def _vocabulary(self) -> Vocabulary | None:
        texts = texts_of(self.dataset.train)
        return None if texts is None else texts.vocabulary

    def assumed_knowledge(self) -> Knowledge:
        """Return what the strongest attacker knows: a placeholder value for each known fact, ``None`` for others."""
        given, nothing, defense = self.config.threat_model, torch.empty(0), self.defense
        public = min(MOST_PUBLIC, len(self.unattacked)) if given.public_images is None else given.public_images
        adaptive = given.knows_defense and self._described is not None
        return Knowledge(
            labels=nothing if given.knows_labels else None,
            defense=self._described if adaptive else None,
            same_data="" if adaptive and (mixing(defense.parts) or not defense.changes_images) else None,
            public_images=torch.empty(public) if public else None,
            previous=nothing if self.config.attack.get("start") == "previous" else None,
            private=ModelState({}, {}) if defense.private else None,
            colluder=given.colluder if defense.private or given.features_of == "trained" else None,
            features=nothing if given.knows_features else None,
            features_at=given.features_at,
            front=ModelState({}, {}) if given.knows_features and given.features_of == "trained" else None,
            lengths=nothing if self._knows_lengths else None,
        )

    @property
    def _knows_lengths(self) -> bool:
        return self._vocabulary is not None and self.config.threat_model.knows_lengths


def build_setup(config: RunSettings) -> Setup:
    """Build the parts of a run; ``UserError`` if a setting is out of range or parts do not fit."""
    dataset, clients = build.data_and_clients(config)
    return Setup(
        config=config,
        dataset=dataset,
        model=clients[0].model,
        clients=clients,
        server=server_of(config, clients),
        audit=build.audit_of(config, config.federation.rounds, clients),
        unattacked=dataset.test,
        server_attack=build_server_attack(config.server, dataset.test, dataset.train),
    )


def build_untrained(config: RunSettings) -> Setup:
    """Build data, model, an untrained client and perhaps a colluding one; ``UserError`` if settings do not fit."""
    dataset, victims, batch_size = build.build_dataset(config.data), config.victims, config.batch_size
    attacked, unattacked = dataset.test, dataset.train
    if config.split == "train":
        attacked, unattacked = unattacked, attacked
    plan = build.build_plan(config.federation.plan, config.model)
    model = build.agreed_network(config, dataset, clients=1 if config.threat_model.colluder is None else 2)
    owner = replace(
        build.prepared_client(config, plan, dataset, model, attacked), guard=build.build_guard(config, dataset)
    )
    crafts = build_server_attack(config.server, unattacked, attacked)
    if config.sites and crafts is not None and crafts.level is not ThreatLevel.PARAMETERS:
        raise UserError(
            "threat_model.observer=another_site is expected with server=honest, or with one that crafts values of the"
            f" model alone such as trap_weights, but got server={config.choices['server']}; set server=trap_weights."
        )
    sites = [replace(owner, id=k, examples=unattacked, indices=torch.arange(len(unattacked))) for k in config.sites]
    masking = SummedProbes.of(config, tuple(sites), server_plan_of(config))
    total = batch_size if masking is None else masking.total
    if victims * total > owner.number_of_examples:
        raise UserError(
            f"{victims} victims of {total} examples are expected to fit into the {config.split} split, but there"
            f" are {owner.number_of_examples} examples; lower victims or batch_size."
        )
    if config.threat_model.colluder == VICTIM:
        raise UserError(f"threat_model.colluder is expected not to be the victim, but got {VICTIM}; set it to 1.")
    colluders = () if config.threat_model.colluder is None else (config.threat_model.colluder,)
    clients = {VICTIM: owner, **{client: replace(owner, id=client) for client in colluders}}
    return Setup(
        config=config,
        dataset=dataset,
        model=model,
        clients=clients,
        server=server_of(config, clients),
        audit=Audit(probes=tuple(Probe(VICTIM, k) for k in range(victims)), batch_size=total),
        unattacked=unattacked,
        server_attack=crafts,
        masking=masking,
    )


def server_of(config: RunSettings, clients: Mapping[int, Client]) -> Server:
    """Build the server for ``clients`` with the initial model, or with that of ``config.weights``."""
    first, rounds, every = next(iter(clients.values())), config.federation.rounds, config.evaluate_every
    state = public_state(first.model, first.defense)
    if config.weights:  # the block that a malicious server added is new
        state = load_weights(Path(config.weights), state, fresh=BLOCK)
    return Server(
        state=state,
        local_plan=first.plan,
        plan=server_plan_of(config),
        clients=sorted(clients),
        seed=config.seed,
        personal=bool(private_names(first.model, first.defense)),
        tested=frozenset({*range(every, rounds + 1, every), rounds}),
    )


def server_plan_of(config: RunSettings) -> ServerPlan:
    """Build the server's rules; ``UserError`` if a setting is out of range."""
    section = config.federation
    return ServerPlan(
        aggregation=section.aggregation,
        fraction=section.fraction,
        lr=section.server_lr,
        norm_factor=section.norm_factor,
        optimizer=ServerOptimizer(
            name=section.server_optimizer,
            momentum=section.server_momentum,
            beta2=section.server_beta2,
            tau=section.server_tau,
        ),
        noise=section.server_noise,
    )
