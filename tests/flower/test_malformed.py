"""Malformed replies as messages: under our strategy and a stock one each costs only its own client the round."""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fl_privacy.errors import UserError
from fl_privacy.flower import Federated, HonestButCurious, LocalGrid, Sane, numpy_client_app, simulated_client_app
from fl_privacy.flower.grids import FIRST_NODE
from fl_privacy.flower.records import METRICS, PARAMETERS, STYPE
from fl_privacy.types import LocalPlan, VictimId
from tests.federation import harness
from tests.selection import few

EVIL, ROUNDS = 1, 3
Spoil = Callable[[RecordDict], RecordDict | None]
WEIGHTS = LocalPlan(shares="weights", lr=0.1, epochs=1, batch_size=5)


def arrays_of(content: RecordDict) -> str:
    return PARAMETERS if PARAMETERS in content.array_records else next(iter(content.array_records))


def with_array(change: Callable[[np.ndarray], np.ndarray]) -> Spoil:
    def spoil(content: RecordDict) -> None:
        record = content.array_records[arrays_of(content)]
        record["out.bias"] = Array.from_numpy_ndarray(change(record["out.bias"].numpy()))

    return spoil


def with_bytes(**fields: Any) -> Spoil:
    def spoil(content: RecordDict) -> None:
        record = content.array_records[arrays_of(content)]
        old = record["out.bias"]
        kept = {"dtype": old.dtype, "shape": old.shape, "stype": old.stype, "data": old.data}
        record["out.bias"] = Array(**{**kept, **fields})

    return spoil


def with_metrics(**metrics: Any) -> Spoil:
    def spoil(content: RecordDict) -> None:
        record = next(iter(content.metric_records.values()))
        for key, value in metrics.items():
            name = key.replace("_", "-")
            if value is None:
                del record[name]
            else:
                record[name] = value

    return spoil


def renamed(content: RecordDict) -> None:
    record = content.array_records[arrays_of(content)]
    record["head"] = record.pop("out.bias")


def in_another_record(content: RecordDict) -> RecordDict:
    return RecordDict({**content, "more": ArrayRecord({"x": Array.from_numpy_ndarray(np.zeros(3, np.float32))})})


def without(kind: type) -> Spoil:
    return lambda content: RecordDict({k: v for k, v in content.items() if not isinstance(v, kind)})


OBJECTS = np.array([{"__reduce__": "os.system"}, None, 1, 2], dtype=object)

