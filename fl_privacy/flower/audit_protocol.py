"""Records that an auditing server exchanges with clients that use this package's mods."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fl_privacy.effects import Description, from_plain, to_plain
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.flower.records import CLIENT, MOST_PROBED, PARTITION
from fl_privacy.flower.strategy import PROBE
from fl_privacy.types.plan import Normalization

ANSWERS = "fl-privacy.answers"  # record in replies of clients that answer probes
PROBED = "fl-privacy.probed"  # record in an answer to a probe with fingerprints and normalization of its images
DEFENDED = "fl-privacy.defended"  # record in a defended reply with the defense's public description
_ASKED_NUMBER, _ASKED_SIZE = "fl-privacy.victim", "fl-privacy.batch-size"  # config keys that ask for a probe
OWN_RECORDS = (CLIENT, ANSWERS, PROBED, DEFENDED)  # records that this package adds to replies
_FINGERPRINTS, _MEAN, _STD, _PARTS = "fingerprints", "mean", "std", "parts"
_MOST_LETTERS, _MOST_CHANNELS, _LARGEST = 1 << 18, 64, 1e4
"""Limits on a client's statements: letters of a text, channels of an image, and size of mean and std."""


@dataclass(frozen=True, kw_only=True)
class ProbedImages:
    """Images from which a client made the upload that the auditing server asked for."""

    fingerprints: Sequence[str]  # fingerprint of each image (``data.own_examples``)
    normalization: Normalization | None  # mean and standard deviation by which the client normalizes, if known


def probing(message: Message, probe: int, batch_size: int) -> RecordDict:
    """Copy the content of ``message``, and add a request for the upload of batch ``probe`` alone."""
    records = message.content.config_records
    name = next(iter(records), PROBE)
    asked = {**records.get(name, {}), _ASKED_NUMBER: probe, _ASKED_SIZE: batch_size}
    return RecordDict({**message.content, name: ConfigRecord(asked)})


def asked_probe(content: RecordDict) -> tuple[int, int] | None:
    """Return (index, size) of the batch that a message asks to probe, or ``None``; ``UserError`` if out of range."""
    record = next((each for each in content.config_records.values() if _ASKED_NUMBER in each), None)
    if record is None:
        return None
    probe, size = record.get(_ASKED_NUMBER), record.get(_ASKED_SIZE)
    if not isinstance(probe, int) or not isinstance(size, int) or probe < 0 or not 1 <= size <= MOST_PROBED:
        raise UserError(
            f"A probe is expected to have a number from 0 and a size of 1 to {MOST_PROBED}, but got {probe!r} and"
            f" {size!r}; send these."
        )
    return probe, size


def introduce(reply: RecordDict, context: Context) -> None:
    """Add the client's partition number to ``reply``, if the node config has one."""
    partition = context.node_config.get(PARTITION)
    if isinstance(partition, int) and not isinstance(partition, bool):
        reply[CLIENT] = ConfigRecord({PARTITION: partition})


def state_images(reply: RecordDict, images: ProbedImages) -> None:
    """Add to ``reply`` which images a probe's upload was computed from: their fingerprints and normalization."""
    content: dict[str, str | list[float]] = {_FINGERPRINTS: json.dumps(list(images.fingerprints))}
    if images.normalization is not None:
        content |= {_MEAN: list(images.normalization.mean), _STD: list(images.normalization.std)}
    reply[PROBED] = ConfigRecord(content)  # type: ignore[arg-type]


def stated_images(reply: RecordDict) -> ProbedImages | None:
    """Return the fingerprints and normalization in ``reply``, as added by ``state_images``; ``None`` if malformed."""
    record = reply.config_records.get(PROBED)
    if record is None:
        return None
    fingerprints = _stated_json(record, _FINGERPRINTS)
    if not isinstance(fingerprints, list) or not all(isinstance(f, str) and len(f) <= 128 for f in fingerprints):
        return None
    if record.get(_MEAN) is None and record.get(_STD) is None:
        return ProbedImages(fingerprints=fingerprints, normalization=None)
    found = attempt(lambda: _stated_normalization(record))
    return None if isinstance(found, Failure) else ProbedImages(fingerprints=fingerprints, normalization=found)


def _stated_normalization(record: ConfigRecord) -> Normalization:
    mean, std = (record.get(key) for key in (_MEAN, _STD))
    for key, values in ((_MEAN, mean), (_STD, std)):
        if not isinstance(values, list) or not 1 <= len(values) <= _MOST_CHANNELS:
            raise UserError(f"{key} is expected to list a number a channel, but got {values!r:.100}; send these.")
    found = Normalization(mean, std)  # type: ignore[arg-type]
    if max(map(abs, found.mean)) > _LARGEST or not all(1 / _LARGEST <= s <= _LARGEST for s in found.std):
        raise UserError(f"mean and std are expected within {_LARGEST:g}, but got {found.in_words()}; correct them.")
    return found


def _stated_json(record: ConfigRecord, key: str) -> object:
    text = record.get(key, "[]")
    if not isinstance(text, str) or len(text) > _MOST_LETTERS:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def state_defense(reply: RecordDict, parts: Description) -> None:
    """Add ``parts``, the description of a defense, to ``reply``, after those already there."""
    reply[DEFENDED] = ConfigRecord({_PARTS: json.dumps(to_plain((*stated_defense(reply), *parts)))})


def stated_defense(reply: RecordDict) -> Description:
    """Return the defense described by ``state_defense``; empty if missing or malformed."""
    record = reply.config_records.get(DEFENDED)
    if record is None:
        return ()
    found = attempt(lambda: from_plain(_stated_json(record, _PARTS)))
    return () if isinstance(found, Failure) else found


def merged_config(context: Context, content: RecordDict) -> dict[str, object]:
    """Return the run config, updated by the message's config records, but without an audit's request for a probe."""
    merged: dict[str, object] = dict(context.run_config)
    for record in content.config_records.values():
        merged.update(record)
    return {key: value for key, value in merged.items() if key not in (_ASKED_NUMBER, _ASKED_SIZE)}


def is_training(message: Message) -> bool:
    """Return whether ``message`` asks a client to train."""
    return str(message.metadata.message_type).partition(".")[0] == "train"


def is_evaluation(message: Message) -> bool:
    """Return whether ``message`` asks a client to evaluate."""
    return str(message.metadata.message_type).partition(".")[0] == "evaluate"


def numbers_of(config: Mapping[str, object]) -> dict[str, float]:
    """Return the entries of ``config`` that are numbers."""
    return {k: v for k, v in config.items() if isinstance(v, int | float) and not isinstance(v, bool)}
