"""SecAgg+ by Flower: the plain mean, from updates that the server can't read."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common.secure_aggregation.quantization import quantize

from fl_privacy.defenses import none
from fl_privacy.errors import UserError
from fl_privacy.federation import Audit, plain_rounds, run_all
from fl_privacy.flower.clients import MaskableClient
from fl_privacy.flower.grids import FIRST_NODE, LocalGrid, Traffic
from fl_privacy.flower.records import CLIENT, NUM_EXAMPLES, PARTITION, PARTITIONS
from fl_privacy.flower.secagg import (
    EXAMPLES,
    Masking,
    masking_client_app,
    rounding_of_mean,
    secure_rounds,
    secure_rounds_on_grid,
)
from fl_privacy.flower.strategy import Nodes
from fl_privacy.types import LocalPlan
from tests.federation import harness
from tests.selection import few

PLAN = LocalPlan(shares="delta", lr=0.1, epochs=1, batch_size=5)
ROUNDS = 2


def secure(plan: LocalPlan = PLAN, rounds: int = ROUNDS, **clients: Any) -> tuple[Any, harness.Recording, Traffic]:
    server, seen = harness.server(plan), harness.Recording()
    traffic = seen.follow(secure_rounds(server, harness.clients(plan, none(), **clients), rounds=rounds))
    return server.state, seen, traffic


def plain(plan: LocalPlan = PLAN) -> tuple[Any, harness.Recording]:
    server, seen = harness.server(plan), harness.Recording()
    seen.follow(
        plain_rounds(
            server,
            harness.clients(plan, none()),
            rounds=ROUNDS,
            audit=Audit(),
            interceptor=seen.interceptor(plan),
        )
    )
    return server.state, seen


@pytest.mark.parametrize("plan", [PLAN, replace(PLAN, shares="weights")], ids=lambda p: p.shares)
def test_the_model_is_that_of_the_plain_mean(plan: LocalPlan) -> None:
    expected, seen = plain(plan)
    found, reports, _ = secure(plan)

    for name, value in expected.parameters.items():
        torch.testing.assert_close(found.parameters[name], value, rtol=1e-4, atol=2e-5)
    assert found.buffers.keys() == expected.buffers.keys()
    for name, value in expected.buffers.items():
        torch.testing.assert_close(found.buffers[name], value, rtol=1e-4, atol=2e-5)
    assert found.buffers["norm.num_batches_tracked"] == 3 * ROUNDS
    assert [r.clients for r in reports.reports] == [r.clients for r in seen.reports]
    assert reports.reports[0].train_loss == pytest.approx(seen.reports[0].train_loss)
    assert reports.reports[0].upload_bytes > seen.reports[0].upload_bytes


def test_what_the_server_sees_of_a_client_is_noise() -> None:
    _, _, traffic = secure()

    rows = {}
    for client, arrays in traffic.masked.items():
        rows[client] = np.concatenate([a.flatten() for a in arrays]).astype(np.float64)
    assert set(rows) == {0, 1, 2}
    for row in rows.values():
        assert len(row) > 400
        shares = np.histogram(row, bins=4, range=(0, 2**32))[0] / len(row)
        assert np.abs(shares - 0.25).max() < 0.1
    assert np.abs(np.corrcoef(list(rows.values())) - np.eye(3)).max() < 0.2


def test_a_client_that_drops_out_does_not_stop_the_others() -> None:
    found, reports, _ = secure(faults=((1, "raises"),))

    assert reports.reports[0].clients == (0, 2)
    assert reports.reports[0].excluded == {1: "RuntimeError: the disk of this client"}
    assert all(value.isfinite().all() for value in found.parameters.values())


def test_what_it_can_t_do_is_refused() -> None:
    server = harness.server(PLAN)
    server.personal = True
    with pytest.raises(UserError, match="layers are private"):
        run_all(secure_rounds(server, harness.clients(PLAN), rounds=1))
    with pytest.raises(UserError, match=r"threshold is expected in \(0, 1\], but got 0"):
        run_all(secure_rounds(harness.server(PLAN), harness.clients(PLAN), rounds=1, threshold=0))
    with pytest.raises(UserError, match="fewer did"):
        secure(faults=((0, "raises"), (1, "raises"), (2, "raises")))


def test_values_beyond_the_clip_are_reported_not_cut() -> None:
    with pytest.raises(UserError, match=r"client 0: UserError: Values of .* are expected within \+-1e-06, but reach"):
        run_all(secure_rounds(harness.server(PLAN), harness.clients(PLAN), rounds=1, clip=1e-6))
    _, reports, _ = secure(faults=((1, "nan"),))
    assert reports.reports[0].clients == (0, 2)
    assert "but reach nan" in reports.reports[0].excluded[1]


def test_a_run_gives_the_same_bits_again_and_leaves_numpy_s_stream_alone() -> None:
    np.random.seed(1)
    one, _, _ = secure()
    left = np.random.get_state()[1]
    np.random.seed(2)
    other, _, _ = secure()

    harness.assert_same_state(one, other)
    np.random.seed(1)
    assert (np.random.get_state()[1] == left).all()


PROTOCOL = "secaggplus_configs"
LIAR = 1

Lie = Callable[[str, RecordDict], None]
"""Changes a reply; gets the stage of the protocol."""


class LyingNodes(LocalGrid):
    """Nodes on which one client lies: of its number of examples, and in its replies."""

    def __init__(self, lie: Lie, claims: Any = harness.EXAMPLES_EACH) -> None:
        clients = harness.clients(PLAN, none())

        def make(context: Context) -> MaskableClient:
            return MaskableClient(clients[int(context.node_config[PARTITION])], context.state, clip=8.0)

        super().__init__(range(harness.CLIENTS), masking_client_app(make))
        self._lie, self._claims = lie, claims

    def _answer(self, message: Message) -> Message:
        client = message.metadata.dst_node_id - FIRST_NODE
        if message.metadata.message_type != "train":
            told = self._claims if client == LIAR else harness.EXAMPLES_EACH
            said: dict[str, Any] = {PARTITION: client, PARTITIONS: harness.CLIENTS}
            said |= {NUM_EXAMPLES: told} if message.metadata.message_type == EXAMPLES else {}
            return Message(RecordDict({CLIENT: ConfigRecord(said)}), reply_to=message)
        stage = str(message.content.config_records[PROTOCOL]["stage"])
        reply = super()._answer(message)
        if client == LIAR and reply.has_content():
            self._lie(stage, reply.content)
        return reply


def with_liar(lie: Lie, claims: Any = harness.EXAMPLES_EACH, rounds: int = 1) -> tuple[Any, harness.Recording]:
    server, seen = harness.server(PLAN), harness.Recording()
    seen.follow(
        secure_rounds_on_grid(
            LyingNodes(lie, claims),
            server,
            rounds=rounds,
            nodes=Nodes(server.clients),
            masking=Masking(),
        )
    )
    return server.state, seen


def in_protocol(stage: str, **values: Any) -> Lie:
    def lie(now: str, content: RecordDict) -> None:
        if now == stage:
            content.config_records[PROTOCOL].update(values)

    return lie


def in_metrics(**values: Any) -> Lie:
    def lie(now: str, content: RecordDict) -> None:
        if now == "collect_masked_vectors":
            content.config_records["fitres.metrics"].update(values)

    return lie


def claiming(number: Any) -> Lie:
    def lie(now: str, content: RecordDict) -> None:
        if now == "collect_masked_vectors":
            content.metric_records["fitres.num_examples"] = MetricRecord({"num_examples": number})

    return lie


def without(record: str) -> Lie:
    def lie(now: str, content: RecordDict) -> None:
        content.pop(record, None)

    return lie


def honest(now: str, content: RecordDict) -> None:
    """Change nothing."""


HUGE = (
    b"\x93NUMPY\x01\x00v\x00"
    + b"{'descr': '<i8', 'fortran_order': False, 'shape': (4000000000000,), }".ljust(117)
    + b"\n"
)
VECTORS = "collect_masked_vectors"
LIES = {
    "2^62 examples": claiming(2**62),
    "no examples": claiming(0),
    "nan examples": claiming(float("nan")),
    "no record": without(PROTOCOL),
    "no keys": in_protocol("setup", pk1=b"none"),
    "text for a key": in_protocol("setup", pk2="none"),
    "one ciphertext": in_protocol("share_keys", ctxts=[b""]),
    "twice a node": in_protocol("share_keys", dsts=[FIRST_NODE, FIRST_NODE]),
    "no arrays": in_protocol(VECTORS, masked_params=[]),
    "a header of 32 TB": in_protocol(VECTORS, masked_params=[HUGE] * 20),
    "other names": in_metrics(names='["weight"]'),
    "names nested": in_metrics(names="[" * 20_000),
    "no counts": in_metrics(counts="{}"),
    "counts of text": in_metrics(counts='{"norm.num_batches_tracked": "many"}'),
    "counts of 2^60": in_metrics(counts=f'{{"norm.num_batches_tracked": {2**60}}}'),
    "counts below 0": in_metrics(counts='{"norm.num_batches_tracked": -1}'),
    "counts in a list": in_metrics(counts='{"norm.num_batches_tracked": [1, 2]}'),
    "loss of text": in_metrics(**{"train-loss": "low"}),
}


@pytest.mark.parametrize("name", few(LIES, 6, all_but_fuzz=len(LIES)))
def test_a_reply_that_breaks_the_protocol_is_left_out(name: str) -> None:
    state, seen = with_liar(LIES[name])
    (report,) = seen.reports
    assert report.clients == (0, 2) and "its reply does not count" in report.excluded[LIAR]
    alone, _, _ = secure(faults=((LIAR, "raises"),), rounds=1)
    for tensor, expected in zip(state.parameters.values(), alone.parameters.values(), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("claim", [2**62, 2**63 - 1, 10**15, True, -1, "many", [1, 2]])
def test_one_claim_of_examples_leaves_the_others_their_weights(claim: Any) -> None:
    state, seen = with_liar(honest, claims=claim)
    (report,) = seen.reports
    assert report.clients == (0, 1, 2)
    expected, _, _ = secure(rounds=1)
    for tensor, mean in zip(state.parameters.values(), expected.parameters.values(), strict=True):
        torch.testing.assert_close(tensor, mean, rtol=1e-3, atol=2e-3)  # a hundred times the median blurs by as much


def test_shares_of_keys_that_one_withholds_come_from_the_others() -> None:
    state, seen = with_liar(in_protocol("unmask", nids=[FIRST_NODE] * 3))
    (report,) = seen.reports
    assert report.clients == (0, 1, 2)
    expected, _, _ = secure(rounds=1)
    for tensor, mean in zip(state.parameters.values(), expected.parameters.values(), strict=True):
        torch.testing.assert_close(tensor, mean, rtol=1e-4, atol=2e-5)


def test_rounding_of_the_mean_is_that_of_flowers_own_weights_and_levels() -> None:
    """Clients of 10 examples each, where another one has 100: each rounds a tenth of its update."""
    numbers, most, clip, levels = [10, 10, 10], 100, 8.0, 1 << 12
    rng, before = np.random.default_rng(0), np.random.get_state()
    np.random.seed(0)
    try:
        updates = [rng.uniform(-1, 1, 4000) for _ in numbers]
        weighted = [quantize([n / most * u], clip, levels)[0] for n, u in zip(numbers, updates, strict=True)]
    finally:
        np.random.set_state(before)
    total = sum(whole * (2 * clip / levels) - clip for whole in weighted)
    mean = sum(n * u for n, u in zip(numbers, updates, strict=True)) / sum(numbers)
    measured = float((total * most / sum(numbers) - mean).std())
    most_rounded = rounding_of_mean(2 * clip / levels, examples=sum(numbers), clients=3, most=most)
    assert 0.7 * most_rounded < measured < most_rounded
