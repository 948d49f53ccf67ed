"""Exchange messages with nodes, and record what a server receives under SecAgg+."""

import copy
import io
import itertools
import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict, UserConfig as NodeConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fl_privacy.federation.replies import Failure, attempt, fault
from fl_privacy.flower._node_memory import SimulatedContext
from fl_privacy.flower.clients import COUNTS, NAMES
from fl_privacy.flower.inside.identity import Run, bytes_to_public_key, identify_process
from fl_privacy.flower.inside.legacy import (
    RECORD_KEY_CONFIGS,
    FitRes,
    SecAggKey,
    SecAggStage,
    bytes_to_ndarray,
    recorddict_to_fitres,
)
from fl_privacy.flower.records import DEFENSE_SECONDS, PARTITION, PARTITIONS, TRAIN_LOSS
from fl_privacy.progress import counted
from fl_privacy.types import ModelState, Tensors, Upload

MOST_BYTES_OF_KEYS = 1 << 16  # largest size of a public key, a ciphertext or a key share
_CIPHERTEXTS = (SecAggKey.DESTINATION_LIST, SecAggKey.CIPHERTEXT_LIST)
_HEADER = 1 << 12  # largest header of an array in bytes


@dataclass(frozen=True)
class MaskedReplies:
    """Checks of SecAgg+ replies: of shapes and of the parts in the clear, since masked values can't be checked."""

    shapes: Mapping[str, tuple[int, ...]]  # shape of each masked tensor
    counts: Tensors  # integer buffers, which are sent in the clear
    most: int  # largest number of examples in a reply

    @classmethod
    def to(cls, state: ModelState, most: int) -> "MaskedReplies":
        values = {**state.parameters, **state.buffers}
        masked = {name: tuple(t.shape) or (1,) for name, t in values.items() if t.is_floating_point()}
        return cls(masked, {name: t for name, t in values.items() if name not in masked}, most)

    def fault(self, sent: Mapping[str, Any], reply: RecordDict, nodes: Collection[int]) -> str | None:
        """Return why ``reply`` to the message ``sent`` is unusable, or ``None``; ``nodes``: all node ids."""
        got = reply.config_records.get(RECORD_KEY_CONFIGS)
        if got is None:
            return "it has no record of the protocol"
        looks = {
            SecAggStage.SETUP: lambda: _keys_fault(got),
            SecAggStage.SHARE_KEYS: lambda: _pieces_fault(got, *_CIPHERTEXTS, nodes),
            SecAggStage.COLLECT_MASKED_VECTORS: lambda: self._vectors_fault(got, reply),
            SecAggStage.UNMASK: lambda: _shares_fault(sent, got, nodes),
        }
        found = attempt(looks[str(sent[SecAggKey.STAGE])])
        return found.reason if isinstance(found, Failure) else found

    def _vectors_fault(self, got: ConfigRecord, reply: RecordDict) -> str | None:
        answer: FitRes = recorddict_to_fitres(reply, True)
        number: Any = answer.num_examples
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= self.most:
            return f"expected 1 to {self.most} examples, got {str(number)[:30]}"
        if not all(isinstance(answer.metrics.get(key, 0.0), int | float) for key in (TRAIN_LOSS, DEFENSE_SECONDS)):
            return "its loss or seconds are no numbers"
        names = json.loads(str(answer.metrics.get(NAMES)))
        if not isinstance(names, list) or sorted(map(str, names)) != sorted(self.shapes):
            return "its names are not those of the tensors that were sent"
        if reason := self._buffers_fault(json.loads(str(answer.metrics.get(COUNTS)))):
            return reason
        vectors = got.get(SecAggKey.MASKED_PARAMETERS)
        shapes = [(1,), *(self.shapes[name] for name in names)]
        if not isinstance(vectors, list) or len(vectors) != len(shapes):
            return f"expected {len(shapes)} masked arrays"
        return next(filter(None, map(_vector_fault, vectors, shapes)), None)

    def _buffers_fault(self, buffers: Any) -> str | None:
        if not isinstance(buffers, dict) or buffers.keys() != self.counts.keys():
            return "its buffers in the clear are not those that were sent"
        made = {name: torch.tensor(buffers[name], dtype=like.dtype) for name, like in self.counts.items()}
        return fault(Upload(tensors={}, buffers=made, num_examples=1), ModelState({}, self.counts))


