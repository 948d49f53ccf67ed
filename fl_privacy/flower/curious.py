"""Flower strategies that observe uploads, send crafted models, or check replies."""

import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor, nn

from fl_privacy.attacks.malicious import ServerAttack
from fl_privacy.checks import number
from fl_privacy.errors import UserError
from fl_privacy.federation import Audit, Probe
from fl_privacy.federation.interception import Interceptor
from fl_privacy.federation.interception.infer_plan import moved_apart, norm_names
from fl_privacy.federation.interception.interceptor import States, no_states
from fl_privacy.federation.replies import FACTOR, MOST_EXAMPLES, Failure, attempt, printable, sort_out
from fl_privacy.flower import records
from fl_privacy.flower.audit_protocol import asked_probe
from fl_privacy.flower.grids import RelayGrid, pair
from fl_privacy.flower.records import NUM_EXAMPLES, to_record, to_tensors
from fl_privacy.flower.strategy import PROBE
from fl_privacy.types import ModelState, Upload, VictimId


@dataclass(eq=False)
class StrategyAround(Strategy):
    """Base class of wrappers of a Flower strategy, which leave evaluation and other attributes to the inner one."""

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


logger: logging.Logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Sane(StrategyAround):
    """Strategy that passes only usable replies on to ``strategy``, and logs why it leaves out others.

    It is for strategies that average weights, such as Flower's ``FedAvg``. A reply is left out if its arrays differ
    from those sent (names, dtype, shape), are not finite or have negative variances; if its change is too large; or if
    its metrics are not finite or have other names than most clients'. A strategy around it still sees every reply.

    Attributes:
        factor: largest norm of a change, above 1, in multiples of the largest of the rounds' medians; a round counts if
            it has three replies. Also limits a client's number of examples.
        weighted_by: name of the metric with a client's number of examples.
        excluded: reasons by round and node for the training replies left out.
    """

    factor: float = FACTOR
    weighted_by: str = NUM_EXAMPLES
    excluded: dict[int, dict[int, str]] = field(default_factory=dict, init=False)
    _sent: list[Message] = field(default_factory=list, init=False, repr=False)
    _usual: Mapping[str, float] = field(default_factory=dict, init=False, repr=False)
    _first: dict[str, torch.dtype] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        number("factor", self.factor, above=1, infinite=True, example="inf leaves out no large update")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._sent = list(self.strategy.configure_train(server_round, arrays, config, grid))
        return self._sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        usable = self._usable(server_round, list(replies))
        self._sent = []
        return self.strategy.aggregate_train(server_round, usable)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        answered = [reply for reply in replies if reply.has_content()]
        faults = _metric_faults([reply.content for reply in answered], self.weighted_by)
        for index, reason in faults.items():
            self._tell(server_round, answered[index].metadata.src_node_id, reason)
        sound = [reply for index, reply in enumerate(answered) if index not in faults]
        return self.strategy.aggregate_evaluate(server_round, sound)

    def _usable(self, round: int, replies: Sequence[Message]) -> list[Message]:
        paired = pair(self._sent, replies)
        answered = [(sent, reply) for sent, reply in paired if isinstance(reply, Message)]
        reasons = {sent.metadata.dst_node_id: r.reason for sent, r in paired if isinstance(r, Failure)}
        faults = _metric_faults([reply.content for _, reply in answered], self.weighted_by)
        found: dict[int, Upload | Failure] = {}
        state = ModelState(_by_place(self._sent[0].content) if self._sent else {}, {})
        self._first = self._first or {name: t.dtype for name, t in state.parameters.items()}
        for index, (sent, reply) in enumerate(answered):
            if index not in faults:
                found[index] = attempt(lambda: self._upload(state, sent.content, reply.content))  # noqa: B023
        sorted_out = sort_out(found, state, "weights", factor=self.factor, usual=self._usual)
        self._usual = sorted_out.usual
        for index, reason in {**faults, **sorted_out.excluded}.items():
            reasons[answered[index][0].metadata.dst_node_id] = reason
        for node, reason in reasons.items():
            self._tell(round, node, reason)
        self.excluded[round] = reasons
        for index, weight in zip(sorted_out.usable, sorted_out.weights, strict=True):
            for record in answered[index][1].content.metric_records.values():
                if weight < int(record[self.weighted_by]):  # type: ignore[arg-type]
                    record[self.weighted_by] = weight
        return [answered[index][1] for index in sorted_out.usable]

    def _upload(self, state: ModelState, sent: RecordDict, reply: RecordDict) -> Upload:
        layout = {key: list(record) for key, record in sent.array_records.items()}
        if {key: list(record) for key, record in reply.array_records.items()} != layout:
            raise UserError("its arrays are expected under the names sent, but have others; reply the same names")
        (metrics,) = reply.metric_records.values()
        tensors = _by_place(reply)
        for name, tensor in tensors.items():
            if tensor.dtype == self._first[name]:  # as in the first round, before averages turned integers into floats
                tensors[name] = tensor.to(state.parameters[name].dtype)
        return Upload(tensors=tensors, num_examples=int(metrics[self.weighted_by]))  # type: ignore[arg-type]

    def _tell(self, round: int, node: int, reason: str) -> None:
        logger.warning("The reply of node %d in round %d is left out: %s", node, round, reason)


