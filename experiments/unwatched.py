"""Federations that are run for their cost or their weights, of which nobody reads what is intercepted.

Not a command of its own.
"""

from collections.abc import Callable
from typing import Any

from fl_privacy.experiment.run_folder import plain_loop
from fl_privacy.experiment.setup import Setup
from fl_privacy.federation import Audit, RoundReport
from fl_privacy.flower import run_in_process, run_ray
from fl_privacy.interception import Interceptor

BACKENDS: dict[str, Any] = {"loop": plain_loop, "flower": run_in_process, "ray": run_ray}


def run_unwatched(
    backend: str,
    federation: Setup,
    source: Callable[[], Any],
    on_round: Callable[[RoundReport], None],
    **options: Any,
) -> None:
    """Run all rounds of ``federation`` on a backend whose interceptor throws away what it sees.

    Args:
        backend: of ``BACKENDS``.
        federation: which is trained.
        source: makes its clients.
        on_round: told of each round.
        options: of the backend.
    """
    BACKENDS[backend](
        federation.server,
        source,
        rounds=federation.rounds,
        audit=Audit(),
        interceptor=Interceptor(
            model=federation.model,
            plan=federation.server.local_plan,
            input_shape=federation.dataset.train.input_shape,
            num_classes=federation.dataset.train.num_classes,
            sink=lambda observation: None,
        ),
        on_round=on_round,
        **options,
    )
