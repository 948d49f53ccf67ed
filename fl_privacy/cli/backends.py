"""The ways to run a federation, by the name in ``backend=``; Flower and Ray are imported when asked for."""

from functools import partial

from omegaconf import DictConfig

from fl_privacy.errors import UserError
from fl_privacy.pipeline.backend import Backend, plain_loop


def backend_of(config: DictConfig) -> Backend:
    """The backend that ``config.backend`` describes."""
    settings = config.backend
    match settings.name:
        case "loop":
            return plain_loop
        case "flower":
            from fl_privacy.flower.backends import run_in_process  # noqa: PLC0415

            return run_in_process
        case "ray":
            from fl_privacy.flower.backends import run_ray  # noqa: PLC0415

            return partial(run_ray, num_cpus=settings.num_cpus, num_gpus=settings.num_gpus, actors=settings.actors)
    raise UserError(f"backend.name is expected to be loop, flower or ray, but got {settings.name!r}.")
