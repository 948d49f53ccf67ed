"""Decoded images are kept as bytes in one file, so that the next run starts at once."""

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fl_privacy.data.examples import Examples
from fl_privacy.files import user_cache_folder

_FORMAT = 1
_FIELDS = ("images", "labels", "groups")


def cached(
    name: str, key: Sequence[str], make: Callable[[], tuple[Examples, Examples]], *, folder: Path | None = None
) -> tuple[Examples, Examples]:
    """The examples that ``make`` returns, from ``folder`` if they have been made before.

    Args:
        name: of the data set, for the file's name.
        key: what the result depends on.
        make: returns training and test examples.
        folder: made if needed, readable by its owner only; ``None`` takes the user's cache folder.
            One that can't be written is warned of and done without.
    """
    digest = hashlib.sha256(json.dumps([_FORMAT, *key]).encode()).hexdigest()[:16]
    file = (folder or user_cache_folder()) / f"{name.replace('/', '--')}-{digest}.safetensors"
    try:
        return _read(file)
    except (OSError, SafetensorError, KeyError):
        examples = make()
    try:
        _write(file, *examples)
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a disk that is full
        reason = str(error).rstrip(".")
        warnings.warn(f"Decoded images are not kept, {file.parent} can't be written: {reason}.", stacklevel=2)
    return examples


def _read(file: Path) -> tuple[Examples, Examples]:
    with safe_open(file, framework="pt") as stored:
        tensors: dict[str, Tensor] = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        names = tuple(json.loads(stored.metadata()["class_names"]))
    train, test = (
        Examples(tensors[f"{split}.images"], tensors[f"{split}.labels"], names, tensors.get(f"{split}.groups"))
        for split in ("train", "test")
    )
    return train, test


def _write(file: Path, train: Examples, test: Examples) -> None:
    tensors = {
        f"{split}.{field}": tensor.contiguous()
        for split, examples in (("train", train), ("test", test))
        for field in _FIELDS
        if (tensor := getattr(examples, field)) is not None
    }
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".partial")
    os.close(handle)
    try:
        save_file(tensors, temporary, {"class_names": json.dumps(train.class_names)})
        Path(temporary).replace(file)
    finally:
        Path(temporary).unlink(missing_ok=True)
