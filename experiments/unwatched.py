"""Federations that are run for their cost or their weights, of which nobody reads what is intercepted.

Not a command of its own.
"""

from collections.abc import Callable, Generator
from typing import Any

from fl_privacy.federation import Audit, Round
from fl_privacy.federation.interception import Interceptor
from fl_privacy.flower import rounds_in_process, rounds_on_ray
from fl_privacy.runs.run_location import plain_loop
from fl_privacy.runs.setup import Setup

BACKENDS: dict[str, Any] = {"loop": plain_loop, "flower": rounds_in_process, "ray": rounds_on_ray}


def unwatched_rounds(
    backend: str, federation: Setup, source: Callable[[], Any], **options: Any
) -> Generator[Round, None, object]:
    """Run the rounds of ``federation`` on a backend where nothing is intercepted.

    Args:
        backend: of ``BACKENDS``.
        federation: which is trained.
        source: makes its clients.
        options: of the backend.
    """
    rounds: Generator[Round, None, object] = BACKENDS[backend](
        federation.server,
        source,
        rounds=federation.rounds,
        audit=Audit(),
        interceptor=Interceptor(
            model=federation.model,
            plan=federation.server.local_plan,
            input_shape=federation.dataset.train.input_shape,
            num_classes=federation.dataset.train.num_classes,
        ),
        **options,
    )
    return rounds