CASES: dict[str, Spoil] = {
    **{
        str(dtype): with_array(lambda a, d=dtype: a.astype(d))
        for dtype in ("bool", "int8", "int32", "int64", "uint16", "float16", "float64", "complex64", "complex128")
    },
    "not a number": with_array(lambda a: a * np.float32("nan")),
    "infinite": with_array(lambda a: a + np.float32("inf")),
    "3e38": with_array(lambda a: np.full_like(a, 3e38)),
    "1e300": with_array(lambda a: np.full(a.shape, 1e300)),
    "1e6": with_array(lambda a: np.full_like(a, 1e6)),
    "longer": with_array(lambda a: np.concatenate([a, a])),
    "a scalar": with_array(lambda a: a[0]),
    "no bytes": with_bytes(data=b""),
    "half of the bytes": with_bytes(data=b"\x93NUMPY\x01\x00v\x00{'descr': '<f4'"),
    "a pickle": with_bytes(data=b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94."),
    "unknown serialization": with_bytes(stype="pickle"),
    "encoded nonsense": with_bytes(stype=STYPE, data=b"\xff" * 9),
    "encoded terabytes": with_bytes(stype=STYPE, shape=(2**40,), data=b"\x00"),
    "encoded negative shape": with_bytes(stype=STYPE, shape=(-4,), data=b"\x00"),
    "encoded unknown dtype": with_bytes(stype=STYPE, dtype="nonsense", data=b"\x00"),
    "renamed": renamed,
    "more arrays": in_another_record,
    "no arrays": without(ArrayRecord),
    "no metrics": without(MetricRecord),
    "nothing": lambda content: RecordDict(),
    "another kind of record": lambda content: RecordDict({METRICS: ConfigRecord({"num-examples": "many"})}),
    "no number of examples": with_metrics(num_examples=None),
    **{
        f"{number} examples": with_metrics(num_examples=number)
        for number in (0, -5, float("nan"), float("inf"), [1, 2], 1e30)
    },
}

OURS: dict[str, Spoil] = {
    "no loss": with_metrics(train_loss=None),
    "loss nan": with_metrics(train_loss=float("nan")),
    "seconds below zero": with_metrics(seconds=-1.0),
    "seconds infinite": with_metrics(defense_seconds=float("inf")),
    "a list of losses": with_metrics(train_loss=[1.0]),
}

STOCK: dict[str, Spoil] = {
    "loss nan": with_metrics(train_loss=float("nan")),
    "another metric": with_metrics(virus=1.0),
    "a list": with_metrics(train_loss=[1.0, 2.0]),
    "two records of metrics": lambda content: RecordDict({**content, "m": MetricRecord({"num-examples": 1})}),
}


def evil_app(app: Any, spoil: Spoil) -> Any:
    def answer(message: Message, context: Context) -> Message:
        reply = app(message, context)
        if message.metadata.message_type == "train" and context.node_id == FIRST_NODE + EVIL and reply.has_content():
            spoilt = spoil(reply.content)
            reply = Message(reply.content if spoilt is None else spoilt, reply_to=message)
        return reply

    return answer


def ours(app: Any) -> tuple[Any, list[Any]]:
    server, reports = harness.server(harness.FEDSGD), list[Any]()
    strategy = Federated(server=server, on_round=reports.append)
    strategy.start(LocalGrid(range(harness.CLIENTS), app), strategy.arrays(), num_rounds=ROUNDS)
    return server, reports


def our_app() -> Any:
    return simulated_client_app(harness.clients(harness.FEDSGD))


@cache
def ours_without_it() -> Any:
    """Server of our strategy where the one client sends nothing."""
    return ours(evil_app(our_app(), lambda content: RecordDict()))[0]


@pytest.mark.parametrize("case", [*CASES, *OURS])
def test_our_strategy_goes_on_without_it(case: str) -> None:
    server, reports = ours(evil_app(our_app(), {**CASES, **OURS}[case]))

    assert [list(report.excluded) for report in reports] == [[EVIL]] * ROUNDS
    assert all(report.excluded[EVIL].strip() and "\n" not in report.excluded[EVIL] for report in reports)
    harness.assert_same_state(server.state, ours_without_it().state)
    assert all(np.isfinite(report.train_loss) for report in reports)


def stock(app: Any, *, nodes: Sequence[int] = range(harness.CLIENTS)) -> tuple[Any, Sane]:
    subject = Sane(FedAvg(fraction_evaluate=0.0, min_available_nodes=2, min_train_nodes=2))
    start = ArrayRecord(harness.small_net().state_dict())
    return subject.start(LocalGrid(nodes, app), start, num_rounds=ROUNDS), subject


def stock_app() -> Any:
    return simulated_client_app(harness.clients(WEIGHTS))


@cache
def stock_without_it() -> list[np.ndarray]:
    """Parameters by a stock strategy where the one client sends nothing."""
    result, _ = stock(evil_app(stock_app(), lambda content: RecordDict()))
    return result.arrays.to_numpy_ndarrays()


def negative_variance(content: RecordDict) -> None:
    record = content.array_records[arrays_of(content)]
    record["norm.running_var"] = Array.from_numpy_ndarray(-np.ones(3, np.float32))


@pytest.mark.parametrize("case", few([*CASES, *STOCK, "negative variance"], 12, all_but_fuzz=60))
def test_a_stock_strategy_goes_on_without_it(case: str, caplog: pytest.LogCaptureFixture) -> None:
    spoil = {**CASES, **STOCK, "negative variance": negative_variance}[case]

    result, subject = stock(evil_app(stock_app(), spoil))

    assert {round: list(reasons) for round, reasons in subject.excluded.items()} == {
        round: [FIRST_NODE + EVIL] for round in range(1, ROUNDS + 1)
    }
    for found, wanted in zip(result.arrays.to_numpy_ndarrays(), stock_without_it(), strict=True):
        assert found.dtype == wanted.dtype
        assert np.array_equal(found, wanted)
    assert f"The reply of node {FIRST_NODE + EVIL} in round 1 is left out" in caplog.text


def test_stock_strategies_fail_without_it() -> None:
    """What ``Sane`` is for: FedAvg alone takes the poison, or ends."""
    start, strategy = ArrayRecord(harness.small_net().state_dict()), FedAvg(fraction_evaluate=0.0)
    grid = LocalGrid(range(harness.CLIENTS), evil_app(stock_app(), CASES["not a number"]))

    result = strategy.start(grid, start, num_rounds=1)

    assert result.arrays is None or not all(np.isfinite(a).all() for a in result.arrays.to_numpy_ndarrays())


def test_honest_replies_are_handed_on_as_they_are() -> None:
    result, subject = stock(stock_app())
    alone = FedAvg(fraction_evaluate=0.0).start(
        LocalGrid(range(harness.CLIENTS), stock_app()), ArrayRecord(harness.small_net().state_dict()), num_rounds=ROUNDS
    )

    assert subject.excluded == {round: {} for round in range(1, ROUNDS + 1)}
    for found, wanted in zip(result.arrays.to_numpy_ndarrays(), alone.arrays.to_numpy_ndarrays(), strict=True):
        assert np.allclose(found, wanted, atol=1e-6), "but for the order of the sum"


def test_a_claimed_number_of_examples_is_capped_for_a_stock_strategy() -> None:
    seen: list[float] = []

    class Watching(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            seen.extend(int(r.content[METRICS]["num-examples"]) for r in replies)
            return super().aggregate_train(server_round, replies)

    subject = Sane(Watching(fraction_evaluate=0.0))
    app = evil_app(stock_app(), with_metrics(num_examples=10**9))
    start = ArrayRecord(harness.small_net().state_dict())
    subject.start(LocalGrid(range(harness.CLIENTS), app), start, num_rounds=1)

    assert sorted(seen) == [12, 12, 1200]


def test_the_curious_server_around_it_still_sees_every_reply() -> None:
    recording = harness.Recording()
    inner = Sane(FedAvg(fraction_evaluate=0.0))
    curious = HonestButCurious(inner, recording.interceptor(WEIGHTS), harness.updates(1))

    grid = LocalGrid(range(harness.CLIENTS), evil_app(stock_app(), CASES["1e6"]))
    curious.start(grid, ArrayRecord(harness.small_net().state_dict()), num_rounds=1)

    assert list(inner.excluded[1]) == [FIRST_NODE + EVIL]
    assert sorted(o.id for o in recording.observations) == [VictimId(1, c) for c in range(harness.CLIENTS)]


def test_errors_and_silence_are_named(caplog: pytest.LogCaptureFixture) -> None:
    app = stock_app()

    def answer(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train" and context.node_id == FIRST_NODE + EVIL:
            return Message(Error(2, None), reply_to=message)
        reply: Message = app(message, context)
        return reply

    _, subject = stock(answer)

    assert subject.excluded[1] == {FIRST_NODE + EVIL: "Flower's error 2"}


def test_tests_that_make_no_sense_are_left_out_of_evaluation() -> None:
    app = numpy_client_app(lambda context: _Tester(context.node_id == FIRST_NODE + EVIL))
    subject = Sane(FedAvg(fraction_train=1.0, fraction_evaluate=1.0))

    result = subject.start(LocalGrid(range(3), app), ArrayRecord(harness.small_net().state_dict()), num_rounds=1)

    assert result.evaluate_metrics_clientapp[1]["loss"] == pytest.approx(0.5)


class _Tester:
    def __init__(self, evil: bool) -> None:
        self.evil = evil

    def fit(self, parameters: Any, config: Any) -> Any:
        return parameters, 3, {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return float("nan") if self.evil else 0.5, 3, {}


def test_a_factor_that_leaves_out_honest_clients_is_refused() -> None:
    with pytest.raises(UserError, match="factor is expected to be above 1"):
        Sane(FedAvg(), factor=1.0)


def test_the_table_is_long_enough() -> None:
    logging.getLogger("flwr").setLevel(logging.WARNING)
    assert len(CASES) + len(OURS) + len(CASES) + len(STOCK) >= 60
