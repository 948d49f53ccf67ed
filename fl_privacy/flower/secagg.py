"""Rounds under Flower's SecAgg+, in which the server sees only the sum of the updates."""

import itertools
import json
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.serverapp import Grid

from fl_privacy.checks import number
from fl_privacy.defenses import ClientState, Defense, local_dp
from fl_privacy.errors import UserError
from fl_privacy.federation import Client, Failure, Round, RoundReport, Server
from fl_privacy.federation.replies import MOST_EXAMPLES, attempt, unrounded
from fl_privacy.federation.rounds import one_by_one, unobserved
from fl_privacy.federation.server import weighted_mean
from fl_privacy.flower import records
from fl_privacy.flower.backends import quiet_flower
from fl_privacy.flower.clients import ATTEMPT, COUNTS, MOST_COUNTED, NAMES, MaskableClient, PrivacyClient
from fl_privacy.flower.grids import FIRST_NODE, LocalGrid, MaskedReplies, PromptGrid, Traffic, pair
from fl_privacy.flower.inside import legacy
from fl_privacy.flower.mods.guard_mod import secagg_guard_mod
from fl_privacy.flower.strategy import Nodes
from fl_privacy.rng import SecretGenerator, derive_seed
from fl_privacy.types import Tensors, Upload

_ARRAYS = "arrays"


def local_dp_mod(
    *, round_epsilon: float = 1.0, delta: float = 1e-5, clip_norm: float = 1.0, sensitivity: float | None = None
) -> Defense:
    """Build the defense ``fl_privacy.defenses.local_dp``, with its arguments, using Flower's ``LocalDpMod``."""
    ours = local_dp(round_epsilon=round_epsilon, delta=delta, clip_norm=clip_norm, sensitivity=sensitivity)
    mod = LocalDpMod(clip_norm, clip_norm if sensitivity is None else sensitivity, round_epsilon, delta)

    def on_upload(tensors: Tensors, state: ClientState, rng: torch.Generator) -> Tensors:
        zeros = {name: torch.zeros_like(t) for name, t in tensors.items()}
        states = [OrderedDict((n, t.detach().cpu()) for n, t in values.items()) for values in (zeros, tensors)]
        contents = [RecordDict({_ARRAYS: ArrayRecord(values)}) for values in states]
        # a Message can't be made outside of a Flower app
        sent, reply = (SimpleNamespace(content=content, has_error=lambda: False) for content in contents)
        if isinstance(rng, SecretGenerator):
            seed: int | np.ndarray = np.frombuffer(rng.next_bytes(4 * 624), dtype="<u4")
        else:
            seed = int(torch.randint(2**32, (), generator=rng, device=rng.device))
        call: Any = mod
        with _numpy_stream(seed):
            answer = call(sent, None, lambda message, context: reply)
        noised = answer.content.array_records[_ARRAYS].to_torch_state_dict()
        return {name: noised[name].to(t) for name, t in tensors.items()}

    (part,) = ours.parts
    flowers = replace(part, settings={**part.settings, "implementation": "flower"})
    return replace(ours, parts=(flowers,), upload=(on_upload,))


def reproducible_mod(seed: int) -> Mod:
    """Build a mod that seeds NumPy's global stream, from which Flower draws a client's random rounding."""

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        client = int(context.node_config[records.PARTITION])
        named = derive_seed(seed, "client", client, f"round-{message.metadata.group_id}", "secagg")
        with _numpy_stream(named % 2**32):
            return call_next(message, context)

    return mod


