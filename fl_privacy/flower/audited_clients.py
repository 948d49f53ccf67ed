"""Who the nodes of a training under audit are: nothing that one of them says of itself touches what others are."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import Message

from fl_privacy.effects import Description, to_plain
from fl_privacy.flower.interception import HonestButCurious
from fl_privacy.flower.records import CLIENT, PARTITION

MOST_PARTITION = 999_999_999
"""The largest number that names a client."""

AGREED = 0.5
"""Share of clients above which what they say of their defense is said of the training."""


def told_partition(reply: Message) -> int | None:
    """The partition that the client behind ``reply`` says that it holds; ``None`` where it says none, or nonsense."""
    record = reply.content.config_records.get(CLIENT)
    told = record.get(PARTITION) if record is not None else None
    usable = isinstance(told, int) and not isinstance(told, bool) and 0 <= told <= MOST_PARTITION
    return told if usable else None  # type: ignore[return-value]


@dataclass(eq=False)
class NamingServer(HonestButCurious):
    """An honest-but-curious server that gives each node a number of its own and leaves none out.

    The number is the partition that the node says that it holds, else the rank of its id among all nodes; where another
    connected node has that number already, the first one free above. A node keeps its number.

    Attributes:
        partitions: by client, the partition that it says that it holds.
    """

    partitions: dict[int, int] = field(default_factory=dict, init=False)
    _numbers: dict[int, int] = field(default_factory=dict, init=False, repr=False)

    def name_all(self, exchanged: Iterable[tuple[Message, Message]]) -> None:
        """Number the nodes of messages and their replies: first those that say which partition they hold."""
        for message, reply in sorted(exchanged, key=_turn):
            self.client_of(message, reply)

    def client_of(self, message: Message, reply: Message) -> int:
        """The number of the node that answered ``message``."""
        node = message.metadata.dst_node_id
        if node not in self._numbers:
            here = set(self._node_ids)
            taken = {number for other, number in self._numbers.items() if other in here}
            told = told_partition(reply)
            ranked = self._node_ids.index(node) if node in here else len(self._node_ids)
            number = ranked if told is None else told
            while number in taken:
                number = (number + 1) % (MOST_PARTITION + 1)
            for gone in [other for other, theirs in self._numbers.items() if theirs == number]:
                del self._numbers[gone]
            self._numbers[node] = number
            self.partitions.pop(number, None)
            if told is not None:
                self.partitions[number] = told
        return self._numbers[node]


def agreed_defense(told: Mapping[int, Description]) -> Description:
    """What more than half of the clients say of their defense; empty where they don't agree."""
    spelled = {client: json.dumps(to_plain(parts), sort_keys=True) for client, parts in told.items()}
    usual, number = Counter(spelled.values()).most_common(1)[0] if spelled else ("", 0)
    return next((told[c] for c, text in spelled.items() if text == usual), ()) if number > AGREED * len(told) else ()


def _turn(exchanged: tuple[Message, Message]) -> tuple[bool, int]:
    """When a node gets its number: those that say their partition first, in the order of their ids."""
    message, reply = exchanged
    return told_partition(reply) is None, message.metadata.dst_node_id
