"""Whatever carries the messages, the same seed gives the same bits."""

import logging
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch

from fl_privacy.defenses import ClientState
from fl_privacy.errors import UserError
from fl_privacy.federation import Audit, ServerPlan, plain_rounds
from fl_privacy.flower import rounds_in_process
from fl_privacy.types import LocalPlan
from tests.federation import harness
from tests.selection import few

ROUNDS = 3


def run(
    backend: Callable[..., Any],
    *,
    plan: LocalPlan = harness.FEDAVG,
    rules: ServerPlan | None = None,
    audit: Audit | None = None,
    tamper: Any = None,
    **clients: Any,
) -> tuple[Any, harness.Recording, dict[int, ClientState]]:
    server, recording = harness.server(plan, rules), harness.Recording()
    server.tamper = tamper
    source = partial(harness.clients, plan, **clients)
    told = {"rounds": ROUNDS, "audit": audit or harness.updates(1, 3), "interceptor": recording.interceptor(plan)}
    kept = recording.through(backend, server, source, **told)
    return server.state, recording, kept


def assert_same_run(backend: Callable[..., Any], **settings: Any) -> harness.Recording:
    state, expected, kept = run(plain_rounds, **settings)
    other_state, actual, other_kept = run(backend, **settings)
    harness.assert_same_state(state, other_state)
    harness.assert_same_observations(expected.observations, actual.observations)
    assert [r.clients for r in expected.reports] == [r.clients for r in actual.reports]
    assert [r.excluded for r in expected.reports] == [r.excluded for r in actual.reports]
    assert [r.train_loss for r in expected.reports] == [r.train_loss for r in actual.reports]
    assert [r.upload_bytes for r in expected.reports] == [r.upload_bytes for r in actual.reports]
    assert kept.keys() == other_kept.keys()
    for client, own in kept.items():
        harness.assert_same_tensors(own.tensors, other_kept[client].tensors)
    return actual


def push_client_one(state: Any, client: int) -> Any:
    """Change the model that a malicious server sends to client one."""
    if client != 1:
        return state
    return type(state)({n: p + 0.5 for n, p in state.parameters.items()}, state.buffers)


CASES: dict[str, dict[str, Any]] = {
    "fedavg with momentum, batch norm and noise": {"defense": harness.NOISE},
    "fedsgd": {"plan": harness.FEDSGD},
    "weights": {"plan": LocalPlan(shares="weights", lr=0.1, steps=3, batch_size=4, optimizer="adam")},
    "buffers withheld": {"plan": LocalPlan(shares="delta", lr=0.1, epochs=1, buffers="withheld", batch_norm="eval")},
    "clients sampled": {"rules": ServerPlan(fraction=0.5)},
    "round robin": {"rules": ServerPlan(aggregation="round_robin")},
    "private head and memory": {"defense": harness.HEAD},
    "examples exchanged": {"defense": harness.DATA, "audit": harness.probes(1, 3)},
    "probes": {"audit": harness.probes(1, 2), "defense": harness.HEAD},
    "a model for each client": {"tamper": push_client_one},
    "failing clients": {"faults": ((0, "raises"), (2, "nan"))},
    "misshapen update": {"faults": ((1, "shape"),)},
    "everything at once": {
        "plan": harness.FEDAVG,
        "defense": harness.HEAD,
        "audit": harness.probes(1, 2),
        "faults": ((1, "raises"),),
        "tamper": push_client_one,
    },
    "probe of a failing client": {"faults": ((1, "raises"),), "audit": harness.probes(1)},
}


@pytest.mark.parametrize("case", few(CASES, 8))
def test_in_process_flower_gives_the_bits_of_the_plain_loop(case: str) -> None:
    recording = assert_same_run(rounds_in_process, **CASES[case])

    assert len(recording.reports) == ROUNDS
    assert recording.observations


def test_clients_that_fail_are_excluded_and_the_rest_goes_on() -> None:
    _, recording, _ = run(rounds_in_process, faults=((0, "raises"), (2, "nan")))

    assert [report.clients for report in recording.reports] == [(1,)] * ROUNDS
    assert recording.reports[0].excluded == {
        0: "RuntimeError: the disk of this client",
        2: "conv.weight: not finite",
    }


def test_all_clients_failing_stops_the_run_with_that_error() -> None:
    with pytest.raises(UserError, match="all 3 clients failed"):
        run(rounds_in_process, faults=((0, "raises"), (1, "nan"), (2, "shape")))


def test_different_seeds_of_the_server_select_differently() -> None:
    """The comparison above can fail."""
    chosen = [harness.server(rules=ServerPlan(fraction=0.3), seed=seed).select(1) for seed in range(8)]

    assert len({tuple(c) for c in chosen}) > 1


def test_private_values_survive_on_the_client_between_rounds() -> None:
    _, _, kept = run(rounds_in_process, defense=harness.HEAD)

    assert {int(state.tensors["memory/rounds"]) for state in kept.values()} == {ROUNDS}
    heads = [state.tensors["private/private.weight"] for state in kept.values()]
    assert not torch.equal(heads[0], heads[1])


def test_who_leaves_in_the_middle_gets_flower_s_log_back() -> None:
    level, recording = logging.getLogger("flwr").level, harness.Recording()
    settings = {"rounds": ROUNDS, "audit": harness.updates(1), "interceptor": recording.interceptor()}
    with closing(rounds_in_process(harness.server(), harness.clients, **settings)) as rounds:
        assert [o.id.client for o in next(rounds)] == [*range(harness.CLIENTS)]
        assert logging.getLogger("flwr").level == logging.WARNING
    assert logging.getLogger("flwr").level == level
