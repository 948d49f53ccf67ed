"""What a server receives under SecAgg+, counted and kept."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fl_privacy.federation import Failure
from fl_privacy.flower.inside.legacy import RECORD_KEY_CONFIGS, SecAggKey, bytes_to_ndarray
from fl_privacy.flower.masked_replies import MaskedReplies
from fl_privacy.flower.transport import SILENCE, RelayGrid, error_reply, pair

NOT_COUNTED = "its reply does not count"


class Traffic(RelayGrid):
    """A grid that keeps account of what the server receives.

    Attributes:
        nodes: the node of each client.
        received: bytes so far.
        masked: the arrays by which each client last replied, as the server sees them.
        failed: why a client did not reply, or its reply does not count.
        expected: what replies have to look like; ``None`` takes any.
        breaking: why the reply of a client did not count in this round.
    """

    def __init__(self, grid: Grid, nodes: Mapping[int, int]) -> None:
        super().__init__(grid)
        self.nodes = nodes
        self.received = 0
        self.masked: dict[int, list[np.ndarray]] = {}
        self.failed: dict[int, str] = {}
        self.expected: MaskedReplies | None = None
        self.breaking: dict[int, str] = {}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Nodes get copies of what the workflow sends: those in this process would take keys out of it."""
        sent = list(messages)
        asked: list[Mapping[str, Any]] = []
        for message in sent:
            asked.append(dict(message.content.config_records.get(RECORD_KEY_CONFIGS, {})))
            message.content = copy.deepcopy(message.content)
        received = list(self.grid.send_and_receive(sent, timeout=timeout))
        client_of = {node: client for client, node in self.nodes.items()}
        pairs = zip(asked, pair(sent, received), strict=True)
        answered = [(message, self._checked(record, reply)) for record, (message, reply) in pairs]
        for message, reply in answered:
            client = client_of[message.metadata.dst_node_id]
            if isinstance(reply, Failure):
                self.failed.setdefault(client, reply.reason)
                if reply.reason.startswith(NOT_COUNTED):
                    self.breaking[client] = reply.reason
                continue
            self.received += sum(map(len, _payload(reply.content)))
            record = reply.content.config_records.get(RECORD_KEY_CONFIGS)
            if vectors := record and record.get(SecAggKey.MASKED_PARAMETERS):
                self.masked[client] = [bytes_to_ndarray(piece) for piece in vectors]  # type: ignore[union-attr,arg-type]
        return [error_reply(m, r) if isinstance(r, Failure) else r for m, r in answered if r is not SILENCE]

    def _checked(self, asked: Mapping[str, Any], reply: Message | Failure) -> Message | Failure:
        """``reply`` to the protocol's record ``asked``, or why it does not count."""
        if isinstance(reply, Failure) or self.expected is None:
            return reply
        reason = self.expected.fault(asked, reply.content, self.nodes.values())
        return reply if reason is None else Failure(f"{NOT_COUNTED}: {reason}")


def _payload(content: RecordDict) -> list[bytes]:
    values = [value for record in content.config_records.values() for value in record.values()]
    lists = [value if isinstance(value, list) else [value] for value in values]
    arrays = [array.data for record in content.array_records.values() for array in record.values()]
    return [piece for some in lists for piece in some if isinstance(piece, bytes)] + arrays
