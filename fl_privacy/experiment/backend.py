"""What carries a round's messages: a plain loop here, Flower elsewhere; all give the same numbers."""

from collections.abc import Callable
from typing import Protocol

from fl_privacy.federation import ClientSource, RoundReport, Server, run_rounds
from fl_privacy.interception import Audit, Interceptor


class Backend(Protocol):
    """Runs ``rounds`` rounds on ``server``, telling ``interceptor`` and ``on_round`` of what happens."""

    def __call__(
        self,
        server: Server,
        source: ClientSource,
        *,
        rounds: int,
        audit: Audit,
        interceptor: Interceptor,
        on_round: Callable[[RoundReport], None],
    ) -> object:
        """Train ``server.state``."""
        ...


def plain_loop(
    server: Server,
    source: ClientSource,
    *,
    rounds: int,
    audit: Audit,
    interceptor: Interceptor,
    on_round: Callable[[RoundReport], None],
) -> None:
    """Every client in this process, one after the other."""
    run_rounds(server, source(), rounds=rounds, audit=audit, interceptor=interceptor, on_round=on_round)
