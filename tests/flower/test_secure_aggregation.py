"""SecAgg+ by Flower: the plain mean, from updates that the server can't read."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fl_privacy.defenses import none
from fl_privacy.errors import UserError
from fl_privacy.federation import Audit, run_rounds
from fl_privacy.flower.secure_aggregation import run_secure_aggregation
from fl_privacy.flower.traffic import Traffic
from fl_privacy.types import LocalPlan
from tests.federation import harness

PLAN = LocalPlan(shares="delta", lr=0.1, epochs=1, batch_size=5)
ROUNDS = 2


def secure(plan: LocalPlan = PLAN, **clients: Any) -> tuple[Any, harness.Recording, Traffic]:
    server, seen = harness.server(plan), harness.Recording()
    traffic = run_secure_aggregation(
        server, harness.clients(plan, none(), **clients), rounds=ROUNDS, on_round=seen.reports.append
    )
    return server.state, seen, traffic


def plain(plan: LocalPlan = PLAN) -> tuple[Any, harness.Recording]:
    server, seen = harness.server(plan), harness.Recording()
    run_rounds(
        server,
        harness.clients(plan, none()),
        rounds=ROUNDS,
        audit=Audit(),
        interceptor=seen.interceptor(plan),
        on_round=seen.reports.append,
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
        run_secure_aggregation(server, harness.clients(PLAN), rounds=1, on_round=print)
    with pytest.raises(UserError, match=r"threshold is expected in \(0, 1\], but got 0"):
        run_secure_aggregation(harness.server(PLAN), harness.clients(PLAN), rounds=1, on_round=print, threshold=0)
    with pytest.raises(UserError, match="fewer did"):
        secure(faults=((0, "raises"), (1, "raises"), (2, "raises")))


def test_values_beyond_the_clip_are_reported_not_cut() -> None:
    with pytest.raises(UserError, match=r"client 0: UserError: Values of .* are expected within \+-1e-06, but reach"):
        run_secure_aggregation(harness.server(PLAN), harness.clients(PLAN), rounds=1, on_round=print, clip=1e-6)
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
