"""The ways in which the server adds up updates without reading them, by the name in ``secure_aggregation=``."""

from functools import partial
from typing import Any

from fl_privacy.config import RunSettings
from fl_privacy.config.instantiate import check_arguments, plain_settings
from fl_privacy.errors import UserError
from fl_privacy.experiment.contracts import Backend
from fl_privacy.federation import ClientSource, Server
from fl_privacy.interception import Audit, Interceptor


def secure_backend_of(config: RunSettings) -> Backend | None:
    """The backend of ``config.secure_aggregation``, in this process; ``None`` where the server reads every update.

    Raises:
        UserError: the run asks for what it can't give.
    """
    settings = plain_settings(config.secure_aggregation)
    name = settings.pop("name", None)
    if name == "none":
        return None
    if config.backend.name != "loop":
        raise UserError(
            f"secure_aggregation={name} is expected to run in this process, but got backend={config.backend.name};"
            " use backend=loop."
        )
    if "_target_" in config.attack or config.intercept.save:
        raise UserError(
            f"With secure_aggregation={name} the server sees no single update that could be attacked;"
            " use attack=none and intercept.save=false."
        )
    run: Any
    if name == "secagg":
        from fl_privacy.flower.secure_aggregation import run_secure_aggregation as run  # noqa: PLC0415
    else:
        from fl_privacy.federation.secure.encrypted import run_encrypted as run  # noqa: PLC0415
    check_arguments(run, settings, "secure_aggregation")
    return partial(_unattacked, partial(run, **settings))


def _unattacked(
    run: Any, server: Server, source: ClientSource, *, audit: Audit, interceptor: Interceptor, **settings: Any
) -> None:
    """``run`` as a backend; there is nothing to intercept."""
    run(server, source(), **settings)