def _by_place(content: RecordDict) -> dict[str, torch.Tensor]:
    records = content.array_records
    if len(records) == 1:
        return to_tensors(next(iter(records.values())))
    return to_tensors({f"{place}.{name}": array for place, record in records.items() for name, array in record.items()})


def _metric_faults(replies: Sequence[RecordDict], weighted_by: str) -> dict[int, str]:
    layouts: list[tuple[object, ...]] = []
    for reply in replies:
        records = {key: record.items() for key, record in reply.metric_records.items()}
        sizes = {key: [(n, len(v) if isinstance(v, list) else -1) for n, v in items] for key, items in records.items()}
        layouts.append(tuple((key, *sorted(named)) for key, named in sizes.items()))
    usual = Counter(layouts).most_common(1)[0][0] if layouts else ()
    faults = {}
    for index, (reply, layout) in enumerate(zip(replies, layouts, strict=True)):
        if layout != usual:
            faults[index] = "its metrics have other names or kinds than most"
        elif reason := _number_fault(reply, weighted_by):
            faults[index] = printable(reason)
    return faults


def _number_fault(reply: RecordDict, weighted_by: str) -> str | None:
    records: Mapping[str, MetricRecord] = reply.metric_records
    if len(records) != 1:
        return f"expected one record of metrics, got {len(records)}"
    (metrics,) = records.values()
    for name, value in metrics.items():
        if not all(math.isfinite(number) for number in (value if isinstance(value, list) else [value])):
            return f"{name}: not finite"
    number = metrics.get(weighted_by)
    if not isinstance(number, int | float) or number < 1:
        return f"{weighted_by}: expected at least 1 example, got {number}"
    return None


KEPT = "fl-privacy.own-norms"  # record of a client's state: batch norm of its last reply, if that was its own


def keep_own_norms(sent: RecordDict, reply: RecordDict, model: nn.Module, context: Context) -> None:
    """If ``reply`` to ``sent`` shows that a client keeps its batch norm (FedBN), store these layers in the context."""
    norms = norm_names(model)
    before, after = _by_name(sent), _by_name(reply)
    if not norms or not norms <= after.keys() or before.keys() != after.keys():
        return
    pairs = {n: (before[n], after[n]) for n, _ in model.named_parameters() if n in after}
    change = {n: b - a for n, (a, b) in pairs.items() if a.shape == b.shape and b.is_floating_point()}
    if moved_apart(change, norms) is None:
        context.state.pop(KEPT, None)
        return
    layers = {name.rpartition(".")[0] for name in norms}
    context.state[KEPT] = to_record({name: value for name, value in after.items() if name.rpartition(".")[0] in layers})


def own_norms(context: Context) -> dict[str, Tensor]:
    """Return the values of the client's batch norm layers by name, as ``keep_own_norms`` stored them."""
    return to_tensors(context.state.array_records.get(KEPT, {}))


def _by_name(content: RecordDict) -> dict[str, Tensor]:
    found = {name: array for record in content.array_records.values() for name, array in record.items()}
    try:
        return to_tensors(found)
    except (UserError, ValueError, TypeError):
        return {}


@dataclass(eq=False)
class HonestButCurious(StrategyAround):
    """Strategy that follows the protocol of ``strategy``, and captures each upload with the model sent for it.

    It changes no message and no result. If clients upload weights instead of changes, as those of other packages do,
    the interceptor's plan should say ``shares="weights"``.

    Attributes:
        interceptor: recorder of the uploads.
        states: private states of simulated clients, for an interceptor that gives attackers inside knowledge.
        audit: uploads to capture. A client's number is the partition it reports, else the rank of its node's id. A
            partition belongs to the first node that reports it, until that node leaves.
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
                raise UserError(f"an answer to one of the probes sent is expected, but got {victim}; answer those only")
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
            raise UserError(f"{what} is expected to be of 1 to {most} examples, but states {got}; correct its number.")
        self.interceptor.capture(victim, sent=states[shared], upload=upload, states=self._before)

    def client_of(self, message: Message, reply: Message) -> int:
        node, identity = message.metadata.dst_node_id, reply.content.config_records.get(records.CLIENT)
        reported = identity.get(records.PARTITION) if identity is not None else None
        client = reported if isinstance(reported, int) else self._node_ids.index(node)
        holder = self._holder.setdefault(client, node)
        if holder != node and holder in self._node_ids:
            raise UserError(f"node {node} claims to be client {client}, expected on node {holder}; set partition-id")
        self._holder[client] = node
        return client


class _TappedGrid(RelayGrid):
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
    """Strategy that sends each client a model that ``attack`` crafts from the model of ``strategy``.

    ``HonestButCurious`` around it captures the replies, from which the attack reconstructs examples::

        HonestButCurious(Malicious(FedAvg(), attack, model), interceptor, audit)

    If an attack puts a layer in front of the model, clients and ``strategy`` must start from
    ``attack.architecture(...)``. If the attack makes a round's replies useless for training, the model stays the same.

    Attributes:
        attack: attack, fitted to public images if it needs them.
        model: architecture of the clients' model.
        rounds: attacked rounds; ``None`` for all.
    """

    attack: ServerAttack
    model: nn.Module
    rounds: Collection[int] | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
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
