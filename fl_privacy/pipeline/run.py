"""Train, intercept, attack, evaluate, report: one configuration, one folder."""

from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from fl_privacy.config import build_attack, build_federation, participants_of, to_yaml
from fl_privacy.config.build import Federation, positive
from fl_privacy.federation import Evaluation, Interceptor, RoundReport, evaluate_model
from fl_privacy.federation.capture import save_observation
from fl_privacy.pipeline.attack_stage import AttackStage
from fl_privacy.pipeline.backend import Backend
from fl_privacy.pipeline.label import open_folder
from fl_privacy.pipeline.monitor import Monitor
from fl_privacy.pipeline.threat_model import threat_model
from fl_privacy.pipeline.truth import truth_of
from fl_privacy.pipeline.twin import find_twin, twin_config
from fl_privacy.report import write_report
from fl_privacy.results import RunFolder
from fl_privacy.types import Knowledge, Observation


def run_experiment(config: DictConfig, backend: Backend, monitor: Monitor) -> Path:
    """Run ``config``, or find that it has been run; returns its folder.

    Raises:
        UserError: a setting is wrong, parts do not fit, or all clients of a round failed.
    """
    federation = build_federation(config)
    folder = open_folder(config, "run")
    if folder.finished and not config.overwrite:
        monitor.say(f"Finished already; overwrite=true runs it again: {folder.path}")
        return folder.path
    if config.twin and federation.defense.name != "none" and find_twin(config) is None:
        monitor.say("First the same training without defense, to compare accuracy with (twin=false skips it).")
        run_experiment(twin_config(config), backend, monitor)
    _run(config, federation, folder, backend, monitor)
    return folder.path


def _run(config: DictConfig, federation: Federation, folder: RunFolder, backend: Backend, monitor: Monitor) -> None:
    plan, audit, dataset = federation.server.local_plan, federation.audit, federation.dataset
    folder.start(seed=config.seed, threat_model=threat_model(config, plan, audit, federation.defense))
    folder.write_partition([p.indices for p in federation.participants.values()], dataset.train)
    attack = build_attack(config)
    stage = (
        AttackStage(
            attack=attack,
            name=config.choices.attack,
            truth=truth_of(federation.participants, config.batch_size),
            folder=folder,
            seed=config.seed,
            knows_labels=config.knows_labels,
            monitor=monitor,
        )
        if attack
        else None
    )
    waiting: list[Observation] = []

    def intercepted(observation: Observation) -> None:
        if config.intercept.save:
            save_observation(observation, folder.captures())
        if stage:
            waiting.append(observation)

    def attack_waiting() -> None:
        if stage and waiting:
            stage(waiting)
            waiting.clear()

    every = positive(config.evaluate_every, "evaluate_every")

    def on_round(report: RoundReport) -> None:
        due = report.round % every == 0 or report.round == federation.rounds
        evaluation = _evaluate(federation) if due else None
        folder.record_round(report, evaluation)
        monitor.round_done(report, evaluation)
        if config.intercept.when == "during":
            attack_waiting()

    with monitor.training(federation.rounds):
        backend(
            federation.server,
            partial(participants_of, to_yaml(config)),
            rounds=federation.rounds,
            audit=audit,
            interceptor=Interceptor(
                model=federation.model,
                plan=plan,
                input_shape=dataset.train.input_shape,
                num_classes=dataset.train.num_classes,
                sink=intercepted,
                knowledge=Knowledge(defense=federation.defense.public if config.knows_defense else None),
            ),
            on_round=on_round,
        )
    folder.write_model(federation.server.state)
    attack_waiting()
    folder.finish(undefended_accuracy=find_twin(config) if config.twin else None)
    write_report([folder.path])


def _evaluate(federation: Federation) -> Evaluation:
    return evaluate_model(
        federation.model.to(federation.device),
        federation.server.state.to(federation.device),
        federation.dataset.test,
        device=federation.device,
    )
