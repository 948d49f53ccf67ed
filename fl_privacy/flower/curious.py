"""An honest-but-curious server: any Flower strategy, with the uploads that it can observe."""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import nn

from fl_privacy.attacks.malicious import ServerAttack
from fl_privacy.errors import UserError
from fl_privacy.federation import Audit, Failure, Probe
from fl_privacy.federation.interception import Interceptor
from fl_privacy.federation.interception.interceptor import States, no_states
from fl_privacy.federation.replies import MOST_EXAMPLES, attempt
from fl_privacy.flower import records
from fl_privacy.flower.audit_protocol import asked_probe
from fl_privacy.flower.grids import RelayGrid, pair
from fl_privacy.flower.strategy import PROBE
from fl_privacy.flower.wrappers import StrategyAround
from fl_privacy.types import ModelState, VictimId

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(eq=False)
class HonestButCurious(StrategyAround):
    """Follow the protocol of ``strategy``, and capture each upload with the model that was sent for it.

    It changes no message and no result. For clients of other packages, the interceptor's plan should say
    ``shares="weights"``.

    Attributes:
        states: private state of simulated clients, for an interceptor with side information.
        audit: rounds, and clients of training updates. A client is the partition it reports, else the rank of its
            node's id among all nodes. A partition belongs to the first node that reports it until that node leaves;
            another node's claim to it is not captured.
        problems: reasons for missing captures, with counts.
    """

    interceptor: Interceptor
    audit: Audit
    states: States = no_states
    problems: Counter[str] = field(default_factory=Counter, init=False)
    _sent: list[Message] = field(default_factory=list, init=False, repr=False)
    _node_ids: list[int] = field(default_factory=list, init=False, repr=False)
    _holder: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _before: States = field(default=no_states, init=False, repr=False)

    @property
    def connected(self) -> int:
        return len(self._node_ids)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of ``strategy``, and capture the probes that it sends meanwhile."""
        self._node_ids = sorted(grid.get_node_ids())
        self._before, helpers = self.states, self.interceptor.side_information
        if helpers is not None and self.states is not no_states and server_round in self.audit.rounds:
            self._before = {client: self.states(client) for client in helpers.clients}.__getitem__
        tapped = _TappedGrid(grid, self, server_round)
        self._sent = list(self.strategy.configure_train(server_round, arrays, config, tapped))
        return self._sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        received, sent, self._sent = list(replies), self._sent, []
        self.read(server_round, sent, received)
        return self.strategy.aggregate_train(server_round, received)

    def read(self, round: int, sent: Sequence[Message], replies: Iterable[Message]) -> None:
        if round not in self.audit.rounds:
            return
        states: dict[tuple[int, ...], ModelState] = {}
        for message, reply in pair(sent, replies):
            if isinstance(reply, Failure):
                continue
            result = attempt(lambda: self._capture(round, message, reply, states))  # noqa: B023
            if isinstance(result, Failure):
                logger.warning("An update of round %d could not be intercepted: %s", round, result.reason)
                self.problems[result.reason.partition(": ")[2][:200] or result.reason[:200]] += 1

    def _capture(self, round: int, message: Message, reply: Message, states: dict[tuple[int, ...], ModelState]) -> None:
        client = self.client_of(message, reply)
        victim = VictimId(round, client)
        if message.metadata.message_type == PROBE:
            (config,) = (record for record in message.content.config_records.values() if records.VICTIM in record)
            asked: tuple[int, int] | None = int(config[records.VICTIM]), int(config[records.BATCH_SIZE])  # type: ignore[arg-type]
        else:
            asked = asked_probe(message.content)
        if asked is not None:
            probe = Probe(client, asked[0])
            victim = probe.in_round(round)
            if not self.audit.expects(probe):
                raise UserError(f"an answer to one of the probes sent is expected, but got {victim}")
        elif not self.audit.intercepts(round, client):
            return
        model = self.interceptor.model
        shared = tuple(id(record) for record in message.content.array_records.values())
        if shared not in states:
            states[shared] = records.read_state(message.content, model)
        # the metric by which ``strategy``, or the strategy it wraps, weights replies
        strategy = self.strategy
        while (key := getattr(strategy, "weighted_by_key", None)) is None and hasattr(strategy, "strategy"):
            strategy = strategy.strategy
        upload = records.read_upload(reply.content, model, key if isinstance(key, str) else records.NUM_EXAMPLES)
        number, most = upload.num_examples, MOST_EXAMPLES if asked is None else asked[1]
        if not 1 <= number <= most:
            what = "A reply" if asked is None else "An answer to a probe"
            got = f"{number:.3g}" if abs(number) > MOST_EXAMPLES else str(number)
            raise UserError(f"{what} is expected to be of 1 to {most} examples, but says that it is of {got}")
        self.interceptor.capture(victim, sent=states[shared], upload=upload, states=self._before)

    def client_of(self, message: Message, reply: Message) -> int:
        """Return the client that answered ``message``; raise ``UserError`` if it claims another node's partition."""
        node, identity = message.metadata.dst_node_id, reply.content.config_records.get(records.CLIENT)
        reported = identity.get(records.PARTITION) if identity is not None else None
        client = reported if isinstance(reported, int) else self._node_ids.index(node)
        holder = self._holder.setdefault(client, node)
        if holder != node and holder in self._node_ids:
            raise UserError(f"node {node} claims to be client {client}, which is node {holder}")
        self._holder[client] = node
        return client