def _keys_fault(got: ConfigRecord) -> str | None:
    for name in (SecAggKey.PUBLIC_KEY_1, SecAggKey.PUBLIC_KEY_2):
        key = got.get(name)
        if not isinstance(key, bytes) or len(key) > MOST_BYTES_OF_KEYS:
            return f"{name} is no public key"
        bytes_to_public_key(key)
    return None


def _pieces_fault(got: ConfigRecord, whose: str, pieces: str, nodes: Collection[int]) -> str | None:
    named, held = got.get(whose), got.get(pieces)
    if not isinstance(named, list) or not isinstance(held, list) or len(named) != len(held):
        return f"expected one of {pieces} for each of {whose}"
    if len(set(named)) < len(named) or not set(named) <= set(nodes):
        return f"{whose} are not nodes that take part, each once"
    if not all(isinstance(piece, bytes) and len(piece) <= MOST_BYTES_OF_KEYS for piece in held):
        return f"{pieces} are not short bytes"
    return None


def _shares_fault(sent: Mapping[str, Any], got: ConfigRecord, nodes: Collection[int]) -> str | None:
    if reason := _pieces_fault(got, SecAggKey.NODE_ID_LIST, SecAggKey.SHARE_LIST, nodes):
        return reason
    lists = (sent[SecAggKey.ACTIVE_NODE_ID_LIST], sent[SecAggKey.DEAD_NODE_ID_LIST], got[SecAggKey.NODE_ID_LIST])
    active, dead, asked = (set(nodes) for nodes in lists if isinstance(nodes, list))
    return None if asked == active | dead else "its shares are not those that were asked for"


def _vector_fault(piece: Any, shape: tuple[int, ...]) -> str | None:
    if not isinstance(piece, bytes):
        return "a masked array is not bytes"
    file = io.BytesIO(piece)
    if np.lib.format.read_magic(file) != (1, 0):
        return "a masked array is not in NumPy's format 1.0"
    found, fortran, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=_HEADER)
    if found != shape or fortran or dtype.kind not in "iu" or dtype.hasobject:
        return f"expected a masked array of whole numbers of shape {shape}, got {dtype} of {str(found)[:60]}"
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    return None if len(piece) - file.tell() == size else "a masked array is not as long as it says"


CLIENT_CRASHED = 8  # Flower's error code for a client's process
FIRST_NODE = 1000  # node id of partition 0


def in_simulation_engine(grid: Grid) -> bool:
    """Return ``True`` for the grid of Flower's simulation engine."""
    return type(grid).__name__ == "InMemoryGrid"


class LocalGrid(Grid):
    """Grid of simulated nodes, numbered from ``FIRST_NODE``; ``client_app`` answers for them in this process."""

    def __init__(self, clients: Sequence[int], client_app: ClientApp | None = None) -> None:
        self.client_app = client_app
        self.contexts: dict[int, SimulatedContext] = {}
        for client in clients:
            self.add_node(client).node_config[PARTITIONS] = len(clients)
        self._numbers = itertools.count(1)
        self._replies: dict[str, Message] = {}
        identify_process()

    def add_node(self, client: int) -> SimulatedContext:
        node, config = FIRST_NODE + client, NodeConfig({PARTITION: client})
        self.contexts[node] = made = SimulatedContext(1, node, config, RecordDict(), NodeConfig())
        return made

    def deliver(self, messages: Sequence[Message]) -> list[Message]:
        return [self._answer(message) for message in counted("message to a client", messages)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return list(self.pull_messages(self.push_messages(messages)))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        for message in sent:
            message.metadata.__dict__["_message_id"] = str(next(self._numbers))
        self._replies.update({reply.metadata.reply_to_message_id: reply for reply in self.deliver(sent)})
        return [message.metadata.message_id for message in sent]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._replies.pop(number) for number in message_ids if number in self._replies]

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def set_run(self, run: Run) -> None:
        """Ignore ``run``: a local grid has only one."""

    @property
    def run(self) -> Run:
        return Run.create_empty(run_id=1)

    def _answer(self, message: Message) -> Message:
        assert self.client_app is not None
        app, context = self.client_app, self.contexts[message.metadata.dst_node_id]
        reply = attempt(lambda: app(message, context))
        return error_reply(message, reply) if isinstance(reply, Failure) else reply


def _relayed(method: str) -> Any:
    def relay(self: "RelayGrid", *args: Any, **kwargs: Any) -> Any:
        return getattr(self.grid, method)(*args, **kwargs)

    return relay


