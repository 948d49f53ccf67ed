"""Apps of real nodes and of their server, some of which lie: 400 replies of clients, or 100 messages of a server."""

import json
import random
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Result

from fl_privacy import audit
from fl_privacy.auditing.strategy import AuditedStrategy
from fl_privacy.flower.audit_protocol import asked_probe
from tests.flower import hostile
from tests.flower.hostile import (
    APPS,
    drawn,
    expect_kept,
    honest_message,
    hostile_message,
    undefended_app,
)
from tests.flower.liars import Small, honest_app, pictures
from tests.fuzz.test_replies import LIES, tolerant

NODES = 3

AUDITED = 6
"""Nodes of the training under audit."""

LIARS = 2, 3, 4, 5
"""The partitions that lie there."""

IMAGES, ROUNDS = 19, 5
"""Of a client, each probed in each round: with the training's reply of each round, 100 replies of each liar, which
answers one after the other."""

REPLIES_THAT_LIE = len(LIARS) * ROUNDS * (IMAGES + 1)

MESSAGES = 100

REPLIES = "defense_mod", "defend", "train_step"
"""What defends the nodes 0, 1 and 2."""

WAIT_SECONDS = 300.0


class InOneOrder(FedAvg):
    """Adds replies up in an order that their content gives, whichever came first: the same bytes in each run."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        def content(reply: Message) -> bytes:
            return bytes_of(reply) if reply.has_content() else b""

        return super().aggregate_train(server_round, sorted(replies, key=content))


def fedavg() -> InOneOrder:
    """Of all nodes of the training under audit."""
    return InOneOrder(fraction_evaluate=0.0, min_train_nodes=AUDITED, min_available_nodes=AUDITED)


def under_audit(out: Path) -> AuditedStrategy:
    """Run the training under audit; each image is probed in each round."""
    return audit(
        fedavg(),
        model=Small,
        data=partial(pictures, number=IMAGES),
        out=out,
        attack="analytic",
        victims=AUDITED * IMAGES,
        rounds="all",
    )


def trained(strategy: Any, grid: Grid) -> Result:
    """Train with ``strategy`` on nodes and return the result."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        initial = ArrayRecord(Small().state_dict())
    random.seed(0)
    return strategy.start(grid, initial, num_rounds=ROUNDS, train_config=ConfigRecord({"lr": 0.1}))


class _Lying(ClientApp):
    """Honest nodes, and some that make lies of their replies, each its own."""

    def __init__(self) -> None:
        super().__init__()
        lies = drawn(REPLIES_THAT_LIE, LIES)
        self._honest = honest_app(IMAGES)
        self._lies = {liar: iter(lies[rank :: len(LIARS)]) for rank, liar in enumerate(LIARS)}

    def __call__(self, message: Message, context: Context) -> Message:
        reply = self._honest(message, context)
        if (lies := self._lies.get(context.node_config["partition-id"])) and reply.has_content():
            tolerant(next(lies))(reply.content, asked_probe(message.content) is not None)
        return reply


class _Defended(ClientApp):
    """A node defended in one of three ways."""

    def __init__(self) -> None:
        super().__init__()
        self._apps = [APPS[name]() for name in REPLIES]

    def __call__(self, message: Message, context: Context) -> Message:
        return self._apps[int(context.node_config["partition-id"])](message, context)


lying = _Lying()
defended = _Defended()

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Do what the run config's ``does`` says, and leave what came of it in its ``out``."""
    out = Path(str(context.run_config["out"]))
    out.mkdir(parents=True, exist_ok=True)
    {"audit": audited, "ask": asking, "restart": restarting}[str(context.run_config["does"])](grid, out)


def audited(grid: Grid, out: Path) -> None:
    """Train under audit."""
    nodes_of(grid, number=AUDITED)
    strategy = under_audit(out)
    result = trained(strategy, grid)
    assert result.arrays is not None
    np.savez(out / "weights.npz", **{name: array.numpy() for name, array in result.arrays.items()})
    (out / "ended.json").write_text(json.dumps({"failure": str(strategy.failure or "")}))


