"""Rounds under Flower's own SecAgg+, in which the server sees the sum of the updates and no single one.

Flower has SecAgg+ for its legacy interface only, which this module keeps to itself.
"""

import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from fl_privacy.checks import number
from fl_privacy.errors import UserError
from fl_privacy.federation import Client, RoundReport, Server
from fl_privacy.federation.replies import unrounded
from fl_privacy.federation.server import weighted_mean
from fl_privacy.flower.backends import quiet_flower
from fl_privacy.flower.clients import ATTEMPT, COUNTS, MOST_COUNTED, NAMES, MaskableClient
from fl_privacy.flower.guarding import secagg_guard_mod
from fl_privacy.flower.inside.legacy import (
    MAIN_CONFIGS_RECORD,
    MAIN_PARAMS_RECORD,
    ClientManager,
    ClientProxy,
    FitIns,
    FitRes,
    GridClientProxy,
    LegacyClient,
    LegacyContext,
    LegacyStrategy,
    Parameters,
    Scalar,
    SecAggPlusWorkflow,
    WorkflowKey,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
    secaggplus_mod,
)
from fl_privacy.flower.masked_replies import MaskedReplies
from fl_privacy.flower.mods import reproducible_mod
from fl_privacy.flower.records import (
    DEFENSE_SECONDS,
    PARTITION,
    ROUND,
    TRAIN_LOSS,
    to_array,
    to_tensor,
)
from fl_privacy.flower.traffic import Traffic
from fl_privacy.flower.transport import FIRST_NODE, LocalGrid
from fl_privacy.types import Upload

Fits = list[tuple[ClientProxy, FitRes]]


@dataclass(frozen=True, kw_only=True)
class Masking:
    """How updates become whole numbers that masks can hide.

    Attributes:
        clip: largest absolute value that an update may hold.
        levels: of a quantized value.
        threshold: share of the clients whose key shares unmask the sum, in (0, 1]; of half or less, two groups of
            clients can each be asked for another kind of shares.
        shares: share of the clients that each shares its keys with and is masked against, in (0, 1].
    """

    clip: float = 8.0
    levels: int = 2**22
    threshold: float = 0.67
    shares: float = 1.0

    def __post_init__(self) -> None:
        number("secure_aggregation.clip", self.clip, above=0, example=1.0)
        number("secure_aggregation.threshold", self.threshold, above=0, at_most=1, example=0.67)
        number("secure_aggregation.shares", self.shares, above=0, at_most=1, example=1.0)

    def workflow(self, max_weight: int, timeout: float | None) -> SecAggPlusWorkflow:
        """Flower's protocol for clients of at most ``max_weight`` examples."""
        return SecAggPlusWorkflow(
            num_shares=float(self.shares),
            reconstruction_threshold=self.threshold,
            max_weight=float(max_weight),
            clipping_range=float(self.clip),
            quantization_range=self.levels,
            timeout=timeout,
        )


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
) -> Traffic:
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
    masking = Masking(clip=clip, levels=levels, threshold=threshold, shares=shares)
    expect_all_shared(server)

    def make_client(context: Context) -> MaskableClient:
        return MaskableClient(clients[int(context.node_config[PARTITION])], context.state, clip=clip)

    guards = [secagg_guard_mod] if any(client.guard for client in clients.values()) else []
    app = masking_client_app(make_client, mods=[*guards, reproducible_mod(server.seed)])
    traffic = Traffic(LocalGrid(server.clients, app), {client: FIRST_NODE + client for client in server.clients})
    workflow = masking.workflow(max(client.number_of_examples for client in clients.values()), timeout=None)
    for round in range(1, rounds + 1):
        on_round(train_secure_round(server, traffic, workflow, round=round, threshold=threshold))
    return traffic


def masking_client_app(make_client: Callable[[Context], MaskableClient], mods: Sequence[Mod] = ()) -> ClientApp:
    """A ClientApp whose answers to training messages are those of SecAgg+.

    Args:
        make_client: for the context of each message.
        mods: around the protocol.
    """

    def client_fn(context: Context) -> LegacyClient:
        return make_client(context).to_client()

    return ClientApp(client_fn=client_fn, mods=[*mods, secaggplus_mod])


def expect_all_shared(server: Server) -> None:
    """Raise ``UserError`` if clients keep a part of the model to themselves."""
    if server.personal:
        raise UserError("SecAgg+ is expected with the whole model shared, but layers are private; use defense=none.")


