"""Write intercepted updates to files, to keep them or until they are attacked."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from weakref import WeakKeyDictionary

from safetensors.torch import save
from torch import nn

from fl_privacy.effects import to_plain
from fl_privacy.errors import UserError
from fl_privacy.federation.interception import captures as layout
from fl_privacy.federation.interception.captures import (
    LazyObservations,
    Shared,
    read_observation,
    tensor_file,
    with_prefix,
)
from fl_privacy.files import make_private_folder, write_private
from fl_privacy.types import Knowledge, ModelState, Observation, Tensors, VictimId


def save_observation(observation: Observation, folder: Path) -> Path:
    """Write one observation below ``folder`` and return its JSON file.

    Raises:
        UserError: its knowledge of the defense is no JSON.
    """
    return CaptureWriter(folder).write(observation)


@dataclass(eq=False)
class CaptureWriter:
    """Reader of a run that writes observations below ``folder``."""

    folder: Path
    _written: WeakKeyDictionary[ModelState | Knowledge, str] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )

    def see(self, observation: Observation) -> None:
        self.write(observation)

    __call__ = see

    def end_round(self) -> None:
        """Do nothing: each observation is written at once."""

    finish = end_round

    def write(self, observation: Observation) -> Path:
        sent, upload = observation.sent, observation.upload
        state = with_prefix(layout.PARAMETERS, sent.parameters) | with_prefix(layout.BUFFERS, sent.buffers)
        update = with_prefix(layout.UPDATE, upload.tensors) | with_prefix(layout.BUFFERS, upload.buffers)
        description = {
            "format": layout.FORMAT,
            "id": str(observation.id),
            "plan": asdict(observation.plan),
            "input_shape": list(observation.input_shape),
            "num_classes": observation.num_classes,
            "num_examples": upload.num_examples,
            "rounding": upload.rounding,
            "sent": self._store_once(sent, state),
            "upload": self._store(update),
            "knowledge": self._store_once(observation.knowledge, _of_knowledge(observation.knowledge)),
            "defense": None if (told := observation.knowledge.defense) is None else to_plain(told),
            "same_data": observation.knowledge.same_data,
            "features_at": observation.knowledge.features_at,
            "colluder": observation.knowledge.colluder,
        }
        try:
            content = json.dumps(description, indent=2).encode()
        except TypeError as error:
            raise UserError(
                f"The public description of a defense is expected to be numbers and text, but {observation.id} has"
                f" other values ({error}); leave them out of it."
            ) from error
        path = self.folder / f"{observation.id}.json"
        make_private_folder(path.parent, self.folder)
        write_private(path, content)
        return path

    def _store_once(self, owner: ModelState | Knowledge, tensors: Tensors) -> str:
        if owner not in self._written:
            self._written[owner] = self._store(tensors)
        return self._written[owner]

    def _store(self, tensors: Tensors) -> str:
        data = save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
        digest = sha256(data).hexdigest()
        path = tensor_file(self.folder, digest)
        if not path.exists():
            make_private_folder(path.parent, self.folder)
            write_private(path, data)
        return digest


def _of_knowledge(knowledge: Knowledge) -> Tensors:
    optional = {
        layout.LABELS: knowledge.labels,
        layout.PUBLIC_IMAGES: knowledge.public_images,
        layout.PUBLIC_LABELS: knowledge.public_labels,
        layout.PREVIOUS: knowledge.previous,
        layout.FEATURES: knowledge.features,
    }
    told = {name: tensor for name, tensor in optional.items() if tensor is not None}
    for parameters, buffers, state in (
        (layout.PRIVATE_PARAMETERS, layout.PRIVATE_BUFFERS, knowledge.private),
        (layout.FRONT_PARAMETERS, layout.FRONT_BUFFERS, knowledge.front),
    ):
        if state is not None:
            told |= with_prefix(parameters, state.parameters) | with_prefix(buffers, state.buffers)
    return told


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
