"""Train, intercept, attack, evaluate and report: one configuration, one folder."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Protocol

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.data import images_of, partition_table
from fl_privacy.errors import UserError
from fl_privacy.federation import Failure, Round, attempt, evaluate_model
from fl_privacy.federation.interception import CaptureWriter, ObservationBuffer
from fl_privacy.federation.interception.capture_writer import MOST_HELD
from fl_privacy.runs.another_site import look_from_site
from fl_privacy.runs.attack_stage import WaitingAttack
from fl_privacy.runs.build import attack_of_run, clients_of
from fl_privacy.runs.canary_stage import CanaryStage
from fl_privacy.runs.config import RunSettings, compose_run
from fl_privacy.runs.folder import RunFolder, find_baseline
from fl_privacy.runs.folder.ongoing import CAPTURES, WAITING
from fl_privacy.runs.inference_stage import InferenceStage
from fl_privacy.runs.privacy import UNKNOWN, Privacy, calibrated, privacy_of
from fl_privacy.runs.run_location import Backend, Monitor, RunLocation
from fl_privacy.runs.server_attack import expect_readable_sum, hand_over
from fl_privacy.runs.setup import Setup, build_setup
from fl_privacy.runs.threat_model import ClientLocation, describe_image_prior, describe_threats, who_draws
from fl_privacy.runs.weights import MODEL, model_after, write_weights
from fl_privacy.types import Observation

logger: logging.Logger = logging.getLogger(__name__)
SIMULATED_CLIENTS = ClientLocation()


class Reader(Protocol):
    """A stage of a run that receives intercepted uploads: it saves, attacks or examines them, and records results."""

    def see(self, observation: Observation) -> None: ...

    def end_round(self) -> None: ...

    def finish(self) -> None: ...


def run_experiment(
    config: RunSettings,
    backend: Backend,
    monitor: Monitor,
    *,
    clients: ClientLocation = SIMULATED_CLIENTS,
    early: int | None = None,
) -> Path:
    """Run ``config`` unless it has finished; return its folder. ``UserError`` if settings do not fit or clients fail.

    ``backend``: runs the rounds, in this process or by Flower. ``clients``: whether clients are simulated or hold their
    own data. ``early``: number of a round after which the global model is saved too.
    """
    if config.captured is not None:
        raise UserError(
            f"captured is expected with `fl-privacy attack`, but got {config.captured!r} with run, which captures its"
            " own updates; set captured=null."
        )
    config = calibrated(config)
    place = RunLocation("run", config)
    if (done := place.finished_before(monitor)) is not None:
        return done
    monitor.say(
        f"Preparing data {config.called('data')}, model {config.called('model')} and {config.federation.clients}"
        f" {'client' if config.federation.clients == 1 else 'clients'}"
    )
    setup, attack = build_setup(config), attack_of_run(config)
    expect_readable_sum(setup.server_attack, config)
    examples, prior = images_of(setup.dataset.train), list[str]()
    if examples is not None:
        prior = describe_image_prior(attack, examples.input_shape, None if clients.own_data else examples.images)
    run_baseline(config, backend, monitor)
    with place.recording(monitor) as folder:
        if not folder.finished:
            delta, accountant = config.privacy.delta, config.privacy.accountant
            privacy = UNKNOWN if clients.own_data else privacy_of(setup, delta=delta, accountant=accountant)
            saves = bool(config.intercept.save)
            waiting = ObservationBuffer(folder.path / (CAPTURES if saves else WAITING), most=MOST_HELD, written=saves)
            readers = readers_of(setup, attack, waiting, folder, monitor, privacy=privacy, clients=clients)
            describe(setup, folder, privacy, prior, clients)
            try:
                train(setup, backend, readers, folder, monitor, privacy=privacy, early=early)
                for reader in readers:
                    reader.finish()
            finally:
                waiting.clear()
            folder.finish(undefended_accuracy=_undefended_accuracy(place) if config.compares else None)
    return place.path


def run_baseline(config: RunSettings, backend: Backend, monitor: Monitor) -> None:
    """Train ``config`` without a defense, if a comparison needs the accuracy and no such run exists."""
    if config.compares and _undefended_accuracy(RunLocation("run", config)) is None:
        monitor.say("First the same training without defense, to compare accuracy with (baseline=false skips it).")
        none = compose_run(["defense=none", "attack=none", "inference=none"])
        changes: dict[str, object] = {"intercept.save": False, "overwrite": False, "name": "baseline"}
        for group in ("defense", "attack", "inference"):
            changes |= {group: getattr(none, group), f"choices.{group}": "none"}
        run_experiment(config.changed(changes), backend, monitor)


def _undefended_accuracy(place: RunLocation) -> float | None:
    baseline = find_baseline(place.path.parent, place.identified)
    return baseline[1] if baseline else None


def describe(setup: Setup, folder: RunFolder, privacy: Privacy, prior: Sequence[str], clients: ClientLocation) -> None:
    """Record environment, threat model, defense and guarantee before training; ``prior``: sentences on image priors."""
    config, train = setup.config, setup.dataset.train
    start = ["The training starts at weights trained elsewhere."] if config.weights else []
    folder.write_environment(seed=config.seed)
    folder.write_threat_model([*describe_threats(setup), *start, *prior, who_draws(clients), privacy.statement])
    folder.write_defense(setup.defense.parts)
    folder.add_privacy(
        delta=config.privacy.delta,
        accountant=config.privacy.accountant,
        missing=privacy.missing,
        unit=privacy.unit,
        covered=privacy.covered,
    )
    if not clients.own_data:
        table = partition_table(train, [client.indices for client in setup.clients.values()])
        folder.write_partition(table.tolist(), train.class_names)


def readers_of(
    setup: Setup,
    attack: ReconstructionAttack | None,
    waiting: ObservationBuffer,
    folder: RunFolder,
    monitor: Monitor,
    *,
    privacy: Privacy,
    clients: ClientLocation,
) -> list[Reader]:
    """Build the stages that get each intercepted upload (saving, attack, inference, canaries), in calling order."""
    config, found = setup.config, list[Reader]()
    if config.intercept.save:
        found.append(CaptureWriter(folder.path / CAPTURES))
    if attack:
        stage, of_training = setup.stage(attack, folder, monitor), config.intercept.uploads == "update"
        during = config.intercept.when == "during"
        found.append(WaitingAttack(stage=stage, waiting=waiting, of_training=of_training, during=during))
    if inference := InferenceStage.of(setup, folder, monitor, privacy, trains=True):
        found.append(inference)
    if not clients.own_data and (canaries := CanaryStage.of(setup, folder, monitor, privacy)):
        found.append(canaries)
    return found


def train(
    setup: Setup,
    backend: Backend,
    readers: Sequence[Reader],
    folder: RunFolder,
    monitor: Monitor,
    *,
    privacy: Privacy,
    early: int | None = None,
) -> None:
    """Run all rounds, and pass intercepted updates to ``readers``; ``early``: round after which the model is saved."""
    server, device, interceptor = setup.server, setup.device, setup.interceptor()
    audit, means = hand_over(server, setup.server_attack, setup.audit, interceptor)
    seen: Callable[[Round], Iterator[Observation]] = lambda round: chain(round, means())  # noqa: E731
    if setup.config.sites:
        audit, seen = look_from_site(setup, server, interceptor)
    clients = partial(clients_of, setup.config)
    rounds = backend(server, clients, rounds=setup.rounds, audit=audit, interceptor=interceptor)
    with monitor.training(setup.rounds), closing(rounds):
        for round in rounds:
            for observation in seen(round):
                for reader in readers:
                    if isinstance(shown := attempt(partial(reader.see, observation)), Failure):
                        logger.warning("The update %s could not be intercepted: %s", observation.id, shown.reason)
                        break
            report, evaluation = round.report, round.report.evaluation
            if report.round == early:
                write_weights(folder.path / model_after(early), server.state)
            if evaluation is None and report.round in server.tested and not server.personal:
                model, state = setup.model.to(device), server.state.to(device)
                evaluation = evaluate_model(model, state, setup.dataset.test, device=device)
            folder.add_round(report, evaluation, epsilon=privacy.epsilon(report.round))
            monitor.round_done(report, evaluation, privacy.epsilon(report.round))
            for reader in readers:
                reader.end_round()
    write_weights(folder.path / MODEL, server.state)
