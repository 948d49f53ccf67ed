"""Who is told how a run goes on."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from fl_privacy.attacks import Progress, no_progress
from fl_privacy.federation import Evaluation, RoundReport


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
