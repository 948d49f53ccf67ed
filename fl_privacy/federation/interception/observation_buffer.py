"""Buffer of intercepted updates before their attack: in memory while they are few, then in files."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from fl_privacy.federation.interception.capture_writer import CaptureWriter
from fl_privacy.federation.interception.captures import LazyObservations, Shared, read_observation
from fl_privacy.types import ModelState, Observation, VictimId

MOST_HELD = 256 << 20
"""Most bytes of tensors held in memory."""


class WaitingUpdates(LazyObservations):
    """Updates in order of arrival; those in files are restored bit for bit.

    Args:
        folder: private folder of the files, created on demand and removed by ``clear``.
        most: most bytes of uploads and models held in memory.
        written: ``True`` if a ``CaptureWriter`` already writes all of them to ``folder``, and owns it.
    """

    def __init__(self, folder: Path, *, most: int = MOST_HELD, written: bool = False) -> None:
        self._folder, self._most, self._written = folder, most, written
        self.clear()  # remains of a killed run

    def clear(self) -> None:
        """Forget all updates, and remove their files unless written by another."""
        if not self._written:
            shutil.rmtree(self._folder, ignore_errors=True)
        self.ids: Sequence[VictimId] = []
        self._held: list[Observation] = []
        self._bytes = 0
        self._last_sent: ModelState | None = None
        self._writer: CaptureWriter | None = None
        self._models: list[nn.Module] = []
        self._model_of = bytearray()
        self._shared = Shared()

    def append(self, observation: Observation) -> None:
        assert isinstance(self.ids, list)
        self.ids.append(observation.id)
        if self._writer is not None:
            self._write(observation)
            return
        self._held.append(observation)
        upload, sent = observation.upload, observation.sent
        held = [*upload.tensors.values(), *upload.buffers.values()]
        if sent is not self._last_sent:
            held += [*sent.parameters.values(), *sent.buffers.values()]
        self._bytes += sum(t.nbytes for t in held)
        self._last_sent = observation.sent
        if self._bytes > self._most:
            self._writer = CaptureWriter(self._folder)
            for one in self._held:
                self._write(one)
            self._held = []

    def load(self, place: int) -> Observation:
        if self._writer is None:
            return self._held[place]
        model = self._models[self._model_of[place]]
        return read_observation(self._folder, self.ids[place], model, model, self._shared, finite=False)

    def _write(self, observation: Observation) -> None:
        assert self._writer is not None
        known = next((n for n, model in enumerate(self._models) if model is observation.model), None)
        if known is None:
            known = len(self._models)
            self._models.append(observation.model)
        if not self._written:
            self._writer.write(observation)
        self._model_of.append(known)
