"""Save and load a model's values."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fl_privacy.data import load_data
from fl_privacy.errors import UserError
from fl_privacy.federation import Client
from fl_privacy.files import write_whole
from fl_privacy.runs.build import build_network, build_plan, prepared_client
from fl_privacy.runs.config import RunSettings
from fl_privacy.runs.config.building import plain_settings
from fl_privacy.types import ModelState

MODEL = "model.safetensors"  # name of the final global model in a run's folder


def model_after(round: int) -> str:
    """Return the file name, in a run's folder, of the global model after ``round``, if it is kept."""
    return f"model-{round}.safetensors"


def write_weights(path: Path, state: ModelState) -> None:
    """Write ``state`` as safetensors, atomically."""
    values = {**state.parameters, **state.buffers}
    write_whole(path, save({name: t.detach().cpu().contiguous() for name, t in values.items()}))


def load_weights(path: Path, like: ModelState, *, fresh: str | None = None) -> ModelState:
    """Load a model shaped like ``like`` from a file or a run's folder; the file may lack the module named ``fresh``."""
    path = path / MODEL if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"weights is expected to be a file or a run's folder, but there is no {path}; name another.")
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
        raise UserError(
            f"weights is expected to be a safetensors file, but {path} is not readable ({error}); name another."
        ) from error
    return ModelState({n: stored[n] for n in like.parameters}, {n: stored[n] for n in like.buffers})


class OpenSettingError(UserError):
    """Raised if the configuration lacks a setting that all nodes must have in common."""


@lru_cache(maxsize=4)
def client_of_folder(config: RunSettings, folder: str, client: int) -> Client:
    """Build a client on the images in ``folder``; ``OpenSettingError`` if ``config`` lacks their size or classes."""
    settings = plain_settings(config.data)
    if open_still := [key for key in ("image_size", "channels", "classes") if settings.get(key) is None]:
        raise OpenSettingError(
            f"data.{open_still[0]} is expected for nodes with folders of their own, but is open; set data=image_folder"
            " data.image_size=32 data.channels=3 data.classes=[cat,dog] in the overrides."
        )
    settings = {key: value for key, value in settings.items() if key not in ("_target_", "name", "root", "keep")}
    dataset = load_data("image_folder", root=folder, keep=False, **settings)
    plan = build_plan(config.federation.plan, config.model)
    own = prepared_client(config, plan, dataset, build_network(config.model, dataset, seed=config.seed))
    return replace(own, id=client, test=dataset.test)
