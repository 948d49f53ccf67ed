"""Rounds under Flower's own SecAgg+, in which the server sees the sum of the updates and no single one.

Flower has SecAgg+ for its legacy interface only, which this module keeps to itself.
"""

import copy
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.serverapp import Grid

from fl_privacy.checks import number
from fl_privacy.errors import UserError
from fl_privacy.federation import Client, Failure, RoundReport, Server
from fl_privacy.federation.guard import unrounded
from fl_privacy.federation.server import weighted_mean
from fl_privacy.flower.backends import quiet_flower
from fl_privacy.flower.clients import COUNTS, NAMES, MaskableClient
from fl_privacy.flower.inside.legacy import (
    MAIN_CONFIGS_RECORD,
    MAIN_PARAMS_RECORD,
    RECORD_KEY_CONFIGS,
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
    SecAggKey,
    SecAggPlusWorkflow,
    WorkflowKey,
    bytes_to_ndarray,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
    secaggplus_mod,
)
from fl_privacy.flower.mods import reproducible_mod
from fl_privacy.flower.nodes import Nodes
from fl_privacy.flower.records import (
    CLIENT,
    DEFENSE_SECONDS,
    NUM_EXAMPLES,
    PARTITION,
    ROUND,
    TRAIN_LOSS,
    to_array,
    to_tensor,
)
from fl_privacy.flower.transport import FIRST_NODE, LocalGrid, PromptGrid, RelayGrid, pair
from fl_privacy.types import Upload

Fits = list[tuple[ClientProxy, FitRes]]

EXAMPLES = "query.examples"
"""Type of the message that asks for the number of examples, which is told in the clear under SecAgg+."""


@dataclass(frozen=True, kw_only=True)
class Masking:
    """How updates become whole numbers that masks can hide.

    Attributes:
        clip: largest absolute value that an update may hold.
        levels: of a quantized value.
        threshold: share of the clients whose key shares unmask the sum, in (0, 1].
    """

    clip: float = 8.0
    levels: int = 2**22
    threshold: float = 0.5

    def __post_init__(self) -> None:
        number("secure_aggregation.clip", self.clip, above=0, example=1.0)
        number("secure_aggregation.threshold", self.threshold, above=0, at_most=1, example=0.5)

    def workflow(self, max_weight: int, timeout: float | None) -> SecAggPlusWorkflow:
        """Flower's protocol for clients of at most ``max_weight`` examples."""
        return SecAggPlusWorkflow(
            num_shares=1.0,
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
    threshold: float = 0.5,
) -> "Traffic":
    """Train ``server.state`` for ``rounds`` rounds under SecAgg+ (Bell et al. 2020); returns what the server received.

    Masks hide each update; their keys are shared among the clients, so that the sum can be unmasked as long as
    ``threshold`` of them answer. Numbers of examples, metrics and whole-number buffers, such as the count of batches of
    a batch norm, travel in the clear. A client with a value beyond ``clip`` does not take part in the round. A server
    that breaks the protocol and asks for both kinds of shares unmasks every update.

    Args:
        server: selects clients and moves the model by the mean.
        clients: the clients.
        rounds: how many.
        on_round: told of each round.
        clip: largest absolute value that an update may hold.
        levels: of a quantized value.
        threshold: share of the clients whose key shares unmask the sum, in (0, 1].

    Raises:
        UserError: a setting is out of range, clients keep private layers, or too few clients were left in a round.
    """
    masking = Masking(clip=clip, levels=levels, threshold=threshold)
    _expect_all_shared(server)

    def make_client(context: Context) -> MaskableClient:
        return MaskableClient(clients[int(context.node_config[PARTITION])], context.state, clip=clip)

    app = masking_client_app(make_client, mods=[reproducible_mod(server.seed)])
    traffic = Traffic(LocalGrid(server.clients, app), {client: FIRST_NODE + client for client in server.clients})
    workflow = masking.workflow(max(client.number_of_examples for client in clients.values()), timeout=None)
    for round in range(1, rounds + 1):
        on_round(_train_round(server, traffic, workflow, round, threshold))
    return traffic


