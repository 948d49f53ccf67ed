"""Defend the uploads of an unmodified app's clients, whose arrays are matched to parameters."""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import Array, Context, Message

from fl_privacy import defenses
from fl_privacy.auditing.instrument.matching import Matched
from fl_privacy.auditing.instrument.watch import Watched
from fl_privacy.defenses import Defense
from fl_privacy.errors import UserError
from fl_privacy.flower.records import PARTITION
from fl_privacy.flower.upload_defense import DefendedUpload, Shares, acts_within
from fl_privacy.rng import derive_generator
from fl_privacy.runs.build import build_defense
from fl_privacy.runs.config import compose_run, options


def defense_called(given: Sequence[str]) -> Defense:
    """Build the defense of ``--with-defense`` from its name and settings such as ``defense.scale=0.1``.

    ``UserError`` if the defense is unknown, or does not act on uploads alone.
    """
    words = [word for text in given for word in text.split()]
    name = next((word for word in words if re.fullmatch(r"(defense=)?\w+", word)), "").removeprefix("defense=")
    chosen = [word for word in words if word.removeprefix("defense=") != name]
    settings = [re.sub(rf"^{re.escape(name)}\.", "defense.", word) for word in chosen]
    if not name or not all(re.match(r"defense\.\w+=", word) for word in settings):
        raise UserError(
            f"--with-defense is expected as 'dp_noise defense.scale=0.1', but got {' '.join(words) or 'nothing'!r};"
            " name a defense, then its settings."
        )
    made = build_defense(compose_run([f"defense={name}", *settings]).defense)
    if why := acts_within(made) or ([] if made.upload else ["does nothing"]):
        able = list[str]()
        for other in (each for each in dir(defenses) if each in options("defense")):
            with suppress(UserError):  # it needs settings
                default: Defense = getattr(defenses, other)()
                able += [other] * bool(default.upload and not acts_within(default))
        raise UserError(
            f"--with-defense is expected to be a defense that acts on uploads alone ({', '.join(able)}), but {name}"
            f" {' and '.join(why)}; take one of these."
        )
    return made


@dataclass(eq=False)
class ReplyDefense:
    """Applies the upload hooks of ``defense`` to the trained parameters in a reply; other arrays are not changed."""

    defense: Defense
    seed: int
    _answers: Counter[int] = field(default_factory=Counter, init=False)

    def __call__(self, reply: Message, seen: Watched, found: Matched, context: Context) -> None:
        """Defend the trained parameters in ``reply``, in place.

        ``seen``: observed training. ``found``: parameter that each array holds. ``UserError`` if no array holds a
        trained parameter, or such an array is encoded or holds no floats.
        """
        own = {key: name for key, name in found.parameters.items() if name in seen.gradients}
        places, after = list[tuple[str, str, str, np.dtype[Any]]](), dict[str, torch.Tensor]()
        for record, held in reply.content.array_records.items():
            for key, array in held.items():
                name = own.get(f"{record}/{key}")
                if name is not None and (value := array.numpy()).dtype.kind == "f":
                    places.append((record, key, name, value.dtype))
                    after[name] = torch.from_numpy(value.astype(np.float32))
        if not after or found.decoded or set(own.values()) != after.keys():
            raise UserError(f"{self.defense.name} expects parameters, but they are coded or missing; audit without it.")
        client = int(context.node_config[PARTITION])
        self._answers[client] += 1
        rng = derive_generator(self.seed, "client", client, f"answer-{self._answers[client]}", "defense")
        shares: Shares = "weights" if found.shares == "weights" else "change"
        guard = DefendedUpload(defense=self.defense, parameters=frozenset(after), shares=shares)
        before = {name: seen.before[name].detach().cpu().float() for name in after}
        values = dict(zip(before, guard.remembering(context.state, before, after, rng), strict=True))
        for record, key, name, kind in places:
            reply.content.array_records[record][key] = Array(values[name].astype(kind))
