"""Save and load a model's values."""

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fl_privacy.errors import UserError
from fl_privacy.files import write_whole
from fl_privacy.types import ModelState

MODEL = "model.safetensors"
"""Name of the final global model in a run's folder."""


def write_weights(path: Path, state: ModelState) -> None:
    """Write ``state`` as safetensors, atomically."""
    values = {**state.parameters, **state.buffers}
    write_whole(path, save({name: t.detach().cpu().contiguous() for name, t in values.items()}))


def load_weights(path: Path, like: ModelState, *, fresh: str | None = None) -> ModelState:
    """Load parameters and buffers with the names and shapes of ``like`` from a safetensors file.

    Args:
        path: file, or folder of a run.
        fresh: module that keeps the values of ``like`` if the file has none.

    Raises:
        UserError: there is no such file, or it does not fit the model.
    """
    path = path / MODEL if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"weights is expected to be a safetensors file or a run's folder, but {path} does not exist.")
    wanted = {**like.parameters, **like.buffers}
    stored = {n: v for n, v in wanted.items() if fresh and n.startswith(f"{fresh}.")}
    try:
        with safe_open(path, "pt") as file:
            held = set(file.keys())
            for name, value in wanted.items():
                got: object = tuple(file.get_slice(name).get_shape()) if name in held else "nothing"
                if name in stored and name not in held:
                    continue
                if got != tuple(value.shape):  # before it takes memory
                    raise UserError(
                        f"{path} is expected to hold {name} of shape {tuple(value.shape)}, but holds {got}; use the"
                        " model that was trained."
                    )
                stored[name] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise UserError(f"weights is expected to be a safetensors file, but {path} is not readable: {error}") from error
    return ModelState({n: stored[n] for n in like.parameters}, {n: stored[n] for n in like.buffers})
