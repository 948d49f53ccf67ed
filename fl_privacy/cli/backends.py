"""The ways to run a federation, by the name in ``backend=``; Flower and Ray are imported when asked for."""

from functools import partial

from fl_privacy.cli.secure_aggregation import secure_backend_of
from fl_privacy.config import RunSettings
from fl_privacy.config.instantiate import check_arguments, plain_settings
from fl_privacy.errors import UserError
from fl_privacy.experiment.contracts import Backend, plain_loop
from fl_privacy.parallel.cluster import expect_answer


def backend_of(config: RunSettings) -> Backend:
    """The backend that ``config.backend`` and ``config.secure_aggregation`` describe."""
    if secure := secure_backend_of(config):
        return secure
    settings = plain_settings(config.backend)
    name = settings.pop("name", None)
    if name == "ray":
        from fl_privacy.flower.backends import run_ray  # noqa: PLC0415

        check_arguments(run_ray, settings, "backend")
        expect_answer()
        return partial(run_ray, **settings)
    if settings:
        raise UserError(f"Unknown key backend.{next(iter(settings))}; backend={name} has no settings.")
    if name == "flower":
        from fl_privacy.flower.backends import run_in_process  # noqa: PLC0415

        return run_in_process
    if name == "loop":
        return plain_loop
    raise UserError(f"backend.name is expected to be loop, flower or ray, but got {name!r}.")