def train_secure_round(
    server: Server,
    traffic: Traffic,
    workflow: SecAggPlusWorkflow,
    *,
    round: int,
    threshold: float,
    attempt: int | None = None,
) -> RoundReport:
    """One round of the protocol.

    Args:
        server: selects clients and moves the model by the mean.
        traffic: leads to them.
        workflow: of ``Masking``.
        round: of the training.
        threshold: for the message.
        attempt: the number of the protocol's run, where a round may take several; ``None`` takes the round's.

    Raises:
        UserError: too few clients were left.
    """
    traffic.failed.clear()
    traffic.expected = MaskedReplies.to(server.state, int(workflow.max_weight))
    started, before = time.perf_counter(), traffic.received
    step = 2 * workflow.clipping_range / workflow.quantization_range
    strategy = _Summing(server, traffic, round if attempt is None else attempt, step, int(workflow.max_weight))
    context = LegacyContext(_server_context(), strategy=strategy)
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: round})
    context.state.array_records[MAIN_PARAMS_RECORD] = ArrayRecord()
    with quiet_flower():
        workflow(traffic, context)
    if strategy.report is None:
        reasons = "; ".join(f"client {c}: {reason}" for c, reason in sorted(traffic.failed.items())[:3])
        raise UserError(
            f"At least {threshold:.0%} of the clients are expected to answer in round {round}, but fewer did"
            f" ({reasons}); fix the clients or lower secure_aggregation.threshold."
        )
    return strategy.report(time.perf_counter() - started, traffic.received - before)


@dataclass
class _Summing(LegacyStrategy):
    """What the workflow wants of a strategy: whom to ask, and what to make of the mean."""

    server: Server
    traffic: Traffic
    attempt: int
    step: float
    most: int
    report: Callable[[float, int], RoundReport] | None = field(default=None, init=False)

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        proxies = {}
        for client in self.server.select(server_round):
            if client in self.traffic.breaking:  # without it, since Flower needs the shares of all that were asked
                self.traffic.failed[client] = self.traffic.breaking[client]
            elif client in self.traffic.nodes:
                proxies[client] = GridClientProxy(self.traffic.nodes[client], self.traffic, 1)
            else:
                self.traffic.failed[client] = "its node is not connected"
        return [(proxy, self._instructions(client, server_round)) for client, proxy in proxies.items()]

    def _instructions(self, client: int, round: int) -> FitIns:
        state = self.server.sent_to(client, round)
        values = {**state.parameters, **state.buffers}
        config: dict[str, Scalar] = {ROUND: round, ATTEMPT: self.attempt, MOST_COUNTED: self.most}
        config[NAMES] = json.dumps(list(values))
        return FitIns(ndarrays_to_parameters([to_array(t) for t in values.values()]), config)

    def aggregate_fit(
        self, server_round: int, results: Fits, failures: list[Any]
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        client_of = {node: client for client, node in self.traffic.nodes.items()}
        replies = {client_of[proxy.node_id]: reply for proxy, reply in results}
        if len({reply.metrics[NAMES] for reply in replies.values()}) > 1:
            raise UserError("SecAgg+ is expected to add up the same tensors of every client, but their names differ.")
        some = next(iter(replies.values()))
        arrays = zip(json.loads(str(some.metrics[NAMES])), parameters_to_ndarrays(some.parameters), strict=True)
        values = {**self.server.state.parameters, **self.server.state.buffers}
        tensors = {name: to_tensor(array).view_as(values[name]).to(values[name].dtype) for name, array in arrays}
        parameters = self.server.state.parameters
        weights = [reply.num_examples for reply in replies.values()]
        mean = Upload(
            tensors={n: t for n, t in tensors.items() if n in parameters},
            buffers=unrounded({n: t for n, t in tensors.items() if n not in parameters})
            | self._counts(replies.values()),
            num_examples=sum(reply.num_examples for reply in replies.values()),
            rounding=self.step / 2 * math.hypot(*weights) / sum(weights),
        )
        numbers = {client: reply.num_examples for client, reply in replies.items()}
        self.server.receive({min(replies): mean}, server_round, behind=numbers)

        def total(metric: str) -> float:
            return sum(float(reply.metrics.get(metric, math.nan)) for reply in replies.values())

        self.report = lambda seconds, received: RoundReport(
            round=server_round,
            clients=tuple(sorted(replies)),
            excluded={c: r for c, r in self.traffic.failed.items() if c not in replies},
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
