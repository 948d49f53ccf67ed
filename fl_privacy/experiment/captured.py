"""What another run captured: its own configuration, and updates that are shown to be of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_privacy.config import RunSettings
from fl_privacy.config.foreign import recorded_parts, trusted
from fl_privacy.config.keys import captured_groups, captured_keys
from fl_privacy.config.reading import select
from fl_privacy.errors import UserError
from fl_privacy.experiment.build import Federation
from fl_privacy.experiment.foreign_captures import app_captures
from fl_privacy.results.occupancy import CAPTURES, CONFIG, IDENTITY
from fl_privacy.results.read import read_identity
from fl_privacy.types import Observation


def expect_of(federation: Federation, observation: Observation) -> None:
    """Refuse an update that is not of ``federation``: its truth could not be found, or would be another's.

    Raises:
        UserError: it is not.
    """
    examples, batch_size = federation.dataset.train, federation.config.batch_size
    round, client, probe = observation.id.round, observation.id.client, observation.id.probe
    wrong = None
    if not 1 <= round <= federation.rounds:
        wrong = f"the run had rounds 1..{federation.rounds}"
    elif client not in federation.clients:
        wrong = f"the run had clients 0..{len(federation.clients) - 1}"
    elif probe is not None and (probe + 1) * batch_size > federation.clients[client].number_of_examples:
        wrong = f"client {client} has no such victim of {batch_size} examples"
    elif (observation.input_shape, observation.num_classes) != (examples.input_shape, examples.num_classes):
        wrong = f"it is of {observation.num_classes} classes of images {observation.input_shape}"
    elif observation.plan != federation.server.local_plan.in_round(round, probe=probe is not None):
        wrong = "it was made by another local plan"
    if wrong:
        raise UserError(
            f"{federation.config.captured} is expected to hold updates of the run in its {CONFIG}, but has"
            f" {observation.id}, and {wrong}; remove that one."
        )


def captures_of(captured: str) -> Path:
    """The folder of the updates in ``captured``, or that itself."""
    folder = Path(captured)
    return folder / CAPTURES if (folder / CONFIG).is_file() else folder


def as_captured(config: RunSettings) -> RunSettings:
    """``config`` with data, model and clients of the run that captured the updates.

    Raises:
        UserError: there is no such run, or its configuration is none, was changed, or names what is not registered.
    """
    folder = Path(str(config.captured))
    run = next((f for f in (folder, *folder.absolute().parents[:2]) if (f / CONFIG).is_file()), None)
    if run is None:
        raise UserError(
            f"captured is expected to be a run's folder with {CONFIG}, but got {config.captured}; name the folder that"
            " `fl-privacy run intercept.save=true` printed."
        )
    taken = recorded_parts(run / CONFIG, trusted(config.trust))
    _expect_unchanged(taken, run)
    return config.changed(taken)


def expect_not_taken(config: RunSettings, keys: Sequence[str]) -> None:
    """Refuse settings of an attack on captured updates that these bring along, unless they are as those.

    Args:
        config: of the attack.
        keys: that the user set.

    Raises:
        UserError: one of them would have no effect.
    """
    if config.captured is None or app_captures(config.captured) is not None:
        return
    found = as_captured(config)
    groups = captured_groups()
    for key in keys:
        where = f"choices.{key}" if key in groups else key
        if key.partition(".")[0] not in groups and not any(is_same_key(key, taken) for taken in captured_keys()):
            continue
        asked, recorded = select(config.plain(), where), select(found.plain(), where)
        if asked != recorded:
            raise UserError(
                f"captured={config.captured} brings {key}={recorded} along, but got {key}={asked}; leave {key} out."
            )


def is_same_key(key: str, taken: str) -> bool:
    """Whether one of two dotted keys is the other, or within it."""
    return key == taken or key.startswith(f"{taken}.") or taken.startswith(f"{key}.")


def _expect_unchanged(taken: Mapping[str, Any], run: Path) -> None:
    """Refuse a configuration that is not the one in ``run.json``: the truth would be that of other data or models."""
    if not (run / IDENTITY).is_file():
        return
    recorded = read_identity(run / IDENTITY).config
    if changed := [key for key, value in taken.items() if select(recorded, key) != value]:
        raise UserError(
            f"{run / CONFIG} is expected to be as the run wrote it, but its {changed[0]} is not the one in {IDENTITY};"
            " one of the two was changed, get the folder anew."
        )
