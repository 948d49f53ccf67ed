"""Intercepted updates on disk, to be attacked later or elsewhere: safetensors and JSON, for their owner's eyes only.

``FOLDER/round-1/client-2/victim-0.json`` describes an observation and names its tensors by the SHA-256 of their file,
``FOLDER/tensors/DIGEST.safetensors``; what observations share, like the model as sent, is stored once. The JSON is
written last, so that whatever a killed run leaves behind is complete.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.types import Tensors

FORMAT = 1
"""Version of the layout."""

PARAMETERS, BUFFERS, UPDATE = "parameters/", "buffers/", "update/"
LABELS, PUBLIC_IMAGES, PUBLIC_LABELS, PREVIOUS = "labels", "public_images", "public_labels", "previous"
FEATURES, PRIVATE_PARAMETERS, PRIVATE_BUFFERS = "features", "private_parameters/", "private_buffers/"
FRONT_PARAMETERS, FRONT_BUFFERS = "front_parameters/", "front_buffers/"
"""Names in the tensor files; those that end in a slash are prefixes."""

MOST_JSON, MOST_TENSORS = 1 << 20, 1 << 30
"""Bytes of a description; of a file of tensors, beside sixteen times those of the model."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


def with_prefix(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    """``tensors`` by the names that they have in a file."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def without_prefix(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    """Those in a file whose names begin with ``prefix``, by their own names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def tensor_file(folder: Path, digest: str) -> Path:
    """Where the tensors with this digest are."""
    return folder / "tensors" / f"{digest}.safetensors"


@dataclass(frozen=True)
class CaptureFile:
    """One observation's description and tensors, of which nothing is trusted.

    Attributes:
        folder: of all observations.
        path: of the description.
        finite: refuse other values.

    Raises:
        UserError: by every method, a file is missing, too large or damaged.
    """

    folder: Path
    path: Path
    finite: bool = True

    def json(self) -> dict[str, Any]:
        try:
            raw = json.loads(self._read(self.path, MOST_JSON))
        except (ValueError, RecursionError):
            self.refuse("is no JSON")
        if not isinstance(raw, dict):
            self.refuse("describes no observation")
        return raw

    def digest(self, raw: Mapping[str, Any], key: str) -> str:
        """That of the tensors of ``key`` in the description ``raw``."""
        value = raw.get(key)
        if not isinstance(value, str) or not _DIGEST.fullmatch(value):
            self.refuse(f"names no tensors for {key}")
        return value

    def tensors(self, digest: str, room: int) -> dict[str, Tensor]:
        """The tensors of ``digest`` in PyTorch's own memory; there may be ``room`` bytes beside a fixed number."""
        path = tensor_file(self.folder, digest)
        data = self._read(path, MOST_TENSORS + room)
        if sha256(data).hexdigest() != digest:
            self.refuse(f"has damaged tensors in {path.name}")
        try:
            tensors = load(data)
        except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, AttributeError):
            self.refuse(f"has tensors in {path.name} that are no safetensors of PyTorch's types")
        for name, tensor in tensors.items():
            if self.finite and tensor.is_floating_point() and not tensor.isfinite().all():
                self.refuse(f"holds {name} with values that are not finite")
        return {name: tensor.clone() for name, tensor in tensors.items()}  # its alignment decides some products' bits

    def refuse(self, what: str) -> NoReturn:
        """Raise ``UserError`` that names the file and says ``what`` is wrong with it."""
        raise UserError(
            f"{self.path} is expected to be a captured update of the model given, but {what};"
            " choose the model it was captured with, or remove the file."
        )

    def _read(self, path: Path, most: int) -> bytes:
        try:
            if not path.is_file():
                self.refuse(f"{path.name} is no file")
            if path.stat().st_size > most:
                self.refuse(f"{path.name} is larger than any such file ({most >> 20} MiB)")
            return path.read_bytes()
        except OSError as error:
            self.refuse(f"can't be read in whole ({path.name}: {error.strerror})")
