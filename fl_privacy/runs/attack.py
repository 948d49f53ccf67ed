"""Attack uploads without a training: new ones, or those captured from a run or a third-party app."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.attacks.inference import About
from fl_privacy.data import images_of
from fl_privacy.errors import UserError, blamed_on
from fl_privacy.federation.interception import only, stored_observations
from fl_privacy.federation.interception.captures import CaptureFile
from fl_privacy.files.foreign import expect_regular_files
from fl_privacy.report.audit_file import RECORD, read_captured
from fl_privacy.report.audit_page import AuditRecord
from fl_privacy.report.audit_parts import Captured
from fl_privacy.runs.app import CapturedApp, as_clients_normalize, report_app
from fl_privacy.runs.app_truth import find_images
from fl_privacy.runs.build import ANY_MODEL, attack_of_run, build_inferences, build_network_for
from fl_privacy.runs.config import RunSettings
from fl_privacy.runs.config.parse import LATER, select
from fl_privacy.runs.config.settings import captured_groups, captured_keys
from fl_privacy.runs.config.untrusted import recorded_parts, trusted
from fl_privacy.runs.folder import RunFolder
from fl_privacy.runs.folder.ongoing import CAPTURES, CONFIG, IDENTITY, METRICS
from fl_privacy.runs.folder.read import read_identity
from fl_privacy.runs.folder.records import read_records, records_of
from fl_privacy.runs.inference_stage import InferenceStage
from fl_privacy.runs.privacy import calibrated
from fl_privacy.runs.run_location import Monitor, RunLocation
from fl_privacy.runs.setup import Setup, build_setup, build_untrained
from fl_privacy.runs.threat_model import LOOKED_AT, describe_image_prior, describe_threats, expect_readable_updates
from fl_privacy.types import Observation
from fl_privacy.types.victim_ids import Attacker


def attack_experiment(config: RunSettings, monitor: Monitor) -> Path:
    """Attack captured or new uploads, without training; return the run's folder. ``UserError`` if no attack is set."""
    name = config.secure_aggregation["name"]
    if name != "secagg" or config.captured or "_target_" in config.server:
        expect_readable_updates(name, "The command attack")
    config = calibrated(config)
    if config.captured and (captures := app_captures(config.captured)) is not None:
        return attack_app(config, captures, monitor)
    if config.truth is not None:
        raise UserError(
            f"truth is expected with captured=DIR of a captured app, but got captured={config.captured}; leave truth"
            " out: a run's own configuration names its data."
        )
    if config.captured:
        config = as_captured(config)
        expect_readable_updates(config.secure_aggregation["name"], "The command attack")
    place = RunLocation("attack", config)
    if (done := place.finished_before(monitor)) is not None:
        return done
    attack, inferences = attack_of_run(config), build_inferences(config.inference)
    if attack is None and not inferences:
        raise UserError("An attack is expected, but got attack=none; choose one that `fl-privacy list` shows.")
    of_training = [name for name, inference in inferences.items() if inference.about is not About.ATTRIBUTE]
    if of_training and config.captured is None:
        raise UserError(
            f"inference={of_training[0]} is expected with a training, but got `fl-privacy attack` without captured; use"
            " `fl-privacy run`, or captured=DIR of a run with intercept.save=true."
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
    """Run ``attack`` (if any) and the inference attacks of ``setup`` on ``observations``; record both in ``folder``."""
    if attack is not None:
        trains = setup.config.intercept.uploads == "update"
        setup.stage(attack, folder, monitor).run(only(observations, lambda id: (id.probe is None) == trains))
    if inference := InferenceStage.of(setup, folder, monitor):
        for observation in observations:
            inference.see(observation)
        inference.finish()


def attack_app(config: RunSettings, captures: Path, monitor: Monitor) -> Path:
    """Attack the updates of a third-party Flower app in the folder ``captures``, and return the run's folder."""
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
    place = RunLocation("attack", config)
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
    """Return the setup of the run in ``config.captured``, and the run's updates; ``UserError`` if there are none."""
    setup = build_setup(config.changed({"weights": None}))
    colluder = config.threat_model.colluder
    inside = None if colluder is None else setup.clients[colluder].architecture()
    folder = Path(str(config.captured))
    captures = folder / CAPTURES if (folder / CONFIG).is_file() else folder
    observations = stored_observations(captures, setup.model, inside=inside)
    if not observations:
        raise UserError(
            f"Captured updates are expected in {config.captured}, but there are none; run with intercept.save=true."
        )
    for observation in observations:
        expect_of(setup, observation)
    rounds = records_of(read_records(captures.parent / METRICS)[0], "round", Attacker.PLAIN)
    setup.excluded.update({r["round"]: frozenset(c for c in setup.clients if str(c) in r["excluded"]) for r in rounds})
    return setup, observations


def app_captures(captured: str) -> Path | None:
    """Return the folder of captured updates if ``captured`` belongs to an audit of a third-party app, else ``None``.

    ``captured`` may be the audit's folder, the folder of updates in it, or a folder that holds a single audit.
    """
    folder = Path(captured)
    within = [path.parent for path in sorted(folder.glob(f"audit-*/{RECORD}"))]
    for audited in (folder, folder.parent, *(within if len(within) == 1 else ())):
        if (audited / RECORD).is_file():
            return audited / CAPTURES
    if any((up / CONFIG).is_file() for up in (folder, *folder.absolute().parents[:2])):
        return None
    return folder if folder.is_dir() and any(folder.rglob("*.json")) else None


def load_app(captures: Path, config: RunSettings) -> CapturedApp:
    """Load a third-party app's updates from ``captures``; ``UserError`` unless they fit the model of ``config``."""
    expect_regular_files(captures)
    note = read_captured(captures.parent) or read_captured(captures) or Captured()
    if config.choices["model"] != "custom" and note.model:
        raise UserError(
            f"The model of the app is expected, but got model={config.choices['model']}; say model=custom"
            f" model._target_={note.model}, which runs its code."
        )
    file = CaptureFile(captures, min(captures.rglob("*.json")))
    raw = file.json()
    shape: Any = raw.get("input_shape")
    classes = raw.get("num_classes")
    whole = isinstance(shape, list) and all(isinstance(n, int) and 0 < n <= 4096 for n in shape) and len(shape) == 3
    if not whole or not isinstance(classes, int) or not 0 < classes <= 1_000_000:
        file.refuse(f"is of images {shape!r} of {classes!r} classes")
    named = any(key in config.model for key in ANY_MODEL[1:])  # the user gives one normalization for all
    own = None if named else note.normalization
    given = {} if own is None else {"mean": list(own.mean), "std": list(own.std)}
    model = build_network_for(config.model, tuple(shape), classes, seed=config.seed, **given)
    stated = {} if named else note.normalizations
    observations = as_clients_normalize(stored_observations(captures, model), stated, own)
    record = AuditRecord(app=str(config.captured), captured=note)
    return CapturedApp(observations=observations, source=find_images(config.truth), record=record, every=True)


def expect_of(setup: Setup, observation: Observation) -> None:
    """Raise ``UserError`` if ``observation`` can't be an update of the run of ``setup``."""
    examples, batch_size = setup.dataset.train, setup.config.batch_size
    round, client, probe = observation.id.round, observation.id.client, observation.id.probe
    wrong = None
    if not 1 <= round <= setup.rounds:
        wrong = f"the run had rounds 1..{setup.rounds}"
    elif client not in setup.clients:
        wrong = f"the run had clients 0..{len(setup.clients) - 1}"
    elif probe is not None and (probe + 1) * batch_size > setup.clients[client].number_of_examples:
        wrong = f"client {client} has no such victim of {batch_size} examples"
    elif (observation.input_shape, observation.num_classes) != (examples.input_shape, examples.num_classes):
        wrong = f"it is of {observation.num_classes} classes of images {observation.input_shape}"
    elif observation.plan != setup.server.local_plan.in_round(round, probe=probe is not None):
        wrong = "it was made by another local plan"
    if wrong:
        raise UserError(
            f"{setup.config.captured} is expected to hold updates of the run in its {CONFIG}, but has"
            f" {observation.id}, and {wrong}; remove that one."
        )


def as_captured(config: RunSettings) -> RunSettings:
    """Copy data, model and clients of the captured run into ``config``; ``UserError`` if that run's files disagree."""
    folder = Path(str(config.captured))
    run = next((f for f in (folder, *folder.absolute().parents[:2]) if (f / CONFIG).is_file()), None)
    if run is None:
        raise UserError(
            f"captured is expected to be a run's folder with {CONFIG}, but got {config.captured}; name the folder that"
            " `fl-privacy run intercept.save=true` printed."
        )
    taken = recorded_parts(run / CONFIG, trusted(config.trust))
    if (run / IDENTITY).is_file():  # with other settings, the originals would be others
        recorded = read_identity(run / IDENTITY).config
        known = {key: LATER.get(key) if select(recorded, key) is None else select(recorded, key) for key in taken}
        if changed := [key for key, value in taken.items() if known[key] != value]:
            raise UserError(
                f"{run / CONFIG} is expected to be as the run wrote it, but its {changed[0]} is not the one in"
                f" {IDENTITY}; one of the two was changed, get the folder anew."
            )
    return config.changed(taken)


def expect_not_taken(config: RunSettings, keys: Sequence[str]) -> None:
    """Raise ``UserError`` if ``config`` sets one of ``keys`` to another value than the captured run had."""
    if config.captured is None or app_captures(config.captured) is not None:
        return
    found = as_captured(config)
    groups = captured_groups()
    for key in keys:
        where = f"choices.{key}" if key in groups else key
        same = any(f"{key}.".startswith(f"{taken}.") or taken.startswith(f"{key}.") for taken in captured_keys())
        if key.partition(".")[0] not in groups and not same:
            continue
        asked, recorded = select(config.plain(), where), select(found.plain(), where)
        if asked != recorded:
            raise UserError(
                f"captured={config.captured} brings {key}={recorded} along, but got {key}={asked}; leave {key} out."
            )
