"""Rounds under Flower's own SecAgg+, in which the server sees the sum of the updates and no single one.

Flower has SecAgg+ for its legacy interface only, which this module keeps to itself.
"""

import copy
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import Client as FlowerClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import (
    FitIns,
    FitRes,
    Parameters,
    Scalar,
    bytes_to_ndarray,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.common.secure_aggregation.secaggplus_constants import Key as SecAggKey
from flwr.server import LegacyContext
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.strategy import Strategy
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key

from fl_privacy.checks import number
from fl_privacy.errors import UserError
from fl_privacy.federation import Client, RoundReport, Server
from fl_privacy.federation.guard import unrounded
from fl_privacy.federation.server import weighted_mean
from fl_privacy.flower.backends import quiet_flower
from fl_privacy.flower.clients import COUNTS, NAMES, MaskableClient
from fl_privacy.flower.guarding import secagg_guard_mod
from fl_privacy.flower.mods import reproducible_mod
from fl_privacy.flower.records import DEFENSE_SECONDS, PARTITION, ROUND, TRAIN_LOSS, to_array, to_tensor
from fl_privacy.flower.transport import FIRST_NODE, LocalGrid
from fl_privacy.types import Upload

Fits = list[tuple[ClientProxy, FitRes]]


def run_secure_aggregation(
    server: Server,
    clients: Mapping[int, Client],
    *,
    rounds: int,
    on_round: Callable[[RoundReport], None],
    clip: float = 8.0,
    levels: int = 2**22,
    threshold: float = 0.67,
    shares: float = 1.0,
) -> "Traffic":
    """Train ``server.state`` for ``rounds`` rounds under SecAgg+ (Bell et al. 2020); returns what the server received.

    Masks hide each update; their keys are shared among the clients, so that the sum can be unmasked as long as
    ``threshold`` of them answer. Numbers of examples, metrics and whole-number buffers, such as the count of batches of
    a batch norm, travel in the clear. A client with a value beyond ``clip`` does not take part in the round. A server
    that breaks the protocol and asks for both kinds of shares unmasks every update, unless clients have a guard.

    Args:
        server: selects clients and moves the model by the mean.
        clients: the clients.
        rounds: how many.
        on_round: told of each round.
        clip: largest absolute value that an update may hold.
        levels: of a quantized value.
        threshold: share of the clients whose key shares unmask the sum, in (0, 1]; of half or less, two groups of
            clients can each be asked for another kind of shares.
        shares: share of the clients that each shares its keys with and is masked against, in (0, 1].

    Raises:
        UserError: a setting is out of range, clients keep private layers, or too few clients were left in a round.
    """
    if server.personal:
        raise UserError("SecAgg+ is expected with the whole model shared, but layers are private; use defense=none.")
    number("secure_aggregation.clip", clip, above=0, example=1.0)
    number("secure_aggregation.threshold", threshold, above=0, at_most=1, example=0.67)
    number("secure_aggregation.shares", shares, above=0, at_most=1, example=1.0)

    def make_client(context: Context) -> FlowerClient:
        client = clients[int(context.node_config[PARTITION])]
        return MaskableClient(client, context.state, clip=clip).to_client()

    guards = [secagg_guard_mod] if any(client.guard for client in clients.values()) else []
    mods = [*guards, reproducible_mod(server.seed), secaggplus_mod]
    grid = Traffic(server.clients, ClientApp(client_fn=make_client, mods=mods))
    workflow = SecAggPlusWorkflow(
        num_shares=float(shares),
        reconstruction_threshold=threshold,
        max_weight=float(max(client.number_of_examples for client in clients.values())),
        clipping_range=float(clip),
        quantization_range=levels,
    )
    for round in range(1, rounds + 1):
        on_round(_train_round(server, grid, workflow, round, threshold))
    return grid


def _train_round(
    server: Server, grid: "Traffic", workflow: SecAggPlusWorkflow, round: int, threshold: float
) -> RoundReport:
    grid.failed.clear()
    started, before = time.perf_counter(), grid.received
    strategy = _Summing(server, grid)
    context = LegacyContext(_server_context(), strategy=strategy)
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: round})
    context.state.array_records[MAIN_PARAMS_RECORD] = ArrayRecord()
    with quiet_flower():
        workflow(grid, context)
    if strategy.report is None:
        reasons = "; ".join(f"client {c}: {reason}" for c, reason in sorted(grid.failed.items())[:3])
        raise UserError(
            f"At least {threshold:.0%} of the clients are expected to answer in round {round}, but fewer did"
            f" ({reasons}); fix the clients or lower secure_aggregation.threshold."
        )
    return strategy.report(time.perf_counter() - started, grid.received - before)


