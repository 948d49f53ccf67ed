"""Attack without training: fresh or given weights, or what a run captured."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from omegaconf import DictConfig

from fl_privacy.config.check import expect_readable_updates
from fl_privacy.data import Examples
from fl_privacy.defenses import Defense
from fl_privacy.errors import UserError
from fl_privacy.experiment.attack_stage import AttackStage
from fl_privacy.experiment.attacker_knowledge import attacker_knowledge_of, insider_of
from fl_privacy.experiment.build import (
    build_attack,
    build_dataset,
    build_defense,
    build_federation,
    build_functions,
    build_network,
    build_plan,
    positive,
    prepare_defense,
    resolve_device,
)
from fl_privacy.experiment.calibration import calibrated
from fl_privacy.experiment.captured import as_captured, captures_of, expect_of
from fl_privacy.experiment.ground_truth import (
    ClientStates,
    fresh_states,
    ground_truth_of,
    trains_on_others,
    transformed_of,
)
from fl_privacy.experiment.monitor import Monitor
from fl_privacy.experiment.previous_reconstructions import previous_reconstructions_of
from fl_privacy.experiment.public import public_examples
from fl_privacy.experiment.run_folder import finished_before, open_folder
from fl_privacy.experiment.threat_model import threat_model
from fl_privacy.experiment.tracing import tracer_of
from fl_privacy.experiment.update_distortion import update_distortion_of
from fl_privacy.experiment.weights import load_weights
from fl_privacy.federation import Participant, public_state
from fl_privacy.interception import Audit, Interceptor, Probe
from fl_privacy.interception.capture_reader import load_observations
from fl_privacy.metrics import MetricFunction
from fl_privacy.progress import counted
from fl_privacy.report import write_report
from fl_privacy.types import Observation, VictimId


@dataclass(frozen=True, kw_only=True, eq=False)
class _Intercepted:
    """Updates to attack, who made them from what and how defended, and the threat model in sentences.

    ``states`` are those that the clients have by then.
    """

    observations: list[Observation]
    participants: Mapping[int, Participant]
    unattacked: Examples
    defense: Defense
    threats: list[str]
    functions: dict[str, MetricFunction]
    states: ClientStates = field(default_factory=fresh_states)


def attack_experiment(config: DictConfig, monitor: Monitor) -> Path:
    """Attack as ``config`` says; returns the folder of the results.

    Raises:
        UserError: a setting is wrong, or there is nothing to attack.
    """
    expect_readable_updates(config, "The command attack")
    config = calibrated(config)
    config = as_captured(config) if config.captured else config
    if (done := finished_before(config, "attack", monitor)) is not None:
        return done
    attack = build_attack(config)
    if attack is None:
        raise UserError("An attack is expected, but got attack=none; choose one that `fl-privacy list` shows.")
    monitor.say(
        f"Preparing what {config.captured} holds"
        if config.captured
        else f"Preparing data {config.choices.data}, model {config.choices.model} and {config.victims} victims"
    )
    found = _captured(config) if config.captured else _fresh(config, monitor)
    defense, participants = found.defense, found.participants
    behind = (participants, config.batch_size, found.states)
    plan, target = participants[0].plan, config.intercept.target if config.captured else "probe"
    with open_folder(config, "attack") as folder:
        if folder.finished:
            monitor.say("Another process has just finished it.")
        else:
            folder.write_environment(seed=config.seed)
            folder.write_threat_model(found.threats)
            AttackStage(
                attack=attack,
                truth=ground_truth_of(*behind),
                folder=folder,
                seed=config.seed,
                knows_labels=config.knows_labels,
                threads=positive(config.attack_threads, "attack_threads"),
                monitor=monitor,
                public=public_examples(config, found.unattacked),
                disturbance=update_distortion_of(*behind) if defense.public and not defense.private else None,
                guesses=previous_reconstructions_of(config, participants),
                informed=attacker_knowledge_of(defense, participants) if config.knows_defense else None,
                functions=found.functions,
                tracer=tracer_of(config, participants),
                transformed=transformed_of(*behind) if trains_on_others(defense, plan, target) else None,
            )(found.observations)
            folder.finish()
        write_report([folder.path])
    return folder.path


def _fresh(config: DictConfig, monitor: Monitor) -> _Intercepted:
    """Victims from a split of the data, behind the model's initial or given weights."""
    dataset, plan, defense = build_dataset(config), build_plan(config), build_defense(config)
    prepare_defense(defense, dataset)
    if config.split not in ("train", "test"):
        raise UserError(f"split is expected to be train or test, but got {config.split!r}.")
    examples = dataset.train if config.split == "train" else dataset.test
    model = build_network(config, dataset)
    initial = public_state(model, defense)
    sent = load_weights(Path(config.weights), initial) if config.weights else initial
    victims, batch_size = positive(config.victims, "victims"), positive(config.batch_size, "batch_size")
    owner = Participant(
        id=0,
        examples=examples,
        indices=torch.arange(len(examples)),
        model=model,
        plan=plan,
        defense=defense,
        seed=config.seed,
        device=resolve_device(config.device),
        threads=positive(config.client_threads, "client_threads"),
    )
    if victims * batch_size > owner.number_of_examples:
        raise UserError(
            f"{victims} victims of {batch_size} examples are expected to fit into the {config.split} split, but there"
            f" are {owner.number_of_examples} examples; lower victims or batch_size."
        )
    if config.colluder == owner.id:
        raise UserError("colluder is expected to be another client than 0, which is the victim; set colluder=1.")
    participants = {0: owner}
    if config.colluder is not None:
        participants[config.colluder] = replace(owner, id=config.colluder)
    audit = Audit(probes=tuple(Probe(0, k) for k in range(victims)), batch_size=batch_size)
    observations: list[Observation] = []
    interceptor = Interceptor(
        model=model,
        plan=plan,
        input_shape=examples.input_shape,
        num_classes=examples.num_classes,
        sink=observations.append,
        insider=insider_of(config, participants),
    )
    states = fresh_states()
    with monitor.working("Making the victims' uploads"):
        for k in counted("victim", range(victims)):
            result = owner.probe(sent, states[0], round=0, victim=k, batch_size=batch_size)
            interceptor.capture(VictimId(0, 0, k), sent=sent, upload=result.upload, states=states.__getitem__)
    threats = threat_model(config, model, plan, audit, defense)
    weights = "as trained elsewhere" if config.weights else "untrained"
    return _Intercepted(
        observations=observations,
        participants={0: owner},
        unattacked=dataset.test if config.split == "train" else dataset.train,
        defense=defense,
        threats=[*threats, f"The model is {weights}."],
        functions=build_functions(config, dataset),
        states=states,
    )


def _captured(config: DictConfig) -> _Intercepted:
    """What a run captured; its own configuration says what the truth was."""
    federation = build_federation(config)
    inside = None if config.colluder is None else federation.participants[config.colluder].architecture()
    observations = load_observations(captures_of(config), federation.model, inside=inside)
    if not observations:
        raise UserError(
            f"Captured updates are expected in {config.captured}, but there are none; run with intercept.save=true."
        )
    for observation in observations:
        expect_of(federation, observation, config)
    threats = threat_model(config, federation.model, federation.server.local_plan, federation.audit, federation.defense)
    return _Intercepted(
        observations=observations,
        participants=federation.participants,
        unattacked=federation.dataset.test,
        defense=federation.defense,
        threats=threats,
        functions=build_functions(config, federation.dataset),
    )
