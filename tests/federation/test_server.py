"""The server's arithmetic, by hand, and what it refuses."""

from dataclasses import replace

import pytest
import torch

from fl_privacy.errors import UserError
from fl_privacy.federation import Failure, Server, ServerPlan, upload_bytes
from fl_privacy.federation.server import weighted_mean
from fl_privacy.types import LocalPlan, ModelState, Upload


def server(shares: str = "delta", **rules: object) -> Server:
    return Server(
        state=ModelState({"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.5])}, {"n": torch.tensor(4)}),
        local_plan=LocalPlan(shares=shares),  # type: ignore[arg-type]
        plan=ServerPlan(**rules),  # type: ignore[arg-type]
        clients=[0, 1, 2, 3],
        seed=7,
    )


def upload(w: list[float], n: int, **tensors: torch.Tensor) -> Upload:
    return Upload(tensors={"w": torch.tensor(w), **tensors}, num_examples=n)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ("gradient", [1.0 - 0.5 * 2.5, 2.0 - 0.5 * 4.0]),
        ("delta", [1.0 + 0.5 * 2.5, 2.0 + 0.5 * 4.0]),
        ("weights", [1.0 + 0.5 * (2.5 - 1.0), 2.0 + 0.5 * (4.0 - 2.0)]),
    ],
)
def test_the_model_moves_by_the_mean_weighted_by_examples(shares: str, expected: list[float]) -> None:
    subject = server(shares, lr=0.5)

    subject.receive({2: upload([4.0, 4.0], 1), 0: upload([2.0, 4.0], 3)})

    torch.testing.assert_close(subject.state.parameters["w"], torch.tensor(expected))
    assert subject.state.parameters["b"].item() == 0.5, "what nobody uploads stays"


def test_the_state_is_replaced_not_changed() -> None:
    subject = server()
    before = subject.state

    subject.receive({0: upload([1.0, 1.0], 1)})

    assert subject.state is not before
    assert before.parameters["w"].tolist() == [1.0, 2.0]


def test_a_withheld_name_is_averaged_over_those_who_share_it() -> None:
    subject = server()

    subject.receive({0: upload([0.0, 0.0], 1, b=torch.tensor([2.0])), 1: upload([2.0, 2.0], 1)})

    assert subject.state.parameters["b"].tolist() == [2.5]
    assert subject.state.parameters["w"].tolist() == [2.0, 3.0]


def test_buffers_are_averaged_and_counters_stay_whole() -> None:
    subject = server()

    replies = [replace(upload([0.0, 0.0], n), buffers={"n": torch.tensor(count)}) for n, count in ((1, 5), (2, 9))]
    subject.receive(dict(enumerate(replies)))

    assert subject.state.buffers["n"].item() == 8  # (5 + 2 * 9) / 3 = 7.67
    assert subject.state.buffers["n"].dtype == torch.int64


BAD = {
    "no reply": (Failure("no reply"), "no reply"),
    "no examples": (upload([1.0, 1.0], 0), "at least 1 example"),
    "unknown name": (upload([1.0, 1.0], 1, head=torch.zeros(1)), "unknown tensor head"),
    "a parameter as a buffer": (replace(upload([1.0, 1.0], 1), buffers={"w": torch.zeros(2)}), "unknown tensor w"),
    "shape": (upload([1.0], 1), "expected shape (2,), got (1,)"),
    "nan": (upload([1.0, float("nan")], 1), "w: not finite"),
    "infinity": (upload([1.0, 1.0], 1, b=torch.tensor([float("inf")])), "b: not finite"),
    "precision": (upload([1.0, 1.0], 1, b=torch.zeros(1).double()), "b: expected float32 as sent, got float64"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_reply_is_excluded_and_the_others_count(case: str) -> None:
    reply, reason = BAD[case]
    subject = server()

    excluded = subject.receive({0: upload([1.0, 1.0], 1), 3: reply})

    assert list(excluded) == [3]
    assert reason in excluded[3]
    assert subject.state.parameters["w"].tolist() == [2.0, 3.0]


def test_only_bad_replies_stop_the_run_and_leave_the_model() -> None:
    subject = server()
    before = subject.state

    with pytest.raises(UserError, match=r"all 2 clients failed \(client 0: no reply; client 1: w: not finite\)"):
        subject.receive({1: upload([float("inf"), 0.0], 1), 0: Failure("no reply")})

    assert subject.state is before


def test_round_robin_asks_each_in_turn() -> None:
    assert [server(aggregation="round_robin").select(r) for r in range(1, 6)] == [[0], [1], [2], [3], [0]]


@pytest.mark.parametrize(("fraction", "number"), [(1.0, 4), (0.5, 2), (0.3, 2), (0.01, 1)])
def test_a_fraction_of_the_clients_is_asked(fraction: float, number: int) -> None:
    chosen = [server(fraction=fraction).select(r) for r in range(1, 30)]

    assert {len(c) for c in chosen} == {number}
    assert all(c == sorted(set(c)) for c in chosen)
    assert {i for c in chosen for i in c} == {0, 1, 2, 3}
    assert chosen == [server(fraction=fraction).select(r) for r in range(1, 30)]


def test_a_malicious_server_sends_something_of_its_own() -> None:
    subject = server()
    subject.tamper = lambda state, client: ModelState({"w": state.parameters["w"] * client}, state.buffers)

    assert subject.sent_to(3).parameters["w"].tolist() == [3.0, 6.0]
    assert subject.state.parameters["w"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("rules", [{"fraction": 0.0}, {"fraction": 1.5}, {"lr": 0.0}, {"aggregation": "median"}])
def test_rules_out_of_range_are_refused(rules: dict[str, object]) -> None:
    with pytest.raises(UserError, match="is expected"):
        server(**rules)


def test_the_weighted_mean_agrees_with_numpy() -> None:
    rng = torch.Generator().manual_seed(0)
    values = [torch.randn(5, 4, generator=rng) for _ in range(6)]
    weights = [3, 1, 4, 1, 5, 9]

    import numpy as np  # noqa: PLC0415

    expected = np.average(np.stack([v.numpy() for v in values]), axis=0, weights=weights)
    actual = weighted_mean([{"x": v} for v in values], weights)["x"]
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_bytes_are_those_of_all_that_is_uploaded() -> None:
    assert upload_bytes(replace(upload([1.0, 2.0], 1), buffers={"n": torch.tensor(1)})) == 2 * 4 + 8