class _TappedGrid(RelayGrid):
    """``grid`` that also captures messages exchanged while a strategy configures its round."""

    def __init__(self, grid: Grid, listener: HonestButCurious, round: int) -> None:
        super().__init__(grid)
        self._listener, self._round = listener, round

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        sent = list(messages)
        replies = list(self.grid.send_and_receive(sent, timeout=timeout))
        probes = [message for message in sent if message.metadata.message_type == PROBE]
        self._listener.read(self._round, probes, replies)
        return replies


@dataclass(eq=False)
class Malicious(StrategyAround):
    """Send each client the model that ``attack`` crafts from the one ``strategy`` has for it.

    ``HonestButCurious`` around it captures the replies, for the attack's ``read`` on each observation::

        HonestButCurious(Malicious(FedAvg(), attack, model), interceptor, audit)

    If an attack puts a layer in front of the model, clients and ``strategy`` must start from
    ``attack.architecture(...)``. In attacked rounds whose replies train nothing, the model stays as it is.

    Attributes:
        attack: attack, fitted to public images if it needs them.
        rounds: attacked rounds; ``None`` for all.
    """

    attack: ServerAttack
    model: nn.Module
    rounds: Collection[int] | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages with crafted values; ``UserError`` if the model has no layer that the attack can use."""
        sent = list(self.strategy.configure_train(server_round, arrays, config, grid))
        if not self._attacks(server_round):
            return sent
        nodes, crafted = sorted(grid.get_node_ids()), list[Message]()
        for message in sent:
            content, metadata = message.content, message.metadata
            client = nodes.index(metadata.dst_node_id)
            made = self.attack.craft(self.model, records.read_state(content, self.model), client)
            values = {**made.parameters, **made.buffers}
            names = records.named(records.all_arrays(content), list(self.model.state_dict()))
            own = dict(zip(records.all_arrays(content), names, strict=True))
            places = content.array_records.items()
            arrays_of = {place: records.to_record({k: values[own[k]] for k in held}) for place, held in places}
            changed, kind, group = RecordDict({**content, **arrays_of}), metadata.message_type, metadata.group_id
            crafted.append(Message(changed, metadata.dst_node_id, kind, ttl=metadata.ttl, group_id=group))
        return crafted

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = self.strategy.aggregate_train(server_round, replies)
        return (arrays if self.attack.trains or not self._attacks(server_round) else None), metrics

    def _attacks(self, round: int) -> bool:
        return self.rounds is None or round in self.rounds
