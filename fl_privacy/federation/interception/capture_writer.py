"""Write intercepted updates to files."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from weakref import WeakKeyDictionary

from safetensors.torch import save
from torch import Tensor, nn

from fl_privacy.effects import to_plain
from fl_privacy.errors import UserError
from fl_privacy.federation.interception import captures as layout
from fl_privacy.files import make_private_folder, write_private
from fl_privacy.types import Knowledge, ModelState, Observation, Tensors, VictimId


def save_observation(observation: Observation, folder: Path) -> Path:
    """Write an observation below ``folder``; ``UserError`` if the description of its defense can't become JSON."""
    return CaptureWriter(folder).write(observation)


@dataclass(eq=False)
class CaptureWriter:
    """Writes a run's observations to files below ``folder``, as they arrive."""

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
        sent, upload, knowledge = observation.sent, observation.upload, observation.knowledge
        known = {name: tensor for name in layout.KNOWN if (tensor := getattr(knowledge, name)) is not None}
        for name in layout.KNOWN_STATES:
            if (state := getattr(knowledge, name)) is not None:
                known |= _of_state(state, f"{name}_")
        update = layout.with_prefix(layout.UPDATE, upload.tensors) | layout.with_prefix(layout.BUFFERS, upload.buffers)
        description = {
            "format": layout.FORMAT,
            "id": str(observation.id),
            "plan": asdict(observation.plan),
            "input_shape": list(observation.input_shape),
            "num_classes": observation.num_classes,
            "num_examples": upload.num_examples,
            "rounding": upload.rounding,
            "sent": self._store_once(sent, _of_state(sent)),
            "upload": self._store(update),
            "knowledge": self._store_once(knowledge, known),
            "defense": None if (defense := knowledge.defense) is None else to_plain(defense),
            "same_data": knowledge.same_data,
            "features_at": knowledge.features_at,
            "colluder": knowledge.colluder,
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
        path = layout.tensor_file(self.folder, digest)
        if not path.exists():
            make_private_folder(path.parent, self.folder)
            write_private(path, data)
        return digest


def _of_state(state: ModelState, before: str = "") -> dict[str, Tensor]:
    parameters = layout.with_prefix(before + layout.PARAMETERS, state.parameters)
    return parameters | layout.with_prefix(before + layout.BUFFERS, state.buffers)


MOST_HELD = 256 << 20  # most bytes of tensors held in memory


class ObservationBuffer(layout.LazyObservations):
    """Buffer of intercepted uploads (observations) in order of arrival, in memory or in files, without loss.

    ``folder``: private folder of the files, created on demand and removed by ``clear``. ``most``: largest number of
    bytes in memory; with more, all observations go to files. ``written``: ``True`` if a ``CaptureWriter`` already
    writes all observations to ``folder``, and owns it.
    """

    def __init__(self, folder: Path, *, most: int = MOST_HELD, written: bool = False) -> None:
        self._folder, self._most, self._written = folder, most, written
        self.clear()  # remains of a killed run

    def clear(self) -> None:
        if not self._written:
            shutil.rmtree(self._folder, ignore_errors=True)
        self.ids: Sequence[VictimId] = []
        self._held: list[Observation] = []
        self._bytes = 0
        self._last_sent: ModelState | None = None
        self._writer: CaptureWriter | None = None
        self._models: list[nn.Module] = []
        self._model_of = bytearray()
        self._shared = layout.Shared()

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
        return layout.read_observation(self._folder, self.ids[place], model, model, self._shared, finite=False)

    def _write(self, observation: Observation) -> None:
        assert self._writer is not None
        known = next((n for n, model in enumerate(self._models) if model is observation.model), None)
        if known is None:
            known = len(self._models)
            self._models.append(observation.model)
        if not self._written:
            self._writer.write(observation)
        self._model_of.append(known)
