"""Train, intercept, attack, evaluate and report: one configuration, one folder."""

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.data import images_of, partition_table
from fl_privacy.errors import UserError
from fl_privacy.federation import Evaluation, Failure, RoundReport, attempt, evaluate_model
from fl_privacy.federation.interception import CaptureWriter, WaitingUpdates
from fl_privacy.federation.interception.observation_buffer import MOST_HELD
from fl_privacy.runs.attack_stage import AttackStage
from fl_privacy.runs.build import attack_of_run, clients_of
from fl_privacy.runs.canary_stage import CanaryStage
from fl_privacy.runs.config import RunSettings, compose_run
from fl_privacy.runs.destination import Backend, Destination, Monitor
from fl_privacy.runs.folder import RunFolder, find_baseline
from fl_privacy.runs.folder.ongoing import CAPTURES, WAITING
from fl_privacy.runs.inference_judge import Spending
from fl_privacy.runs.inference_stage import InferenceStage
from fl_privacy.runs.privacy import UNKNOWN, Privacy, calibrated, privacy_of
from fl_privacy.runs.server_attack import expect_readable_sum, hand_over
from fl_privacy.runs.setup import Setup, build_setup
from fl_privacy.runs.threat_model import Whereabouts, describe_image_prior, who_draws
from fl_privacy.runs.weights import MODEL, write_weights
from fl_privacy.types import Observation

logger = logging.getLogger(__name__)

SIMULATED_CLIENTS = Whereabouts()


def run_experiment(
    config: RunSettings, backend: Backend, monitor: Monitor, *, clients: Whereabouts = SIMULATED_CLIENTS
) -> Path:
    """Run ``config`` unless it has finished before; return its folder.

    Raises:
        UserError: a setting is wrong, parts do not fit, or all clients of a round failed.
    """
    if config.captured is not None:
        raise UserError(
            f"captured is expected with `fl-privacy attack`, but got {config.captured!r} with run, which captures its"
            " own updates; set captured=null."
        )
    config = calibrated(config)
    place = Destination("run", config)
    if (done := place.finished_before(monitor)) is not None:
        return done
    monitor.say(
        f"Preparing data {config.called('data')}, model {config.called('model')} and {config.federation.clients}"
        f" {'client' if config.federation.clients == 1 else 'clients'}"
    )
    setup, attack = build_setup(config), attack_of_run(config)
    expect_readable_sum(
        setup.server_attack,
        config.choices["server"],
        uploads=config.intercept.uploads,
        shares=config.federation.plan.get("shares"),
    )
    if (examples := images_of(setup.dataset.train)) is None:
        prior = []
    else:
        prior = describe_image_prior(attack, examples.input_shape, None if clients.own_data else examples.images)
    run_baseline(config, backend, monitor)
    with place.open() as folder:
        if folder.finished:
            monitor.say("Another process has just finished it.")
        else:
            run = _Run.of(setup, attack, folder, monitor, clients)
            run.describe(prior)
            try:
                run.train(backend)
            finally:
                run.waiting.clear()
            folder.finish(undefended_accuracy=_undefended_accuracy(place) if config.compares else None)
        place.write_page()
    return place.path


def run_baseline(config: RunSettings, backend: Backend, monitor: Monitor) -> None:
    """Train ``config`` undefended if its accuracy is needed and no such run exists."""
    if config.compares and _undefended_accuracy(Destination("run", config)) is None:
        monitor.say("First the same training without defense, to compare accuracy with (baseline=false skips it).")
        run_experiment(_baseline_config(config), backend, monitor)


def _baseline_config(config: RunSettings) -> RunSettings:
    none = compose_run(["defense=none", "attack=none", "inference=none"])
    changes = {
        "defense": none.defense,
        "attack": none.attack,
        "inference": none.inference,
        "choices.defense": "none",
        "choices.attack": "none",
        "choices.inference": "none",
        "intercept.save": False,
        "overwrite": False,
        "name": "baseline",
    }
    return config.changed(changes)


