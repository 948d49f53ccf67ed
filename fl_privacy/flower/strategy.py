"""The rounds of a ``Server`` as a Flower strategy."""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fl_privacy.errors import UserError
from fl_privacy.federation import Audit, Evaluation, Failure, LocalResult, Personalized, RoundReport, Server
from fl_privacy.federation.replies import attempt
from fl_privacy.federation.rounds import finish_round, with_personalized
from fl_privacy.flower import records
from fl_privacy.flower.grids import pair
from fl_privacy.flower.nodes import NodeRules, Nodes
from fl_privacy.types import ModelState

PROBE = "train.probe"
PERSONALIZE = "evaluate.personalize"

T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class Federated(NodeRules, Strategy):
    """Send each client the server's message, and give the server the replies in the order of partitions.

    Probes precede their round's training messages, and train nothing.

    Settings of the nodes are those of ``NodeRules``; ``timeout`` is the seconds to wait for the replies to probes.
    """

    server: Server
    audit: Audit = field(default_factory=Audit)
    on_round: Callable[[RoundReport], None] = lambda report: None
    timeout: float = 600.0

    def __post_init__(self) -> None:
        self._nodes = Nodes(self.server.clients, **{rule.name: getattr(self, rule.name) for rule in fields(NodeRules)})
        self._started = 0.0
        self._asked: list[int] = []
        self._absent: list[int] = []
        self._messages: list[Message] = []
        self._report: RoundReport | None = None
        self._latest: tuple[ModelState, dict[str, ArrayRecord]] | None = None

    def arrays(self) -> ArrayRecord:
        sent = self._records(self.server.state)
        return ArrayRecord({**sent[records.PARAMETERS], **sent[records.BUFFERS]})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send the round's probes, then make the training messages; ``UserError`` if nodes have other partitions."""
        self._nodes.refresh(grid)
        probes = [probe for probe in self.audit.probes_of(server_round) if probe.client in self._nodes]
        asked = [(p.client, {records.VICTIM: p.number, records.BATCH_SIZE: self.audit.batch_size}) for p in probes]
        messages = [self._message(client, PROBE, server_round, **config) for client, config in asked]
        replies = grid.send_and_receive(messages, timeout=self.timeout) if messages else ()
        for probe, (_, reply) in zip(probes, pair(messages, replies), strict=True):
            if isinstance(reply, Failure):
                logger.warning("The probe %s failed: %s", probe.in_round(server_round), reply.reason)
        self._started = time.perf_counter()
        self._asked = [client for client in self.server.select(server_round) if client in self._nodes]
        self._absent = [client for client in self.server.select(server_round) if client not in self._nodes]
        self._messages = [self._message(client, MessageType.TRAIN, server_round) for client in self._asked]
        return self._messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Move the server's model by the clients' replies; ``UserError`` if no reply is usable."""
        results: dict[int, LocalResult | Failure] = {c: Failure("its node is not connected") for c in self._absent}
        results |= self._ends(replies, lambda reply: records.read_result(reply.content, self.server.state))
        self._report = report = finish_round(self.server, results, round=server_round, started=self._started)
        if not self.server.personal:
            self.on_round(report)
        return self.arrays(), MetricRecord({records.TRAIN_LOSS: report.train_loss, "clients": len(report.clients)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask clients with a private part to end the round with the new model; others do not evaluate."""
        if not self.server.personal:
            return []
        test = {records.TEST: int(server_round in self.server.tested)}
        self._messages = [self._message(client, PERSONALIZE, server_round, **test) for client in self._asked]
        return self._messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> None:
        if not self.server.personal or self._report is None:
            return

        def read(reply: Message) -> Personalized:
            record = reply.content.metric_records[records.METRICS]
            metrics = {key: records.finite_number(record, key) for key in record}
            tested, number = metrics.get("accuracy"), int(metrics[records.NUM_EXAMPLES])
            if tested is not None and not (0 <= tested <= 1 and number > 0):
                raise UserError(f"accuracy is expected in [0, 1] of at least 1 example, got {tested} of {number}")
            evaluation = None if tested is None else Evaluation(tested, metrics["loss"], number)
            return Personalized(seconds=metrics.get(records.SECONDS, 0.0), evaluation=evaluation)

        self.on_round(with_personalized(self._report, self._ends(replies, read)))

    def _ends(self, replies: Iterable[Message], read: Callable[[Message], T]) -> dict[int, T | Failure]:
        paired = zip(self._asked, pair(self._messages, replies), strict=True)
        self._messages = []
        return {c: end if isinstance(end, Failure) else attempt(partial(read, end)) for c, (_, end) in paired}

    def summary(self) -> None:
        logger.info("%d clients, %s", len(self.server.clients), self.server.plan)

    def _message(self, client: int, kind: str, round: int, **config: int) -> Message:
        sent = self._records(self.server.sent_to(client, round))
        content = RecordDict({**sent, records.CONFIG: ConfigRecord({records.ROUND: round, **config})})
        return Message(content, self._nodes[client], kind, group_id=str(round))

    def _records(self, state: ModelState) -> dict[str, ArrayRecord]:
        if self._latest is None or self._latest[0] is not state:
            self._latest = state, records.state_records(state)
        return self._latest[1]