def asking(grid: Grid, out: Path) -> None:
    """Ask each node a hundred hostile questions, then an honest one, many times at once."""
    nodes, told = nodes_of(grid), {"answered": 0, "refused": 0, "silent": 0}
    asked = [(hostile_message(question, node), question) for question in drawn(MESSAGES) for node in nodes]
    sent = [(message, question) for message, question in asked if message is not None]
    messages = [message for message, _ in sent]
    replies = {r.metadata.reply_to_message_id: r for r in grid.send_and_receive(messages, timeout=WAIT_SECONDS)}
    for message, question in sent:
        reply = replies.get(message.metadata.message_id)
        if reply is None:
            told["silent"] += 1
        else:
            expect_kept(reply, undefended(question))
            told["refused" if reply.has_error() else "answered"] += 1
    following = 5000
    told["honest"], told["at once"] = 0, 0
    for round in range(900, following, 900):  # whatever rounds the hostile ones have used up
        honest = grid.send_and_receive([honest_message(round, n) for n in nodes], timeout=WAIT_SECONDS)
        told["honest"] += sum(reply.has_content() for reply in honest)
    at_once = [honest_message(following, node) for node in nodes for _ in range(5)]
    said: dict[int, set[bytes]] = {}
    for reply in grid.send_and_receive(at_once, timeout=WAIT_SECONDS):
        if reply.has_content():
            told["at once"] += 1
            said.setdefault(reply.metadata.src_node_id, set()).add(bytes_of(reply))
    told["different"] = max(map(len, said.values()))
    told["nodes"] = len(said)
    (out / "ended.json").write_text(json.dumps(told))


def restarting(grid: Grid, out: Path) -> None:
    """Ask the same before and after all nodes are started again, and then something else."""
    old = nodes_of(grid)
    first = answers(grid, old, 1.0)
    (out / "asked").touch()
    until((out / "restarted").exists)
    nodes = nodes_of(grid, without=old)  # the SuperLink takes the old ones for connected still
    again, other = answers(grid, nodes, 1.0), answers(grid, nodes, 2.0)
    told = {"answered": sum(map(bool, first)), "same": first == again, "other": sum(map(bool, other))}
    (out / "ended.json").write_text(json.dumps(told))


def answers(grid: Grid, nodes: list[int], lr: float) -> list[bytes]:
    """Collect the nodes' replies to a question of round 1, sorted by bytes; empty where they refuse."""
    asked = [honest_message(1, node) for node in nodes]
    for message in asked:
        message.content["config"] = ConfigRecord({"server-round": 1, "lr": lr})
    replies = grid.send_and_receive(asked, timeout=WAIT_SECONDS)
    return sorted(bytes_of(reply) if reply.has_content() else b"" for reply in replies)


def bytes_of(reply: Message) -> bytes:
    """Of all arrays."""
    return b"".join(a.data for record in reply.content.array_records.values() for a in record.values())


def undefended(question: hostile.Question) -> hostile.Seen:
    """Compute what an undefended node would make of the question."""
    hostile.SEEN.clear()
    for partition in range(NODES):
        message = hostile_message(question)
        assert message is not None
        place = Context(1, 1, UserConfig({"partition-id": partition}), RecordDict(), UserConfig())
        message.metadata._message_type = "train"  # type: ignore[attr-defined]
        try:
            undefended_app()(message, place)
        except (ValueError, TypeError, RuntimeError, StopIteration, AttributeError, KeyError):
            continue
    return hostile.SEEN


def nodes_of(grid: Grid, without: Collection[int] = (), number: int = NODES) -> list[int]:
    """Wait until all nodes are there and return them."""
    until(lambda: len(set(grid.get_node_ids()) - set(without)) == number)
    return sorted(set(grid.get_node_ids()) - set(without))


def until(ready: Callable[[], bool]) -> None:
    """Wait."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.2)
