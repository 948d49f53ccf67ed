"""Train, intercept, attack, evaluate, report: one configuration, one folder."""

from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.config import to_yaml
from fl_privacy.data import partition_table
from fl_privacy.errors import UserError
from fl_privacy.experiment.attack_stage import AttackStage
from fl_privacy.experiment.attacker_knowledge import attacker_knowledge_of, insider_of
from fl_privacy.experiment.backend import Backend
from fl_privacy.experiment.baseline import baseline_config, undefended_accuracy
from fl_privacy.experiment.build import (
    Federation,
    build_attack,
    build_federation,
    build_functions,
    clients_of,
    positive,
)
from fl_privacy.experiment.calibration import calibrated
from fl_privacy.experiment.ground_truth import fresh_states, ground_truth_of, trains_on_others, transformed_of
from fl_privacy.experiment.monitor import Monitor
from fl_privacy.experiment.previous_reconstructions import previous_reconstructions_of
from fl_privacy.experiment.privacy import privacy_of
from fl_privacy.experiment.public import public_examples
from fl_privacy.experiment.run_folder import finished_before, open_folder
from fl_privacy.experiment.threat_model import threat_model, who_draws
from fl_privacy.experiment.tracing import tracer_of
from fl_privacy.experiment.update_distortion import update_distortion_of
from fl_privacy.experiment.weights import MODEL, write_weights
from fl_privacy.federation import Evaluation, RoundReport, evaluate_model
from fl_privacy.interception import Interceptor
from fl_privacy.interception.capture_writer import CaptureWriter
from fl_privacy.report import write_report
from fl_privacy.results import RunFolder
from fl_privacy.types import Observation

CAPTURES = "captures"
"""Folder of the intercepted updates within a run's folder."""


def run_experiment(config: DictConfig, backend: Backend, monitor: Monitor, *, simulated: bool = True) -> Path:
    """Run ``config``, or find that it has been run; returns its folder.

    Args:
        config: of the run.
        backend: carries its messages.
        monitor: told of the progress.
        simulated: whether clients draw from the run's seed; deployed ones draw from secrets of their own.

    Raises:
        UserError: a setting is wrong, parts do not fit, or all clients of a round failed.
    """
    _expect_no_setting_of_attacks(config)
    config = calibrated(config)
    if (done := finished_before(config, "run", monitor)) is not None:
        return done
    monitor.say(
        f"Preparing data {config.choices.data}, model {config.choices.model} and {config.federation.clients} clients"
    )
    federation, attack = build_federation(config), build_attack(config)
    run_baseline(config, backend, monitor)
    with open_folder(config, "run") as folder:
        if folder.finished:
            monitor.say("Another process has just finished it.")
        else:
            _run(config, federation, attack, folder, backend=backend, monitor=monitor, simulated=simulated)
            folder.finish(undefended_accuracy=undefended_accuracy(config) if _wants_baseline(config) else None)
        write_report([folder.path])
    return folder.path


def run_baseline(config: DictConfig, backend: Backend, monitor: Monitor) -> None:
    """Train as ``config`` does but undefended, where its accuracy is to be compared and no such run is found."""
    if _wants_baseline(config) and undefended_accuracy(config) is None:
        monitor.say("First the same training without defense, to compare accuracy with (twin=false skips it).")
        run_experiment(baseline_config(config), backend, monitor)


def _expect_no_setting_of_attacks(config: DictConfig) -> None:
    for key in ("weights", "captured"):
        if config[key] is not None:
            raise UserError(
                f"{key} is expected with `fl-privacy attack`, but got {config[key]!r} with run, which trains from fresh"
                f" values; set {key}=null."
            )


def _wants_baseline(config: DictConfig) -> bool:
    return bool(config.twin) and config.choices.defense != "none"


def _run(
    config: DictConfig,
    federation: Federation,
    attack: ReconstructionAttack | None,
    folder: RunFolder,
    *,
    backend: Backend,
    monitor: Monitor,
    simulated: bool,
) -> None:
    plan, audit, dataset = federation.server.local_plan, federation.audit, federation.dataset
    folder.write_environment(seed=config.seed)
    delta, accountant = config.privacy.delta, config.privacy.accountant
    privacy = privacy_of(federation, delta=delta, accountant=accountant)
    lines = threat_model(config, federation.model, plan, audit, federation.defense)
    folder.write_threat_model([*lines, who_draws(simulated), privacy.statement])
    folder.add_privacy(delta=delta, accountant=accountant, missing=privacy.missing)
    table = partition_table(dataset.train, [p.indices for p in federation.clients.values()])
    folder.write_partition(table.tolist(), dataset.train.class_names)
    states = fresh_states()
    stage = (
        AttackStage(
            attack=attack,
            truth=ground_truth_of(federation.clients, config.batch_size, states),
            folder=folder,
            seed=config.seed,
            knows_labels=config.knows_labels,
            threads=positive(config.attack_threads, "attack_threads"),
            monitor=monitor,
            public=public_examples(config, dataset.test),
            disturbance=update_distortion_of(federation.clients, config.batch_size, states)
            if federation.defense.parts and not federation.server.personal
            else None,
            guesses=previous_reconstructions_of(config, federation.clients),
            informed=attacker_knowledge_of(federation.defense, federation.clients) if config.knows_defense else None,
            functions=build_functions(config, dataset),
            tracer=tracer_of(config, federation.clients),
            transformed=transformed_of(federation.clients, config.batch_size, states)
            if trains_on_others(federation.defense, plan, audit.target)
            else None,
        )
        if attack
        else None
    )
    waiting: list[Observation] = []
    capture = CaptureWriter(folder.path / CAPTURES) if config.intercept.save else None

    def intercepted(observation: Observation) -> None:
        if capture:
            capture.write(observation)
        if stage:
            waiting.append(observation)

    def attack_waiting() -> None:
        if stage and waiting:
            stage(waiting)
            waiting.clear()

    def on_round(report: RoundReport) -> None:
        evaluation = report.evaluation
        if evaluation is None and report.round in federation.server.tested and not federation.server.personal:
            evaluation = _evaluate(federation)
        folder.add_round(
            round=report.round,
            clients=report.clients,
            excluded=report.excluded,
            train_loss=report.train_loss,
            seconds=report.seconds,
            defense_seconds=report.defense_seconds,
            bytes_up=report.upload_bytes,
            accuracy=evaluation.accuracy if evaluation else None,
            test_loss=evaluation.loss if evaluation else None,
            epsilon=privacy.epsilon(report.round),
        )
        monitor.round_done(report, evaluation, privacy.epsilon(report.round))
        if config.intercept.when == "during":
            attack_waiting()

    with monitor.training(federation.rounds):
        backend(
            federation.server,
            partial(clients_of, to_yaml(config)),
            rounds=federation.rounds,
            audit=audit,
            interceptor=Interceptor(
                model=federation.model,
                plan=plan,
                input_shape=dataset.train.input_shape,
                num_classes=dataset.train.num_classes,
                sink=intercepted,
                insider=insider_of(config, federation.clients),
            ),
            on_round=on_round,
        )
    write_weights(folder.path / MODEL, federation.server.state)
    attack_waiting()


def _evaluate(federation: Federation) -> Evaluation:
    return evaluate_model(
        federation.model.to(federation.device),
        federation.server.state.to(federation.device),
        federation.dataset.test,
        device=federation.device,
    )