def _undefended_accuracy(place: Destination) -> float | None:
    baseline = find_baseline(place.path.parent, place.identified)
    return baseline.accuracy if baseline else None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Run:
    setup: Setup
    clients: Whereabouts
    privacy: Privacy
    stage: AttackStage | None
    inference: InferenceStage | None
    canaries: CanaryStage | None
    capture: CaptureWriter | None
    folder: RunFolder
    monitor: Monitor
    waiting: WaitingUpdates

    @classmethod
    def of(
        cls,
        setup: Setup,
        attack: ReconstructionAttack | None,
        folder: RunFolder,
        monitor: Monitor,
        clients: Whereabouts,
    ) -> "_Run":
        config = setup.config
        delta, accountant, saves = config.privacy.delta, config.privacy.accountant, bool(config.intercept.save)
        return cls(
            setup=setup,
            clients=clients,
            privacy=UNKNOWN if clients.own_data else privacy_of(setup, delta=delta, accountant=accountant),
            stage=setup.stage(attack, folder, monitor) if attack else None,
            inference=InferenceStage.of(setup, folder, monitor),
            canaries=None if clients.own_data else CanaryStage.of(setup, folder, monitor),
            capture=CaptureWriter(folder.path / CAPTURES) if saves else None,
            folder=folder,
            monitor=monitor,
            waiting=WaitingUpdates(folder.path / (CAPTURES if saves else WAITING), most=MOST_HELD, written=saves),
        )

    def describe(self, prior: Sequence[str]) -> None:
        config, train = self.setup.config, self.setup.dataset.train
        start = ["The training starts at weights trained elsewhere."] if config.weights else []
        self.folder.write_environment(seed=config.seed)
        self.folder.write_threat_model(
            [*self.setup.threat_model(), *start, *prior, who_draws(self.clients), self.privacy.statement]
        )
        self.folder.write_defense(self.setup.defense.parts)
        self.folder.add_privacy(
            delta=config.privacy.delta,
            accountant=config.privacy.accountant,
            missing=self.privacy.missing,
            unit=self.privacy.unit,
            covered=self.privacy.covered,
        )
        if self.clients.own_data:
            return
        table = partition_table(train, [client.indices for client in self.setup.clients.values()])
        self.folder.write_partition(table.tolist(), train.class_names)

    def train(self, backend: Backend) -> None:
        setup, interceptor = self.setup, self.setup.interceptor()
        audit, attack = setup.audit, setup.server_attack
        take_means: Callable[[], list[Observation]] = list
        if attack is not None:
            audit, take_means = hand_over(setup.server, attack, audit, interceptor)
        clients = partial(clients_of, setup.config)
        rounds = backend(setup.server, clients, rounds=setup.rounds, audit=audit, interceptor=interceptor)
        with self.monitor.training(setup.rounds), closing(rounds):
            for round in rounds:
                for observation in round:
                    self._keep(observation)
                report = round.report
                for observation in take_means():
                    self._keep(observation)
                self._round_done(report)
        write_weights(self.folder.path / MODEL, setup.server.state)
        self._attack_waiting()
        if self.inference:
            self.inference.finish(Spending(epsilon=self.privacy.epsilon, delta=self.setup.config.privacy.delta))
        if self.canaries:
            self.canaries.finish(self.privacy)

    def _keep(self, observation: Observation) -> None:
        """Pass on an intercepted update; an error here only costs the attacker."""
        kept = attempt(partial(self._pass_on, observation))
        if isinstance(kept, Failure):
            logger.warning("The update %s could not be intercepted: %s", observation.id, kept.reason)

    def _pass_on(self, observation: Observation) -> None:
        if self.capture:
            self.capture.write(observation)
        trains = observation.id.probe is None
        if self.stage and trains == (self.setup.config.intercept.uploads == "update"):
            self.waiting.append(observation)
        if self.inference:
            self.inference.see(observation)
        if self.canaries:
            self.canaries.see(observation)

    def _attack_waiting(self) -> None:
        if self.stage and self.waiting:
            self.stage.run(self.waiting)
            self.waiting.clear()

    def _round_done(self, report: RoundReport) -> None:
        evaluation, epsilon = self._evaluation(report), self.privacy.epsilon(report.round)
        self.folder.add_round(report, evaluation, epsilon=epsilon)
        self.monitor.round_done(report, evaluation, epsilon)
        if self.inference:
            self.inference.read()
        if self.canaries:
            self.canaries.read()
        if self.setup.config.intercept.when == "during":
            self._attack_waiting()

    def _evaluation(self, report: RoundReport) -> Evaluation | None:
        server = self.setup.server
        if report.evaluation is not None or report.round not in server.tested or server.personal:
            return report.evaluation
        device = self.setup.device
        return evaluate_model(
            self.setup.model.to(device), server.state.to(device), self.setup.dataset.test, device=device
        )
