"""What a run is given: who carries its messages, and who is told how it goes on."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from fl_privacy.attacks import Progress, no_progress
from fl_privacy.federation import Audit, ClientSource, Evaluation, RoundReport, Server, run_rounds
from fl_privacy.interception import Interceptor


class Backend(Protocol):
    """Runs ``rounds`` rounds on ``server``, telling ``interceptor`` and ``on_round`` of what happens.

    A plain loop here, Flower elsewhere; all give the same numbers.
    """

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


class Monitor:
    """Told of every step of a run; this one keeps it to itself."""

    def say(self, text: str) -> None:
        """A line about what happens next."""

    def training(self, rounds: int) -> AbstractContextManager[None]:
        """Around the training of ``rounds`` rounds; what ``fl_privacy.progress`` tells within is of the next one."""
        return nullcontext()

    def round_done(self, report: RoundReport, evaluation: Evaluation | None, epsilon: float | None) -> None:
        """A round is over; ``evaluation`` where the model was tested, ``epsilon`` spent where there is a guarantee."""

    def counting(self, title: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Around ``total`` steps of other long work; the context is told how many are done."""
        return nullcontext(lambda done: None)

    def working(self, title: str) -> AbstractContextManager[None]:
        """Around other work that ``fl_privacy.progress`` tells of."""
        return nullcontext()

    def attacking(self, what: str) -> AbstractContextManager[Progress]:
        """Around an attack on ``what``; the context is told of the progress."""
        return nullcontext(no_progress)