@contextmanager
def _numpy_stream(seed: int | np.ndarray) -> Iterator[None]:
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Quantization of updates to whole numbers, which SecAgg+ can mask."""

    clip: float = 8.0  # largest absolute value of an update
    levels: int = 2**22
    threshold: float = 0.67  # share of the clients whose key shares unmask the sum; at most half is unsafe
    shares: float = 1.0  # share of the clients with which each exchanges keys and masks, in (0, 1]

    def __post_init__(self) -> None:
        number("secure_aggregation.clip", self.clip, above=0, example=1.0)
        number("secure_aggregation.threshold", self.threshold, above=0, at_most=1, example=0.67)
        number("secure_aggregation.shares", self.shares, above=0, at_most=1, example=1.0)

    def workflow(self, max_weight: int, timeout: float | None) -> legacy.SecAggPlusWorkflow:
        return legacy.SecAggPlusWorkflow(
            num_shares=float(self.shares),
            reconstruction_threshold=self.threshold,
            max_weight=float(max_weight),
            clipping_range=float(self.clip),
            quantization_range=self.levels,
            timeout=timeout,
        )


def secure_rounds(
    server: Server, clients: Mapping[int, Client], *, rounds: int, **settings: Any
) -> Generator[Round, None, Traffic]:
    """Train ``server.state`` under SecAgg+ (Bell et al. 2020), one round at a time; return what the server received.

    ``settings`` are those of :class:`Masking`. Masks hide each update; the sum can be unmasked if at least the share
    ``threshold`` of the clients answers. Numbers of examples, metrics and whole-number buffers travel in the clear. A
    client with a value beyond ``clip`` is left out. A malicious server that asks for both kinds of a client's key
    shares unmasks its update; clients with a ``guard`` refuse this. ``UserError`` if a setting is out of range, clients
    keep private layers, or too few clients were left in a round.
    """
    masking = Masking(**settings)
    expect_all_shared(server)

    def make_client(context: Context) -> MaskableClient:
        return MaskableClient(clients[int(context.node_config[records.PARTITION])], context.state, clip=masking.clip)

    guards = [secagg_guard_mod] if any(client.guard for client in clients.values()) else []
    app = masking_client_app(make_client, mods=[*guards, reproducible_mod(server.seed)])
    traffic = Traffic(LocalGrid(server.clients, app), {client: FIRST_NODE + client for client in server.clients})
    workflow = masking.workflow(max(client.number_of_examples for client in clients.values()), timeout=None)
    work = partial(train_secure_round, server, traffic, workflow, threshold=masking.threshold)
    yield from one_by_one(rounds, lambda number: unobserved(partial(work, round=number)))
    return traffic


def masking_client_app(make_client: Callable[[Context], PrivacyClient], mods: Sequence[Mod] = ()) -> ClientApp:
    """Build a ClientApp that answers training messages using SecAgg+, with ``mods`` around the protocol."""
    return ClientApp(client_fn=lambda context: make_client(context).to_client(), mods=[*mods, legacy.secaggplus_mod])


def expect_all_shared(server: Server) -> None:
    """Raise ``UserError`` if clients keep a part of the model private."""
    if server.personal:
        raise UserError("SecAgg+ expects the whole model to be shared, but layers are private; use defense=none.")


def train_secure_round(
    server: Server,
    traffic: Traffic,
    workflow: legacy.SecAggPlusWorkflow,
    *,
    round: int,
    threshold: float,
    attempt: int | None = None,
) -> RoundReport:
    """Run a round of secure aggregation; ``UserError`` if fewer than the share ``threshold`` of the clients answer.

    ``attempt``: number of the training message, which differs from ``round`` once a failed round was repeated.
    """
    traffic.failed.clear()
    traffic.expected = MaskedReplies.to(server.state, int(workflow.max_weight))
    started, before = time.perf_counter(), traffic.received
    step = 2 * workflow.clipping_range / workflow.quantization_range
    strategy = _Summing(server, traffic, round if attempt is None else attempt, step, int(workflow.max_weight))
    context = legacy.LegacyContext(Context(1, 0, {}, RecordDict(), {}), strategy=strategy)  # type: ignore[arg-type]
    context.state.config_records[legacy.MAIN_CONFIGS_RECORD] = ConfigRecord({legacy.WorkflowKey.CURRENT_ROUND: round})
    context.state.array_records[legacy.MAIN_PARAMS_RECORD] = ArrayRecord()
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
class _Summing:
    """Strategy for Flower's SecAgg+ workflow: sends the server's model, and passes the replies' mean to the server."""

    server: Server
    traffic: Traffic
    attempt: int
    step: float
    most: int
    report: Callable[[float, int], RoundReport] | None = field(default=None, init=False)

    def configure_fit(self, server_round: int, *_: object) -> list[tuple[legacy.ClientProxy, legacy.FitIns]]:
        asked = list[tuple[legacy.ClientProxy, legacy.FitIns]]()
        for client in self.server.select(server_round):
            if client in self.traffic.breaking:  # left out, since Flower needs the shares of all clients asked
                self.traffic.failed[client] = self.traffic.breaking[client]
            elif client in self.traffic.nodes:
                state = self.server.sent_to(client, server_round)
                values = {**state.parameters, **state.buffers}
                config: dict[str, legacy.Scalar] = {records.ROUND: server_round, ATTEMPT: self.attempt}
                config |= {MOST_COUNTED: self.most, NAMES: json.dumps(list(values))}
                arrays = legacy.ndarrays_to_parameters([records.to_array(t) for t in values.values()])
                sent = legacy.FitIns(arrays, config)
                asked.append((legacy.GridClientProxy(self.traffic.nodes[client], self.traffic, 1), sent))
            else:
                self.traffic.failed[client] = "its node is not connected"
        return asked

    def aggregate_fit(
        self, server_round: int, results: list[tuple[legacy.ClientProxy, legacy.FitRes]], failures: list[Any]
    ) -> tuple[legacy.Parameters | None, dict[str, legacy.Scalar]]:
        client_of = {node: client for client, node in self.traffic.nodes.items()}
        replies = {client_of[proxy.node_id]: reply for proxy, reply in results}
        if len({reply.metrics[NAMES] for reply in replies.values()}) > 1:
            raise UserError("SecAgg+ expects the same tensors of every client, but their names differ; use one model.")
        some = next(iter(replies.values()))
        arrays = zip(json.loads(str(some.metrics[NAMES])), legacy.parameters_to_ndarrays(some.parameters), strict=True)
        values = {**self.server.state.parameters, **self.server.state.buffers}
        tensors = {n: records.to_tensor(a).view_as(values[n]).to(values[n].dtype) for n, a in arrays}
        parameters = self.server.state.parameters
        examples = sum(reply.num_examples for reply in replies.values())
        reported = [json.loads(str(reply.metrics[COUNTS])) for reply in replies.values()]
        counted = [{n: torch.tensor(v, dtype=values[n].dtype) for n, v in counts.items()} for counts in reported]
        mean = Upload(
            tensors={n: t for n, t in tensors.items() if n in parameters},
            buffers=unrounded({n: t for n, t in tensors.items() if n not in parameters})
            | weighted_mean(counted, [reply.num_examples for reply in replies.values()]),
            num_examples=examples,
            rounding=rounding_of_mean(self.step, examples=examples, clients=len(replies), most=self.most),
        )
        numbers = {client: reply.num_examples for client, reply in replies.items()}
        self.server.receive({min(replies): mean}, server_round, behind=numbers)

        def total(metric: str) -> float:
            return sum(float(reply.metrics.get(metric, math.nan)) for reply in replies.values())

        self.report = lambda seconds, received: RoundReport(
            round=server_round,
            clients=tuple(sorted(replies)),
            excluded={c: r for c, r in self.traffic.failed.items() if c not in replies},
            train_loss=total(records.TRAIN_LOSS) / len(replies),
            seconds=seconds,
            defense_seconds=total(records.DEFENSE_SECONDS),
            upload_bytes=received,
        )
        return None, {}


