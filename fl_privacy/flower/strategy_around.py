"""What every strategy around another one does alike."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy


@dataclass(eq=False)
class StrategyAround(Strategy):
    """Leaves the evaluation to the strategy within; training is its subclasses' matter.

    What else the strategy within has, such as methods of an app's own class, is reached through this one.

    Attributes:
        strategy: any of ``flwr.serverapp.strategy``.
    """

    strategy: Strategy

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "strategy" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__dict__["strategy"], name)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        self.strategy.summary()
