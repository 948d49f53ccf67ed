"""A defense of this package, named in a policy, on outgoing arrays."""

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fl_privacy.defenses import ClientState
from fl_privacy.errors import UserError
from fl_privacy.flower.upload_defense import GuardedUpload
from fl_privacy.rng import Secret, SecretGenerator
from fl_privacy.runs.build import build_defense
from fl_privacy.runs.config import compose_file
from fl_privacy.site.gate.filtering import Records, array_values, raw_array
from fl_privacy.types import Tensors

logger = logging.getLogger(__name__)


def defend_records(name: str, options: Mapping[str, Any]) -> Callable[[Records, Records], Records]:
    """Return the function by which a defense with upload hooks changes (received, released) records.

    It acts on the change of all floating-point arrays, statistics too, and draws from the operating system's
    randomness.

    Raises:
        UserError: there is no such defense or option, it acts within the training, or it promises differential privacy,
            for which a policy has ``protect.noise``.
    """
    overrides = [f"defense={name}", *(f"defense.{key}={json.dumps(value)}" for key, value in options.items())]
    defense = build_defense(compose_file("config", overrides)["defense"])
    if not defense.upload:
        raise UserError(f"protect.defense is expected to act on an upload, but {name} does not; try pruning.")
    try:
        guard = GuardedUpload(defense=defense)
    except UserError as error:
        raise UserError(
            f"protect.defense can't be {name}: {error} For noise that a budget counts, say protect.noise."
        ) from error
    state = ClientState()

    def defended(received: Records, released: Records) -> Records:
        places = [(record, key) for record, held in received.arrays.items() for key in held]
        before = _tensors(places, received)
        # a policy may rename the only record, and keeps the order
        names = dict(zip(received.arrays, released.arrays, strict=True))
        left = [(names[record], key) for record, key in places]
        after = dict(zip(before, _tensors(left, released).values(), strict=True))
        made = guard(before, after, state, SecretGenerator(Secret.draw()))
        arrays: dict[str, dict[str, Any]] = {record: {} for record in released.arrays}
        for (record, key), value in zip(left, made.values(), strict=True):
            arrays[record][key] = raw_array(value.numpy().astype(released.arrays[record][key].dtype))
        return Records(arrays=arrays, metrics=released.metrics, config=released.config)

    return defended


def _tensors(places: list[tuple[str, str]], records: Records) -> Tensors:
    return {
        f"{record}/{key}": torch.from_numpy(np.array(array_values(key, records.arrays[record][key])))
        for record, key in places
    }