class Traffic(LocalGrid):
    """A grid in this process that keeps account of what the server receives.

    Attributes:
        received: bytes so far.
        masked: the arrays by which each client last replied, as the server sees them.
        failed: why a client did not reply.
    """

    def __init__(self, clients: Sequence[int], client_app: ClientApp) -> None:
        super().__init__(clients, client_app)
        self.received = 0
        self.masked: dict[int, list[np.ndarray]] = {}
        self.failed: dict[int, str] = {}

    def deliver(self, messages: Sequence[Message]) -> list[Message]:
        """As a ``LocalGrid``; nodes elsewhere would get copies of what the workflow sends, and take keys out of it."""
        for message in messages:
            message.content = copy.deepcopy(message.content)
        replies = super().deliver(messages)
        for reply in replies:
            if reply.has_error():
                self.failed.setdefault(reply.metadata.src_node_id - FIRST_NODE, reply.error.reason or "it dropped out")
            else:
                self.received += sum(map(len, _payload(reply.content)))
                record = reply.content.config_records.get(RECORD_KEY_CONFIGS)
                if vectors := record and record.get(SecAggKey.MASKED_PARAMETERS):
                    arrays = [bytes_to_ndarray(piece) for piece in vectors]  # type: ignore[union-attr,arg-type]
                    self.masked[reply.metadata.src_node_id - FIRST_NODE] = arrays
        return replies


def _payload(content: RecordDict) -> list[bytes]:
    values = [value for record in content.config_records.values() for value in record.values()]
    lists = [value if isinstance(value, list) else [value] for value in values]
    arrays = [array.data for record in content.array_records.values() for array in record.values()]
    return [piece for some in lists for piece in some if isinstance(piece, bytes)] + arrays


@dataclass
class _Summing(Strategy):
    """What the workflow wants of a strategy: whom to ask, and what to make of the mean."""

    server: Server
    grid: Traffic
    report: Callable[[float, int], RoundReport] | None = field(default=None, init=False)

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        chosen = self.server.select(server_round)
        return [(GridClientProxy(FIRST_NODE + c, self.grid, 1), self._instructions(c, server_round)) for c in chosen]

    def _instructions(self, client: int, round: int) -> FitIns:
        state = self.server.sent_to(client, round)
        values = {**state.parameters, **state.buffers}
        config: dict[str, Scalar] = {ROUND: round, NAMES: json.dumps(list(values))}
        return FitIns(ndarrays_to_parameters([to_array(t) for t in values.values()]), config)

    def aggregate_fit(
        self, server_round: int, results: Fits, failures: list[Any]
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        replies = {proxy.node_id - FIRST_NODE: reply for proxy, reply in results}
        if len({reply.metrics[NAMES] for reply in replies.values()}) > 1:
            raise UserError("SecAgg+ is expected to add up the same tensors of every client, but their names differ.")
        some = next(iter(replies.values()))
        arrays = zip(json.loads(str(some.metrics[NAMES])), parameters_to_ndarrays(some.parameters), strict=True)
        values = {**self.server.state.parameters, **self.server.state.buffers}
        tensors = {name: to_tensor(array).view_as(values[name]).to(values[name].dtype) for name, array in arrays}
        parameters = self.server.state.parameters
        mean = Upload(
            tensors={n: t for n, t in tensors.items() if n in parameters},
            buffers=unrounded({n: t for n, t in tensors.items() if n not in parameters})
            | self._counts(replies.values()),
            num_examples=sum(reply.num_examples for reply in replies.values()),
        )
        numbers = {client: reply.num_examples for client, reply in replies.items()}
        self.server.receive({min(replies): mean}, server_round, behind=numbers)

        def total(metric: str) -> float:
            return sum(float(reply.metrics[metric]) for reply in replies.values())

        self.report = lambda seconds, received: RoundReport(
            round=server_round,
            clients=tuple(sorted(replies)),
            excluded={c: r for c, r in self.grid.failed.items() if c not in replies},
            train_loss=total(TRAIN_LOSS) / len(replies),
            seconds=seconds,
            defense_seconds=total(DEFENSE_SECONDS),
            upload_bytes=received,
        )
        return None, {}

    def _counts(self, replies: Collection[FitRes]) -> dict[str, torch.Tensor]:
        """The mean of the buffers that came in the clear."""
        buffers = self.server.state.buffers
        each = [json.loads(str(reply.metrics[COUNTS])) for reply in replies]
        tensors = [{n: torch.tensor(v, dtype=buffers[n].dtype) for n, v in counts.items()} for counts in each]
        return weighted_mean(tensors, [reply.num_examples for reply in replies])

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
        return None

    def configure_evaluate(self, server_round: int, parameters: Parameters, client_manager: ClientManager) -> list[Any]:
        return []

    def aggregate_evaluate(
        self, server_round: int, results: list[Any], failures: list[Any]
    ) -> tuple[float | None, dict[str, Scalar]]:
        return None, {}

    def evaluate(self, server_round: int, parameters: Parameters) -> None:
        return None


def _server_context() -> Context:
    return Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
