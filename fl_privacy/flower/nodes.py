"""Which node holds which partition."""

import logging
import time
from collections.abc import Sequence

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fl_privacy.errors import UserError
from fl_privacy.federation import Failure
from fl_privacy.federation.attempt import attempt
from fl_privacy.flower.exchange import pair
from fl_privacy.flower.records import CLIENT, PARTITION, PARTITIONS

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
ANSWER_SECONDS = 600.0


class Nodes:
    """The nodes of the partitions ``clients``; node ids are random, so each node is asked once which it holds."""

    def __init__(self, clients: Sequence[int], *, patience: float) -> None:
        self._clients = clients
        self._patience = patience
        self._node: dict[int, int] = {}
        self._client: dict[int, int] = {}
        self._connected: set[int] = set()

    def refresh(self, grid: Grid) -> None:
        """Ask the nodes that are new: before the first round until all partitions are there, later once.

        Raises:
            UserError: before the first round a node fails or holds no partition of this federation, or partitions have
                no node. Later such a node is logged and left aside.
        """
        if self._node:
            result = attempt(lambda: self._ask(grid))
            if isinstance(result, Failure):
                logger.warning("A node that joined is left aside: %s", result.reason)
            return
        deadline = time.monotonic() + self._patience
        self._ask(grid)
        while len(self._node) < len(self._clients):
            if time.monotonic() > deadline:
                raise UserError(
                    f"A node for each of {len(self._clients)} clients is expected, but {len(self._node)} are connected;"
                    f" start more SuperNodes or set federation.clients={max(1, len(self._node))}."
                )
            time.sleep(POLL_SECONDS)
            self._ask(grid)

    def __contains__(self, client: int) -> bool:
        return self._node.get(client) in self._connected

    def __getitem__(self, client: int) -> int:
        return self._node[client]

    def _ask(self, grid: Grid) -> None:
        self._connected = set(grid.get_node_ids())
        new = sorted(self._connected - self._client.keys())
        questions = [Message(RecordDict(), node, MessageType.QUERY) for node in new]
        replies = grid.send_and_receive(questions, timeout=ANSWER_SECONDS) if questions else ()
        for _, reply in pair(questions, replies):
            if isinstance(reply, Failure):
                raise UserError(f"A node is expected to say which partition it holds, but failed: {reply.reason}")
            self._learn(reply)

    def _learn(self, reply: Message) -> None:
        identity = reply.content.config_records[CLIENT]
        client, total = _integer(identity, PARTITION), _integer(identity, PARTITIONS)
        if client not in self._clients or total != len(self._clients):
            raise UserError(
                f"Partitions 0..{len(self._clients) - 1} are expected on the nodes, but one holds {client} of {total};"
                f" set federation.clients={total}, or start {len(self._clients)} SuperNodes."
            )
        self._node[client] = reply.metadata.src_node_id
        self._client[reply.metadata.src_node_id] = client


def _integer(record: ConfigRecord, key: str) -> int:
    value = record.get(key)
    if not isinstance(value, int):
        raise UserError(f"A node is expected to have the number {key} in its node config, but has {value!r}.")
    return value
