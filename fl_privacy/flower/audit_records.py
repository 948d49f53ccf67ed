"""What clients behind a mod of this package and an auditing server tell each other, beside the app's own records."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fl_privacy.effects import Description, from_plain, to_plain
from fl_privacy.errors import UserError
from fl_privacy.flower.records import BATCH_SIZE, CLIENT, PARTITION, VICTIM
from fl_privacy.flower.strategy import PROBE
from fl_privacy.normalization import Normalization

ANSWERS = "fl-privacy.answers"
"""Record of a reply whose client answers probes."""

PROBED = "fl-privacy.probed"
"""Record of an answer to a probe: of which images, and how they are normalized."""

DEFENDED = "fl-privacy.defended"
"""Record of a reply that a defense went over: its public description."""

_FINGERPRINTS, _MEAN, _STD, _PARTS = "fingerprints", "mean", "std", "parts"
_MOST = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ProbedImages:
    """What an answer to a probe says of the images behind it.

    Attributes:
        fingerprints: of each, see ``data.own_examples.fingerprint``.
        normalization: of what entered the model; ``None`` for images in [0, 1].
    """

    fingerprints: Sequence[str]
    normalization: Normalization | None


def probing(message: Message, probe: int, batch_size: int) -> RecordDict:
    """The content of a message that asks for the ``probe``-th chosen batch with the model that ``message`` sends."""
    asked = ConfigRecord({VICTIM: probe, BATCH_SIZE: batch_size})
    return RecordDict({**message.content, PROBE: asked})


def asked_probe(content: RecordDict) -> tuple[int, int] | None:
    """Number and size of the probe that a message asks for; ``None`` of an ordinary one."""
    record = content.config_records.get(PROBE)
    if record is None:
        return None
    probe, size = record.get(VICTIM), record.get(BATCH_SIZE)
    if not isinstance(probe, int) or not isinstance(size, int) or probe < 0 or not 1 <= size <= _MOST:
        raise UserError(f"A probe is expected to have a number and a size, but got {probe!r} and {size!r}.")
    return probe, size


def introduce(reply: RecordDict, context: Context) -> None:
    """Let ``reply`` say which partition its client holds, where its node knows."""
    partition = context.node_config.get(PARTITION)
    if isinstance(partition, int) and not isinstance(partition, bool):
        reply[CLIENT] = ConfigRecord({PARTITION: partition})


def tell_images(reply: RecordDict, images: ProbedImages) -> None:
    """Let ``reply`` say which images it is of."""
    told: dict[str, str | list[float]] = {_FINGERPRINTS: json.dumps(list(images.fingerprints))}
    if images.normalization is not None:
        told |= {_MEAN: list(images.normalization.mean), _STD: list(images.normalization.std)}
    reply[PROBED] = ConfigRecord(told)  # type: ignore[arg-type]


def told_images(reply: RecordDict) -> ProbedImages | None:
    """Inverse of ``tell_images``; ``None`` where nothing, or nonsense, is told."""
    record = reply.config_records.get(PROBED)
    if record is None:
        return None
    try:
        fingerprints = json.loads(str(record.get(_FINGERPRINTS, "[]")))
    except (ValueError, RecursionError):
        return None
    if not isinstance(fingerprints, list) or not all(isinstance(f, str) and len(f) <= 128 for f in fingerprints):
        return None
    mean, std = record.get(_MEAN), record.get(_STD)
    found = isinstance(mean, list) and isinstance(std, list)
    return ProbedImages(
        fingerprints=fingerprints,
        normalization=Normalization(tuple(mean), tuple(std)) if found else None,  # type: ignore[arg-type]
    )


def tell_defense(reply: RecordDict, parts: Description) -> None:
    """Let ``reply`` say by what it was defended, after what it says already."""
    before = told_defense(reply)
    reply[DEFENDED] = ConfigRecord({_PARTS: json.dumps(to_plain((*before, *parts)))})


def told_defense(reply: RecordDict) -> Description:
    """Inverse of ``tell_defense``; empty where nothing, or nonsense, is told."""
    record = reply.config_records.get(DEFENDED)
    if record is None:
        return ()
    try:
        return from_plain(json.loads(str(record.get(_PARTS, "[]"))))
    except (ValueError, RecursionError, UserError):
        return ()


def merged_config(context: Context, content: RecordDict) -> dict[str, object]:
    """The run config and all that the message's config records say, these on top."""
    merged: dict[str, object] = dict(context.run_config)
    for name, record in content.config_records.items():
        if name != PROBE:
            merged.update(record)
    return merged


def is_training(message: Message) -> bool:
    """Whether ``message`` asks a client to train."""
    return str(message.metadata.message_type).partition(".")[0] == "train"


def numbers_of(config: Mapping[str, object]) -> dict[str, float]:
    """The entries of ``config`` that are numbers."""
    return {k: v for k, v in config.items() if isinstance(v, int | float) and not isinstance(v, bool)}