class RelayGrid(Grid):
    """Wrapper of another grid, for subclasses that change messages on the way."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    send_and_receive, create_message = map(_relayed, ("send_and_receive", "create_message"))
    push_messages, pull_messages = map(_relayed, ("push_messages", "pull_messages"))
    get_node_ids, get_nodes, set_run = map(_relayed, ("get_node_ids", "get_nodes", "set_run"))

    @property
    def run(self) -> Run:
        return self.grid.run


class PromptGrid(RelayGrid):
    """Grid that polls for replies at once and then less and less often, unlike Flower's."""

    SOONEST, RAREST, PACE = 0.1, 3.0, 0.05
    """Seconds between two polls: the least, the most, and in between this share of the time waited so far."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        waiting, replies = set(self.push_messages(messages)), list[Message]()
        started = time.monotonic()
        while waiting:
            waited = time.monotonic() - started
            found = list(self.pull_messages(waiting))  # may take minutes if a node died while it sent its reply
            replies += found
            waiting.difference_update(reply.metadata.reply_to_message_id for reply in found)
            if timeout is not None and waited >= timeout:
                break
            if waiting:
                time.sleep(min(max(self.SOONEST, self.PACE * waited), self.RAREST))
        return replies


def error_reply(message: Message, failure: Failure) -> Message:
    """Build the error reply to ``message`` for a client that crashed."""
    return Message(Error(CLIENT_CRASHED, failure.reason), reply_to=message)


SILENCE = Failure("no reply in time")


def pair(sent: Sequence[Message], replies: Iterable[Message]) -> list[tuple[Message, Message | Failure]]:
    """Pair each sent message with its reply or failure, by message id."""
    by_id = {reply.metadata.reply_to_message_id: reply for reply in replies}
    pairs = list[tuple[Message, Message | Failure]]()
    for message in sent:
        reply: Message | Failure = by_id.get(message.metadata.message_id, SILENCE)
        if isinstance(reply, Message) and not reply.has_content():
            lines = (reply.error.reason or "").strip().splitlines()
            reply = Failure(lines[0] if lines else f"Flower's error {reply.error.code}")
        pairs.append((message, reply))
    return pairs


NOT_COUNTED = "its reply does not count"


class Traffic(RelayGrid):
    """A grid that records what the server receives, and refuses replies whose arrays differ from ``expected``."""

    def __init__(self, grid: Grid, nodes: Mapping[int, int]) -> None:
        super().__init__(grid)
        self.nodes = nodes  # node of each client
        self.received = 0  # bytes
        self.masked: dict[int, list[np.ndarray]] = {}  # arrays of each client's last reply
        self.failed: dict[int, str] = {}  # reasons by client why replies are missing or do not count
        self.expected: MaskedReplies | None = None  # required form of replies; ``None`` accepts any
        self.breaking: dict[int, str] = {}  # reasons by client why replies of this round do not count

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send copies of messages, since simulated nodes change them; return replies, or errors for malformed ones."""
        sent = list(messages)
        asked: list[Mapping[str, Any]] = []
        for message in sent:
            asked.append(dict(message.content.config_records.get(RECORD_KEY_CONFIGS, {})))
            message.content = copy.deepcopy(message.content)
        received = list(self.grid.send_and_receive(sent, timeout=timeout))
        client_of = {node: client for client, node in self.nodes.items()}
        answered = list[tuple[Message, Message | Failure]]()
        for stated, (message, reply) in zip(asked, pair(sent, received), strict=True):
            if self.expected is not None and not isinstance(reply, Failure):
                fault = self.expected.fault(stated, reply.content, self.nodes.values())
                reply = reply if fault is None else Failure(f"{NOT_COUNTED}: {fault}")  # noqa: PLW2901
            answered.append((message, reply))
            client = client_of[message.metadata.dst_node_id]
            if isinstance(reply, Failure):
                self.failed.setdefault(client, reply.reason)
                if reply.reason.startswith(NOT_COUNTED):
                    self.breaking[client] = reply.reason
                continue
            values = [value for record in reply.content.config_records.values() for value in record.values()]
            lists = [value if isinstance(value, list) else [value] for value in values]
            arrays = [array.data for record in reply.content.array_records.values() for array in record.values()]
            self.received += sum(len(piece) for some in [*lists, arrays] for piece in some if isinstance(piece, bytes))
            record = reply.content.config_records.get(RECORD_KEY_CONFIGS)
            if vectors := record and record.get(SecAggKey.MASKED_PARAMETERS):
                self.masked[client] = [bytes_to_ndarray(piece) for piece in vectors]  # type: ignore[union-attr,arg-type]
        return [error_reply(m, r) if isinstance(r, Failure) else r for m, r in answered if r is not SILENCE]
