"""Reading of trained networks from safetensors files; a file's network is cached."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fl_privacy.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")


def read_network(file: Path, *, tensors: bool) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata of ``file`` and, with ``tensors``, its tensors by name; ``OSError`` if it is damaged."""
    if not file.is_file():
        raise FileNotFoundError(file)
    try:
        with safe_open(file, framework="pt") as stored:
            header: dict[str, str] = stored.metadata() or {}
            return header, {name: stored.get_tensor(name) for name in stored.keys()} if tensors else {}  # noqa: SIM118
    except SafetensorError as error:
        raise OSError(str(error)) from error


@contextmanager
def readable(what: str, file: Path, remedy: str) -> Iterator[None]:
    """Turn an ``OSError`` in the context into a ``UserError``: WHAT is expected in FILE, but can't be read; REMEDY."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} is expected in {file}, but it can't be read; {remedy}.") from error


def read_once(load: Callable[Concatenate[Path, P], T]) -> Callable[Concatenate[Path, P], T]:
    """Decorate ``load`` to cache results until the file, its first argument, changes; ``OSError`` if it is missing."""

    @lru_cache(maxsize=8)
    def kept(changed: int, file: Path, *more: Hashable, **named: Hashable) -> T:
        return load(file, *more, **named)  # type: ignore[arg-type]

    @wraps(load)
    def loaded(file: Path, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return kept(file.stat().st_mtime_ns, file, *args, **kwargs)  # type: ignore[arg-type]

    return loaded


def take_values(network: nn.Module, values: dict[str, Tensor]) -> str | None:
    """Assign ``values`` to ``network`` (on the device ``meta``) and freeze it; if they do not fit, say why."""
    wanted = {
        name: (value.shape, torch.float32 if value.is_floating_point() else value.dtype)
        for name, value in network.state_dict().items()
    }
    if wanted != {name: (value.shape, value.dtype) for name, value in values.items()}:
        return "its layers differ"
    if not all(value.isfinite().all() for value in values.values()):
        return "some of its weights are no number"
    network.load_state_dict(values, assign=True)
    network.requires_grad_(False).eval()
    return None
