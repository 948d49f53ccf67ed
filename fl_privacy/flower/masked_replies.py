"""The required form of replies under SecAgg+; others are left out, and the round goes on."""

import io
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict

from fl_privacy.federation.replies import Failure, attempt, fault
from fl_privacy.flower.clients import COUNTS, NAMES
from fl_privacy.flower.inside.identity import bytes_to_public_key
from fl_privacy.flower.inside.legacy import RECORD_KEY_CONFIGS, FitRes, SecAggKey, SecAggStage, recorddict_to_fitres
from fl_privacy.flower.records import DEFENSE_SECONDS, TRAIN_LOSS
from fl_privacy.types import ModelState, Tensors, Upload

MOST_BYTES_OF_KEYS = 1 << 16
"""Largest size of a public key, a ciphertext or a key share."""

_CIPHERTEXTS = (SecAggKey.DESTINATION_LIST, SecAggKey.CIPHERTEXT_LIST)

_HEADER = 1 << 12
"""Largest header of an array in bytes."""


@dataclass(frozen=True)
class MaskedReplies:
    """Check of a SecAgg+ reply's clear parts; ``counts`` are the whole-number buffers, which travel in the clear."""

    shapes: Mapping[str, tuple[int, ...]]
    counts: Tensors
    most: int

    @classmethod
    def to(cls, state: ModelState, most: int) -> "MaskedReplies":
        values = {**state.parameters, **state.buffers}
        masked = {name: tuple(t.shape) or (1,) for name, t in values.items() if t.is_floating_point()}
        return cls(masked, {name: t for name, t in values.items() if name not in masked}, most)

    def fault(self, sent: Mapping[str, Any], reply: RecordDict, nodes: Collection[int]) -> str | None:
        """Return why ``reply`` does not count, or ``None``; ``sent`` is the protocol's record of the stage."""
        got = reply.config_records.get(RECORD_KEY_CONFIGS)
        if got is None:
            return "it has no record of the protocol"
        looks = {
            SecAggStage.SETUP: lambda: _keys_fault(got),
            SecAggStage.SHARE_KEYS: lambda: _pieces_fault(got, *_CIPHERTEXTS, nodes),
            SecAggStage.COLLECT_MASKED_VECTORS: lambda: self._vectors_fault(got, reply),
            SecAggStage.UNMASK: lambda: _shares_fault(sent, got, nodes),
        }
        found = attempt(looks[str(sent[SecAggKey.STAGE])])
        return found.reason if isinstance(found, Failure) else found

    def _vectors_fault(self, got: ConfigRecord, reply: RecordDict) -> str | None:
        answer: FitRes = recorddict_to_fitres(reply, True)
        number: Any = answer.num_examples
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= self.most:
            return f"expected 1 to {self.most} examples, got {str(number)[:30]}"
        if not all(isinstance(answer.metrics.get(key, 0.0), int | float) for key in (TRAIN_LOSS, DEFENSE_SECONDS)):
            return "its loss or seconds are no numbers"
        names = json.loads(str(answer.metrics.get(NAMES)))
        if not isinstance(names, list) or sorted(map(str, names)) != sorted(self.shapes):
            return "its names are not those of the tensors that were sent"
        if reason := self._buffers_fault(json.loads(str(answer.metrics.get(COUNTS)))):
            return reason
        vectors = got.get(SecAggKey.MASKED_PARAMETERS)
        shapes = [(1,), *(self.shapes[name] for name in names)]
        if not isinstance(vectors, list) or len(vectors) != len(shapes):
            return f"expected {len(shapes)} masked arrays"
        return next(filter(None, map(_vector_fault, vectors, shapes)), None)

    def _buffers_fault(self, told: Any) -> str | None:
        if not isinstance(told, dict) or told.keys() != self.counts.keys():
            return "its buffers in the clear are not those that were sent"
        made = {name: torch.tensor(told[name], dtype=like.dtype) for name, like in self.counts.items()}
        return fault(Upload(tensors={}, buffers=made, num_examples=1), ModelState({}, self.counts))


def _keys_fault(got: ConfigRecord) -> str | None:
    for name in (SecAggKey.PUBLIC_KEY_1, SecAggKey.PUBLIC_KEY_2):
        key = got.get(name)
        if not isinstance(key, bytes) or len(key) > MOST_BYTES_OF_KEYS:
            return f"{name} is no public key"
        bytes_to_public_key(key)
    return None


def _pieces_fault(got: ConfigRecord, whose: str, pieces: str, nodes: Collection[int]) -> str | None:
    named, held = got.get(whose), got.get(pieces)
    if not isinstance(named, list) or not isinstance(held, list) or len(named) != len(held):
        return f"expected one of {pieces} for each of {whose}"
    if len(set(named)) < len(named) or not set(named) <= set(nodes):
        return f"{whose} are not nodes that take part, each once"
    if not all(isinstance(piece, bytes) and len(piece) <= MOST_BYTES_OF_KEYS for piece in held):
        return f"{pieces} are not short bytes"
    return None


def _shares_fault(sent: Mapping[str, Any], got: ConfigRecord, nodes: Collection[int]) -> str | None:
    if reason := _pieces_fault(got, SecAggKey.NODE_ID_LIST, SecAggKey.SHARE_LIST, nodes):
        return reason
    lists = (sent[SecAggKey.ACTIVE_NODE_ID_LIST], sent[SecAggKey.DEAD_NODE_ID_LIST], got[SecAggKey.NODE_ID_LIST])
    active, dead, told = (set(nodes) for nodes in lists if isinstance(nodes, list))
    return None if told == active | dead else "its shares are not those that were asked for"


def _vector_fault(piece: Any, shape: tuple[int, ...]) -> str | None:
    if not isinstance(piece, bytes):
        return "a masked array is not bytes"
    file = io.BytesIO(piece)
    if np.lib.format.read_magic(file) != (1, 0):
        return "a masked array is not in NumPy's format 1.0"
    found, fortran, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=_HEADER)
    if found != shape or fortran or dtype.kind not in "iu" or dtype.hasobject:
        return f"expected a masked array of whole numbers of shape {shape}, got {dtype} of {str(found)[:60]}"
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    return None if len(piece) - file.tell() == size else "a masked array is not as long as it says"