def rounding_of_mean(step: float, *, examples: int, clients: int, most: int) -> float:
    """Return the largest standard deviation that SecAgg+'s rounding gives each value of the mean.

    Before rounding to multiples of ``step``, a client scales its update by its number of examples over ``most``, the
    largest number allowed. ``examples``: total of all clients.
    """
    return step / 2 * math.sqrt(clients) * most / examples


logger: logging.Logger = logging.getLogger(__name__)

EXAMPLES = "query.examples"
"""Type of the message that asks for the number of examples, which is sent in the clear under SecAgg+."""

TRIES = 4


def secure_rounds_on_grid(
    grid: Grid, server: Server, *, rounds: int, nodes: Nodes, masking: Masking, timeout: float = 600.0
) -> Generator[Round, None, Traffic]:
    """Run ``secure_rounds`` with each client on a Flower node, whose app is ``masking_client_app``.

    New nodes take part from the next round on. If too few clients finish a round, it is repeated without those that
    broke the protocol. ``UserError`` as in ``secure_rounds``, or if a client has no node. ``masking``: settings of the
    masks. ``timeout``: seconds for each of the protocol's four stages.
    """
    expect_all_shared(server)
    prompt = PromptGrid(grid)
    traffic, attempts = Traffic(prompt, {}), itertools.count(1)
    workflow: legacy.SecAggPlusWorkflow | None = None

    def train(round: int) -> RoundReport:
        nonlocal workflow
        traffic.breaking.clear()
        for left in reversed(range(TRIES)):
            nodes.refresh(prompt)
            traffic.nodes = {client: nodes[client] for client in server.clients if client in nodes}
            if workflow is None:
                workflow = masking.workflow(_most_examples(server, traffic, timeout), timeout)
            try:
                work = partial(train_secure_round, server, traffic, workflow, round=round)
                return work(threshold=masking.threshold, attempt=next(attempts))
            except UserError as error:
                if not left:
                    raise
                logger.warning("Round %d is tried again: %s", round, error)
        raise AssertionError("the last try returns or raises")

    yield from one_by_one(rounds, lambda number: unobserved(partial(train, number)))
    return traffic


def _most_examples(server: Server, traffic: Traffic, timeout: float) -> int:
    """Ask the nodes for their numbers of examples; return the largest, capped at a multiple of the lower median."""
    questions = [Message(RecordDict(), node, EXAMPLES) for node in traffic.nodes.values()]
    replies = [reply for _, reply in pair(questions, traffic.send_and_receive(questions, timeout=timeout))]
    answered = [reply for reply in replies if isinstance(reply, Message)]
    reported = [attempt(lambda: r.content.config_records[records.CLIENT][records.NUM_EXAMPLES]) for r in answered]  # noqa: B023
    numbers = sorted(n for n in reported if isinstance(n, int) and not isinstance(n, bool) and 0 < n <= MOST_EXAMPLES)
    if not numbers:
        reason = next((r.reason for r in replies if isinstance(r, Failure)), "none is positive")
        raise UserError(f"Nodes are expected to say how many examples they have, but failed: {reason}; see their logs.")
    return int(min(numbers[-1], server.plan.norm_factor * numbers[(len(numbers) - 1) // 2]))
