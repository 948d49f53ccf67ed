"""A Flower strategy that runs the rounds of a ``Server``."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fl_privacy.errors import UserError
from fl_privacy.federation import Audit, Evaluation, Failure, LocalResult, Personalized, RoundReport, Server, attempt
from fl_privacy.federation.rounds import finish_round, with_personalized
from fl_privacy.flower import records
from fl_privacy.flower.grids import SILENCE, pair
from fl_privacy.flower.records import CLIENT, DATA_PATH, OWN_DATA, PARTITION, PARTITIONS, SIMULATED
from fl_privacy.types import ModelState

logger: logging.Logger = logging.getLogger(__name__)
POLL_SECONDS = 0.2
ANSWER_SECONDS = 600.0
TRIES = 3  # largest number of queries to a node that fails; a silent one gets one
MOST_NODES = 100_000

_ASKED, _FIRST_SECONDS = 8, 60.0
"""Number of nodes asked for the number of partitions, and seconds to wait for the first."""


def partitions_of(grid: Grid) -> int | None:
    """Ask a few nodes behind ``grid`` for the number of partitions, and return it; ``None`` if no majority agrees."""
    deadline = time.monotonic() + _FIRST_SECONDS
    while not (nodes := sorted(grid.get_node_ids())) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    questions = [Message(RecordDict(), node, MessageType.QUERY) for node in nodes[:_ASKED]]
    replies = grid.send_and_receive(questions, timeout=ANSWER_SECONDS) if questions else ()
    totals = Counter[int]()
    for _, reply in pair(questions, replies):
        if isinstance(reply, Failure):
            continue
        total = attempt(lambda: _integer(reply.content.config_records[CLIENT], PARTITIONS))  # noqa: B023
        if isinstance(total, int) and 1 <= total <= MOST_NODES:
            totals[total] += 1
    if not totals:
        return None
    number, votes = totals.most_common(1)[0]
    return number if 2 * votes > totals.total() else None


@dataclass(kw_only=True, eq=False)
class NodeRules:
    """Requirements of a run on nodes in other processes, such as authentication and waiting times."""

    patience: float = 60.0  # seconds to wait for all nodes before the first round
    bound: bool = False  # ``True`` if nodes are authenticated: an id stands for a key and keeps its partition
    simulated: bool | None = None  # required answer of nodes about their clients; ``None`` accepts both
    own_data: bool | None = None  # required answer about training on the node's own folder; ``None`` accepts both
    reconnect: float = 0.0  # seconds to wait at the start of each later round for nodes that have left


@dataclass(eq=False)
class Nodes(NodeRules):
    """Mapping from each of ``clients`` (partition numbers) to its node.

    A partition belongs to the first node that claims it, until that node leaves or, if ``bound``, forever.
    """

    clients: Sequence[int]
    _node: dict[int, int] = field(default_factory=dict, init=False)
    _claims: dict[int, int] = field(default_factory=dict, init=False)
    _aside: dict[int, str] = field(default_factory=dict, init=False)
    _tries: Counter[int] = field(default_factory=Counter, init=False)
    _foreign: dict[int, int] = field(default_factory=dict, init=False)
    _connected: set[int] = field(default_factory=set, init=False)

    def refresh(self, grid: Grid) -> None:
        """Wait for all nodes, at most ``reconnect`` seconds for lost ones; ``UserError`` if one never connected."""
        if len(self._node) == len(self.clients):
            deadline = time.monotonic() + self.reconnect
            while True:
                result = attempt(lambda: self._ask(grid))
                if isinstance(result, Failure):
                    logger.warning("Nodes that joined could not be asked: %s", result.reason)
                if all(client in self for client in self.clients) or time.monotonic() >= deadline:
                    return
                time.sleep(POLL_SECONDS)
        deadline = time.monotonic() + self.patience
        self._ask(grid)
        while len(self._node) < len(self.clients):
            nodes = self._connected
            failed = len(nodes) >= len(self.clients) and all(self._tries[node] >= TRIES for node in nodes)
            of_others = len(nodes) > 1 and {self._foreign.get(node) for node in nodes} == {len(nodes)}
            if time.monotonic() > deadline or failed or of_others:
                reasons = [self._aside[node] for node in sorted(nodes & self._aside.keys())]
                few = (
                    f"A node for each of {len(self.clients)} clients is expected, but {len(self._node)} are connected;"
                    f" start more SuperNodes or set federation.clients={max(1, len(self._node))}."
                )
                raise UserError(reasons[0] if reasons else few)
            time.sleep(POLL_SECONDS)
            self._ask(grid)

    def __contains__(self, client: int) -> bool:
        return self._node.get(client) in self._connected

    def __getitem__(self, client: int) -> int:
        return self._node[client]

    def _ask(self, grid: Grid) -> None:
        self._connected = set(grid.get_node_ids())
        done = {node for node in self._aside if self._tries[node] >= TRIES}
        new = sorted(self._connected - self._claims.keys() - done)
        questions = [Message(RecordDict(), node, MessageType.QUERY) for node in new]
        replies = grid.send_and_receive(questions, timeout=ANSWER_SECONDS) if questions else ()
        for node, (_, reply) in zip(new, pair(questions, replies), strict=True):
            if isinstance(reply, Failure):
                self._tries[node] += TRIES if reply == SILENCE else 1
                self._leave(node, f"A node is expected to say which partition it holds, but failed: {reply.reason}")
                continue
            claim = attempt(lambda: self._claimed(node, reply))  # noqa: B023
            if isinstance(claim, Failure):
                self._tries[node] = TRIES
                self._leave(node, claim.reason.removeprefix("UserError: "))
            else:
                self._aside.pop(node, None)
                self._claims[node] = claim
        for node, client in self._claims.items():
            holder = self._node.get(client)
            if holder == node or node not in self._connected:
                continue
            if holder is None or (holder not in self._connected and not self.bound):
                self._node[client] = node
            elif node not in self._aside:
                self._leave(node, f"partition {client}, which it claims, belongs to node {holder}")

    def _claimed(self, node: int, reply: Message) -> int:
        identity = reply.content.config_records[CLIENT]
        client, total = _integer(identity, PARTITION), _integer(identity, PARTITIONS)
        if client not in self.clients or total != len(self.clients):
            self._foreign[node] = total
            raise UserError(
                f"Partitions 0..{len(self.clients) - 1} are expected on the nodes, but one holds {client} of {total};"
                f" set federation.clients={total}, or start {len(self.clients)} SuperNodes."
            )
        if self.simulated is not None and bool(identity.get(SIMULATED, 0)) != self.simulated:
            raise UserError(
                f"Nodes are expected to be {'simulated' if self.simulated else 'deployed'}, but the one of partition"
                f" {client} is not; set FL_PRIVACY_SIMULATION alike for server and nodes."
            )
        if self.own_data is not None and bool(identity.get(OWN_DATA, 0)) != self.own_data:
            wanted = "folders of their own" if self.own_data else "the data that the run names"
            raise UserError(
                f"Nodes are expected to train on {wanted}, but the one of partition {client} does not; give"
                f" {DATA_PATH} in the node config of all nodes and own-data=true in the run config, or neither."
            )
        return client

    def _leave(self, node: int, reason: str) -> None:
        self._aside[node] = reason
        logger.warning("Node %d is left aside: %s", node, reason)


def _integer(record: ConfigRecord, key: str) -> int:
    value = record.get(key)
    if not isinstance(value, int):
        raise UserError(f"A node is expected to have the number {key} in its node config, but has {value!r}; set it.")
    return value


PROBE = "train.probe"
PERSONALIZE = "evaluate.personalize"
T = TypeVar("T")


@dataclass(eq=False, kw_only=True)
class Federated(NodeRules, Strategy):
    """Flower strategy that runs the rounds of ``server``.

    With an ``audit``, a round begins with probes: requests for uploads of chosen examples, which train nothing.
    ``timeout``: seconds to wait for the replies to probes. Other settings are those of ``NodeRules``.
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
        """Get the round's probes, then make the messages; ``UserError`` if nodes are missing or break the rules."""
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
        results: dict[int, LocalResult | Failure] = {c: Failure("its node is not connected") for c in self._absent}
        results |= self._ends(replies, lambda reply: records.read_result(reply.content, self.server.state))
        self._report = report = finish_round(self.server, results, round=server_round, started=self._started)
        if not self.server.personal:
            self.on_round(report)
        return self.arrays(), MetricRecord({records.TRAIN_LOSS: report.train_loss, "clients": len(report.clients)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
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
                raise UserError(
                    f"accuracy is expected in [0, 1] of at least 1 example, got {tested} of {number}; correct the test"
                )
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
