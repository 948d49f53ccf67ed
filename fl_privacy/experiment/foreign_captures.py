"""Attacks on what was captured of somebody else's Flower app, from its folder."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import nn

from fl_privacy.config import RunSettings
from fl_privacy.errors import UserError
from fl_privacy.experiment.captured_app import NOTE, AppReport, Note, read_note
from fl_privacy.experiment.known_images import find_images
from fl_privacy.experiment.network import ANY_MODEL, build_network_for
from fl_privacy.foreign_files import expect_regular_files
from fl_privacy.interception import changed, ids_of, stored_observations
from fl_privacy.interception.capture_files import CaptureFile
from fl_privacy.models import normalized
from fl_privacy.normalization import Normalization
from fl_privacy.results.occupancy import CAPTURES, CONFIG
from fl_privacy.types import Observation, VictimId


def app_captures(captured: str) -> Path | None:
    """The folder of an app's captures in ``captured``: of an audit, or any that no run of this package wrote.

    ``None`` where a run of this package did, or there is nothing.
    """
    folder = Path(captured)
    within = [path.parent for path in sorted(folder.glob(f"audit-*/{NOTE}"))]
    for audited in (folder, folder.parent, *(within if len(within) == 1 else ())):
        if (audited / NOTE).is_file():
            return audited / CAPTURES
    if any((up / CONFIG).is_file() for up in (folder, *folder.absolute().parents[:2])):
        return None
    return folder if folder.is_dir() and any(folder.rglob("*.json")) else None


def load_app(captures: Path, config: RunSettings) -> tuple[AppReport, Note]:
    """What was captured of an app, by the model that ``config`` names.

    Raises:
        UserError: it is not the model of these updates, or none is named.
    """
    expect_regular_files(captures)
    note = read_note(captures.parent) or read_note(captures) or Note()
    if config.choices.model != "custom" and note.model:
        raise UserError(
            f"The model of the app is expected, but got model={config.choices.model}; say model=custom"
            f" model._target_={note.model}, which runs its code."
        )
    shape, classes = _first_shape(captures)
    model = build_network_for(config.model, shape, classes, seed=config.seed, **_normalizing(config.model, note))
    observations = _as_clients_normalize(stored_observations(captures, model), config.model, note)
    source = find_images(config.truth)
    app = AppReport(
        observations=observations,
        source=source,
        fingerprints=_by_victim(note.fingerprints, observations),
        defense=note.defense,
        defenses=note.defenses,
        found=Counter(),
        every=True,
        rates_estimated=note.rates_estimated,
    )
    return app, note


def _normalizing(section: DictConfig, note: Note) -> Mapping[str, Any]:
    """The clients' normalization as the audit noted it, unless the user says another."""
    if note.normalization is None or any(key in section for key in ANY_MODEL[1:]):
        return {}
    return {"mean": list(note.normalization.mean), "std": list(note.normalization.std)}


def _as_clients_normalize(
    observations: Sequence[Observation], section: DictConfig, note: Note
) -> Sequence[Observation]:
    """Each by a model that normalizes as its client said, unless the user says another for all."""
    if not note.normalizations or any(key in section for key in ANY_MODEL[1:]) or not observations:
        return observations
    networks: dict[Normalization | None, nn.Module] = {}
    for chosen in note.normalizations.values():
        plain = copy.deepcopy(observations[0].model)
        plain._forward_pre_hooks.clear()
        networks[chosen] = plain if chosen is None else normalized(plain, chosen)

    def change(observation: Observation) -> Observation:
        client = observation.id.client
        known = client in note.normalizations
        return replace(observation, model=networks[note.normalizations[client]]) if known else observation

    return changed(observations, change)


def _first_shape(captures: Path) -> tuple[tuple[int, ...], int]:
    """(C, H, W) and K of the first capture."""
    path = next(path for path in sorted(captures.rglob("*.json")))
    file = CaptureFile(captures, path)
    raw = file.json()
    shape, classes = raw.get("input_shape"), raw.get("num_classes")
    whole = isinstance(shape, list) and all(isinstance(n, int) and 0 < n <= 4096 for n in shape) and len(shape) == 3
    if not whole or not isinstance(classes, int) or not 0 < classes <= 1_000_000:
        file.refuse(f"is of images {shape!r} of {classes!r} classes")
    assert isinstance(shape, list)
    return tuple(shape), classes


def _by_victim(told: Mapping[str, Sequence[str]], observations: Sequence[Observation]) -> dict[VictimId, Sequence[str]]:
    return {id: told[str(id)] for id in ids_of(observations) if str(id) in told}
