"""Build the backend that ``backend=`` and ``secure_aggregation=`` name."""

from collections.abc import Generator
from functools import partial
from typing import Any

from fl_privacy.checks.packages import expect_package
from fl_privacy.errors import UserError
from fl_privacy.federation import Audit, ClientSource, Round, Server
from fl_privacy.federation.interception import Interceptor
from fl_privacy.federation.parallel import expect_answer
from fl_privacy.runs.build import build_inferences
from fl_privacy.runs.config import RunSettings
from fl_privacy.runs.config.building import check_arguments, plain_settings
from fl_privacy.runs.run_location import Backend, plain_loop
from fl_privacy.runs.server_attack import build_server_attack


def backend_of(config: RunSettings) -> Backend:
    """Build the backend that ``config.backend`` and ``config.secure_aggregation`` choose."""
    if secure := secure_backend_of(config):
        return secure
    settings = plain_settings(config.backend)
    name = settings.pop("name", None)
    if name in ("flower", "ray"):
        expect_package("flwr", f"backend={name}")
    if name == "ray":
        expect_package("ray", "backend=ray")
        from fl_privacy.flower.backends import rounds_on_ray  # noqa: PLC0415
        from fl_privacy.flower.ray_nodes import check_request  # noqa: PLC0415

        check_arguments(rounds_on_ray, settings, "backend")
        check_request(**{key: value for key, value in settings.items() if key in ("num_cpus", "num_gpus", "actors")})
        expect_answer()
        return partial(rounds_on_ray, **settings)
    if settings:
        raise UserError(f"Unknown key backend.{next(iter(settings))}; backend={name} has no settings, leave it out.")
    if name == "flower":
        from fl_privacy.flower.backends import rounds_in_process  # noqa: PLC0415

        return rounds_in_process
    if name == "loop":
        return plain_loop
    raise UserError(f"backend.name is expected to be loop, flower or ray, but got {name!r}; take one of them.")


def secure_backend_of(config: RunSettings) -> Backend | None:
    """Build the backend of ``secure_aggregation``, or ``None``; ``UserError`` if other settings exclude it."""
    settings = plain_settings(config.secure_aggregation)
    name = settings.pop("name", None)
    if name == "none":
        return None
    if config.backend["name"] != "loop":
        raise UserError(
            f"secure_aggregation={name} is expected to run in this process, but got backend={config.backend['name']};"
            " use backend=loop."
        )
    attack = build_server_attack(config.server)
    reads_sum = name == "secagg" and attack is not None and attack.reads_sum
    if not reads_sum and ("_target_" in config.attack or config.intercept.save or build_inferences(config.inference)):
        raise UserError(
            f"secure_aggregation={name} is expected without attacks on single updates, which it hides, but got one;"
            " use attack=none, inference=none and intercept.save=false, or server=loki or inconsistent with"
            " secure_aggregation=secagg."
        )
    rounds_of: Any
    if name == "secagg":
        expect_package("flwr", "secure_aggregation=secagg")
        from fl_privacy.flower.secagg import secure_rounds as rounds_of  # noqa: PLC0415
    else:
        from fl_privacy.federation.ckks import encrypted_rounds as rounds_of  # noqa: PLC0415
    check_arguments(rounds_of, settings, "secure_aggregation")
    return partial(unattacked, partial(rounds_of, **settings))


def unattacked(
    rounds_of: Any, server: Server, source: ClientSource, *, audit: Audit, interceptor: Interceptor, **settings: Any
) -> Generator[Round, None, object]:
    """Run ``rounds_of``, a backend that can't intercept single updates; ``audit`` and ``interceptor`` are ignored."""
    rounds: Generator[Round, None, object] = rounds_of(server, source(), **settings)
    return rounds
