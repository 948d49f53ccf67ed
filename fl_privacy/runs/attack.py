"""Attack without training: fresh or given weights, or captured updates."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.attacks.inference import About
from fl_privacy.data import images_of
from fl_privacy.errors import UserError, blamed_on
from fl_privacy.federation.interception import only, stored_observations
from fl_privacy.runs.app import report_app
from fl_privacy.runs.app_captures import app_captures, as_captured, captures_of, expect_of, load_app
from fl_privacy.runs.build import attack_of_run, build_inferences
from fl_privacy.runs.config import RunSettings
from fl_privacy.runs.destination import Destination, Monitor
from fl_privacy.runs.folder import RunFolder
from fl_privacy.runs.inference_stage import InferenceStage
from fl_privacy.runs.privacy import calibrated
from fl_privacy.runs.setup import Setup, build_setup, build_untrained
from fl_privacy.runs.threat_model import LOOKED_AT, describe_image_prior, describe_threats, expect_readable_updates
from fl_privacy.types import Observation


def attack_experiment(config: RunSettings, monitor: Monitor) -> Path:
    """Attack by ``config``; return the folder of the results, or raise ``UserError`` if there is nothing to attack."""
    name = config.secure_aggregation["name"]
    if name != "secagg" or config.captured or "_target_" in config.server:
        expect_readable_updates(name, "The command attack")
    config = calibrated(config)
    if config.captured and (captures := app_captures(config.captured)) is not None:
        return attack_app(config, captures, monitor)
    if config.truth is not None:
        raise UserError(
            "truth is expected with captured=DIR of an app that this package did not write, but there are none; a run's"
            " own configuration says what the truth was."
        )
    if config.captured:
        config = as_captured(config)
        expect_readable_updates(config.secure_aggregation["name"], "The command attack")
    place = Destination("attack", config)
    if (done := place.finished_before(monitor)) is not None:
        return done
    attack, inferences = attack_of_run(config), build_inferences(config.inference)
    if attack is None and not inferences:
        raise UserError("An attack is expected, but got attack=none; choose one that `fl-privacy list` shows.")
    of_training = [name for name, inference in inferences.items() if inference.about is not About.ATTRIBUTE]
    if of_training and config.captured is None:
        raise UserError(
            f"inference={of_training[0]} is expected with `fl-privacy run`, or with captured=DIR of a run with"
            " intercept.save=true: it asks about what clients train on, and here nobody trains."
        )
    if config.captured:
        monitor.say(f"Preparing what {config.captured} holds")
        setup, observations = captured_updates(config)
    else:
        monitor.say(
            f"Preparing data {config.called('data')}, model {config.called('model')} and"
            f" {config.victims} {'victim' if config.victims == 1 else 'victims'}"
        )
        setup = build_untrained(config)
        made = f"The victims' upload with defense={config.choices['defense']} and server={config.choices['server']}"
        with blamed_on(made), monitor.working("Making the victims' uploads"):
            observations = setup.observe(setup.server.state)
    threats = describe_threats(setup)
    if not config.captured:
        threats.append(f"The model is {'as trained elsewhere' if config.weights else 'untrained'}.")
    attacked = images_of(setup.first.examples)
    if attack is not None and attacked is not None:
        threats += describe_image_prior(attack, attacked.input_shape, attacked.images)
    with place.recording(monitor) as folder:
        if not folder.finished:
            folder.write_environment(seed=config.seed)
            folder.write_threat_model(threats)
            folder.write_defense(setup.defense.parts)
            attack_and_infer(setup, attack, observations, folder, monitor)
            folder.finish()
    return place.path


def attack_and_infer(
    setup: Setup,
    attack: ReconstructionAttack | None,
    observations: Sequence[Observation],
    folder: RunFolder,
    monitor: Monitor,
) -> None:
    """Run ``attack`` and inference attacks on ``observations``, and record both."""
    if attack is not None:
        trains = setup.config.intercept.uploads == "update"
        setup.stage(attack, folder, monitor).run(only(observations, lambda id: (id.probe is None) == trains))
    if inference := InferenceStage.of(setup, folder, monitor):
        for observation in observations:
            inference.see(observation)
        inference.finish()


def attack_app(config: RunSettings, captures: Path, monitor: Monitor) -> Path:
    """Attack captured updates of a third-party Flower app; ``UserError`` unless they are of the model of ``config``."""
    attack = attack_of_run(config)
    if attack is None:
        raise UserError("An attack is expected, but got attack=none; choose one that `fl-privacy list` shows.")
    app = load_app(captures, config)
    shapes = [observation.input_shape for observation in app.observations[:1]]
    known = [batch.inputs for batch in app.truth().first(LOOKED_AT)]
    alike = bool(known) and all(images.shape == known[0].shape for images in known)
    priors = [describe_image_prior(attack, shape, torch.cat(known) if alike else None) for shape in shapes]
    record = replace(app.record, notes=[sentence for prior in priors for sentence in prior])
    app = replace(app, record=record, adaptive=config.threat_model.knows_defense)
    defense = "+".join(part.name for part in app.captured.defense) or "none"
    name = config.truth or "unknown"
    config = config.changed({"choices.data": Path(name).name, "choices.defense": defense, "choices.federation": "app"})
    place = Destination("attack", config)
    if (done := place.finished_before(monitor)) is not None:
        return done
    with place.recording(monitor) as folder:
        if not folder.finished:
            said = report_app(
                app,
                attack,
                config.choices["attack"],
                folder,
                monitor=monitor,
                seed=config.seed,
                threads=config.attack_threads,
                jobs=config.jobs,
                candidates=config.candidates,
            )
            monitor.say(said)
    return place.path


def captured_updates(config: RunSettings) -> tuple[Setup, Sequence[Observation]]:
    """Return the setup and captured updates of a run; ``UserError`` if there are none, or some of another run."""
    setup = build_setup(config.changed({"weights": None}))
    colluder = config.threat_model.colluder
    inside = None if colluder is None else setup.clients[colluder].architecture()
    observations = stored_observations(captures_of(str(config.captured)), setup.model, inside=inside)
    if not observations:
        raise UserError(
            f"Captured updates are expected in {config.captured}, but there are none; run with intercept.save=true."
        )
    for observation in observations:
        expect_of(setup, observation)
    return setup, observations