def run_secure_on_grid(
    grid: Grid,
    server: Server,
    *,
    rounds: int,
    on_round: Callable[[RoundReport], None],
    nodes: Nodes,
    masking: Masking,
    timeout: float = 600.0,
) -> "Traffic":
    """``run_secure_aggregation`` with clients on nodes of their own, whose apps are ``masking_client_app``.

    A node that joins or comes back takes part from the next round on.

    Args:
        grid: leads to the nodes.
        server: as for ``run_secure_aggregation``, like ``rounds`` and ``on_round``.
        rounds: how many.
        on_round: told of each round.
        nodes: which node holds which partition.
        masking: clip, levels and threshold; nodes take theirs from the run's configuration.
        timeout: seconds to wait for the replies of each of the protocol's four stages.

    Raises:
        UserError: besides what ``run_secure_aggregation`` raises, the nodes do not fit the server's clients.
    """
    _expect_all_shared(server)
    prompt, workflow = PromptGrid(grid), None
    traffic = Traffic(prompt, {})
    for round in range(1, rounds + 1):
        nodes.refresh(prompt)
        traffic.nodes = {client: nodes[client] for client in server.clients if client in nodes}
        if workflow is None:
            workflow = masking.workflow(_most_examples(traffic, timeout), timeout)
        on_round(_train_round(server, traffic, workflow, round, masking.threshold))
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


def _expect_all_shared(server: Server) -> None:
    if server.personal:
        raise UserError("SecAgg+ is expected with the whole model shared, but layers are private; use defense=none.")


def _most_examples(traffic: "Traffic", timeout: float) -> int:
    """The largest number of examples that a node has, which scales the weights of all."""
    questions = [Message(RecordDict(), node, EXAMPLES) for node in traffic.nodes.values()]
    replies = [r for _, r in pair(questions, traffic.send_and_receive(questions, timeout=timeout))]
    told = [r.content.config_records[CLIENT].get(NUM_EXAMPLES) for r in replies if isinstance(r, Message)]
    numbers = [count for count in told if isinstance(count, int) and count > 0]
    if not numbers:
        reason = next((r.reason for r in replies if isinstance(r, Failure)), "none is positive")
        raise UserError(f"Nodes are expected to say how many examples they have, but failed: {reason}")
    return max(numbers)


def _train_round(
    server: Server, traffic: "Traffic", workflow: SecAggPlusWorkflow, round: int, threshold: float
) -> RoundReport:
    traffic.failed.clear()
    started, before = time.perf_counter(), traffic.received
    strategy = _Summing(server, traffic)
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


@dataclass
class _Summing(LegacyStrategy):
    """What the workflow wants of a strategy: whom to ask, and what to make of the mean."""

    server: Server
    traffic: Traffic
    report: Callable[[float, int], RoundReport] | None = field(default=None, init=False)

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        proxies = {}
        for client in self.server.select(server_round):
            if client in self.traffic.nodes:
                proxies[client] = GridClientProxy(self.traffic.nodes[client], self.traffic, 1)
            else:
                self.traffic.failed[client] = "its node is not connected"
        return [(proxy, self._instructions(client, server_round)) for client, proxy in proxies.items()]

    def _instructions(self, client: int, round: int) -> FitIns:
        state = self.server.sent_to(client)
        values = {**state.parameters, **state.buffers}
        config: dict[str, Scalar] = {ROUND: round, NAMES: json.dumps(list(values))}
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
        mean = Upload(
            tensors={n: t for n, t in tensors.items() if n in parameters},
            buffers=unrounded({n: t for n, t in tensors.items() if n not in parameters})
            | self._counts(replies.values()),
            num_examples=sum(reply.num_examples for reply in replies.values()),
        )
        self.server.receive({min(replies): mean})

        def total(metric: str) -> float:
            return sum(float(reply.metrics[metric]) for reply in replies.values())

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
