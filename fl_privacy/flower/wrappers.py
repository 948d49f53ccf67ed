"""Any Flower strategy, without the replies that would end or poison its run."""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor, nn

from fl_privacy.checks import number
from fl_privacy.errors import UserError
from fl_privacy.federation.interception.infer_plan import moved_apart, norm_names
from fl_privacy.federation.replies import FACTOR, Failure, attempt, printable, sort_out
from fl_privacy.flower.grids import pair
from fl_privacy.flower.records import NUM_EXAMPLES, to_record, to_tensors
from fl_privacy.types import ModelState, Upload


@dataclass(eq=False)
class StrategyAround(Strategy):
    """Leave the evaluation to the inner ``strategy``; subclasses handle training.

    Other attributes of the inner strategy, such as methods of an app's own class, are reached through this one.
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


logger: logging.Logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Sane(StrategyAround):
    """Give ``strategy`` the replies that are usable by the rules of ``federation.replies``, and log why others are not.

    It is for strategies that average weights, such as Flower's ``FedAvg``. A reply is left out if its arrays differ
    from those sent (names, dtype, shape), are not finite or have negative variances; if the norm of its change is over
    ``factor`` times the median of three or more, of this round or the largest before; or if its metrics differ from
    most clients' or are not finite. A client counts as at most ``factor`` times the median number of examples.
    ``HonestButCurious(Sane(FedAvg()), ...)`` still sees every reply.

    Attributes:
        factor: largest multiple of the median, above 1; ``math.inf`` leaves out no large update.
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
        """Return the weights in ``reply``; clients may return integers that a strategy has turned into fractions."""
        layout = {key: list(record) for key, record in sent.array_records.items()}
        if {key: list(record) for key, record in reply.array_records.items()} != layout:
            raise UserError("its arrays have other names than those that were sent")
        (metrics,) = reply.metric_records.values()
        tensors = _by_place(reply)
        for name, tensor in tensors.items():
            if tensor.dtype == self._first[name]:
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


KEPT = "fl-privacy.own-norms"
"""Record of a client's state: batch norm of its last reply, if that was its own."""


def keep_own_norms(sent: RecordDict, reply: RecordDict, model: nn.Module, context: Context) -> None:
    """Remember the batch norm in a client's ``reply`` if it differs from that of the message ``sent``.

    Only values that the client uploads anyway are kept, and none if the arrays' names are not those of ``model``.
    """
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
    """Return the client's batch norm by name, as ``keep_own_norms`` stored it."""
    return to_tensors(context.state.array_records.get(KEPT, {}))


def _by_name(content: RecordDict) -> dict[str, Tensor]:
    found = {name: array for record in content.array_records.values() for name, array in record.items()}
    try:
        return to_tensors(found)
    except (UserError, ValueError, TypeError):
        return {}
