"""What a server receives under SecAgg+, counted and kept."""

import copy
from collections.abc import Iterable, Mapping

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fl_privacy.federation import Failure
from fl_privacy.flower.inside.legacy import RECORD_KEY_CONFIGS, SecAggKey, bytes_to_ndarray
from fl_privacy.flower.transport import RelayGrid, pair


class Traffic(RelayGrid):
    """A grid that keeps account of what the server receives.

    Attributes:
        nodes: the node of each client.
        received: bytes so far.
        masked: the arrays by which each client last replied, as the server sees them.
        failed: why a client did not reply.
    """

    def __init__(self, grid: Grid, nodes: Mapping[int, int]) -> None:
        super().__init__(grid)
        self.nodes = nodes
        self.received = 0
        self.masked: dict[int, list[np.ndarray]] = {}
        self.failed: dict[int, str] = {}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Nodes get copies of what the workflow sends: those in this process would take keys out of it."""
        sent = list(messages)
        for message in sent:
            message.content = copy.deepcopy(message.content)
        replies = list(self.grid.send_and_receive(sent, timeout=timeout))
        client_of = {node: client for client, node in self.nodes.items()}
        for message, reply in pair(sent, replies):
            client = client_of[message.metadata.dst_node_id]
            if isinstance(reply, Failure):
                self.failed.setdefault(client, reply.reason)
                continue
            self.received += sum(map(len, _payload(reply.content)))
            record = reply.content.config_records.get(RECORD_KEY_CONFIGS)
            if vectors := record and record.get(SecAggKey.MASKED_PARAMETERS):
                self.masked[client] = [bytes_to_ndarray(piece) for piece in vectors]  # type: ignore[union-attr,arg-type]
        return replies


def _payload(content: RecordDict) -> list[bytes]:
    values = [value for record in content.config_records.values() for value in record.values()]
    lists = [value if isinstance(value, list) else [value] for value in values]
    arrays = [array.data for record in content.array_records.values() for array in record.values()]
    return [piece for some in lists for piece in some if isinstance(piece, bytes)] + arrays
