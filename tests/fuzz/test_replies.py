"""Replies that lie, to a training under audit: its result and what is said of honest clients stay as they are."""

import json
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from fl_privacy.flower import Sane
from fl_privacy.flower.audit_protocol import DEFENDED, PROBED
from fl_privacy.flower.records import CLIENT, PARTITION
from tests.flower.liars import HONEST, Lie, about, as_bytes, audited, fedavg, trained

pytestmark = pytest.mark.usefixtures("undrawn_charts")

LIARS, RUNS = 20, 20
"""In a training; 400 replies in all."""

MOST_MEMORY = 1 << 30
"""Bytes that the process may hold at any time beyond what it did before."""

_PEAK_IS_FORGOTTEN, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
"""Of Linux; elsewhere the peak is that of all tests before, too."""

NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 2, 10**6, 10**15, 2**62, 2**63 - 1, -(2**63), 1e15, 1e300, 0.5]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-(2**63), 2**63 - 1),
)
VALUES = st.one_of(
    NUMBERS,
    st.text(max_size=20),
    st.binary(max_size=20),
    st.booleans(),
    st.lists(st.floats(), max_size=4),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    st.lists(st.text(max_size=5), max_size=4),
)
PART = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["pruning", "dp_noise", "", "x" * 500]),
        "settings": st.dictionaries(st.text(max_size=5), st.one_of(st.floats(), st.text(max_size=5)), max_size=3),
        "strength": st.sampled_from([None, "rate", "nothing", 3]),
        "effect": st.sampled_from(
            [{"effect": "Undeclared"}, {"effect": "Noise"}, {"effect": "Noise", "std": 1e308}, {"effect": 7}, {}]
        ),
    }
)
DEEP = "[" * 20_000
CLAIMS = st.one_of(st.lists(PART, max_size=3).map(json.dumps), st.sampled_from([DEEP, "{}", "[1]", "null", "nan"]))
NORMALIZED = st.one_of(
    st.lists(st.floats(), max_size=4), st.sampled_from([[0.5], [0.0], [1e38], [0.5, 0.5, 0.5], ["a"], 3.0])
)
DTYPES = st.sampled_from(["f2", "f4", "f8", "i1", "i8", "u1", "?", "c8", "c16"])


def put(record: str, **values: Any) -> Lie:
    """Return a lie that writes ``values`` into a config record of a reply."""

    def lie(content: RecordDict, probe: bool) -> None:
        held = content.config_records.get(record, {})
        content[record] = ConfigRecord({**held, **values})

    return lie


def count(number: Any, key: str) -> Lie:
    def lie(content: RecordDict, probe: bool) -> None:
        if probe and isinstance(number, int | float) and not isinstance(number, bool):
            next(iter(content.metric_records.values()))[key] = number

    return lie


def arrays(change: Callable[[np.ndarray], np.ndarray], rename: str | None) -> Lie:
    def lie(content: RecordDict, probe: bool) -> None:
        if not probe:
            return
        for name, record in list(content.array_records.items()):
            made = {f"{key}{rename or ''}": Array(change(array.numpy())) for key, array in record.items()}
            content[name] = ArrayRecord(made)

    return lie


def second_record(value: float) -> Lie:
    def lie(content: RecordDict, probe: bool) -> None:
        if probe:
            (record,) = content.array_records.values()
            content["more"] = ArrayRecord({key: Array(array.numpy() * value) for key, array in record.items()})

    return lie


def garbage(config: dict[str, Any], numbers: dict[str, float]) -> Lie:
    def lie(content: RecordDict, probe: bool) -> None:
        content["garbage"] = ConfigRecord(config)
        if probe:
            content["numbers"] = MetricRecord(numbers)

    return lie


def as_type(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: array.astype(dtype)


def times(factor: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return (array * np.float64(factor)).astype(array.dtype)

    return change


def reshaped(array: np.ndarray) -> np.ndarray:
    return array[..., None]


LIES = st.one_of(
    NUMBERS.flatmap(lambda n: st.sampled_from(["num-examples", "loss"]).map(lambda key: count(n, key))),
    VALUES.map(lambda value: put(CLIENT, **{PARTITION: value})),
    st.sampled_from([0, 1, 2, 3]).map(lambda value: put(CLIENT, **{PARTITION: value})),
    st.tuples(NORMALIZED, NORMALIZED).map(lambda pair: put(PROBED, mean=pair[0], std=pair[1])),
    st.one_of(VALUES, st.sampled_from([DEEP, '["' + "a" * 64 + '"]', "[1]"])).map(
        lambda value: put(PROBED, fingerprints=value)
    ),
    st.one_of(CLAIMS, VALUES).map(lambda value: put(DEFENDED, parts=value)),
    DTYPES.map(lambda dtype: arrays(as_type(dtype), None)),
    st.floats().map(lambda factor: arrays(times(factor), None)),
    st.sampled_from([arrays(reshaped, None), arrays(times(1.0), "x"), arrays(np.zeros_like, None)]),
    st.floats().map(second_record),
    st.tuples(
        st.dictionaries(st.text(min_size=1, max_size=8), VALUES, max_size=3),
        st.dictionaries(st.text(min_size=1, max_size=8), st.floats(), max_size=3),
    ).map(lambda pair: garbage(*pair)),
)


def tolerant(lie: Lie) -> Lie:
    """Let a lie pass that Flower itself can't carry: no reply is sent."""

    def told(content: RecordDict, probe: bool) -> None:
        try:
            lie(content, probe)
        except (TypeError, ValueError, OverflowError):
            return

    return told


def most_memory() -> int:
    """Return the most bytes that the process has held since its peak was forgotten."""
    if _STATUS.is_file():
        told = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
        return 1024 * int(told["VmHWM"].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.fixture(autouse=True)
def within_memory() -> Iterator[None]:
    if _PEAK_IS_FORGOTTEN.exists():
        _PEAK_IS_FORGOTTEN.write_text("5")
    before = most_memory()
    yield
    assert most_memory() - before < MOST_MEMORY


@pytest.fixture(scope="module")
def truthful(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Weights and the honest clients' rows where nobody lies."""
    strategy, weights, rows = audited({}, HONEST + LIARS, tmp_path_factory.mktemp("truthful"))
    assert strategy.failure is None and len(rows) == 2 * HONEST
    assert weights == as_bytes(trained(fedavg(HONEST + LIARS), {}, HONEST + LIARS))
    return weights, rows


def of_runs(number: int) -> Any:
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def expect_unmoved(lies: list[Lie], truthful: tuple[dict[str, bytes], dict[str, Any]], out: Path) -> None:
    """Training and honest clients are as they are where nobody lies."""
    told = {HONEST + k: tolerant(lie) for k, lie in enumerate(lies)}
    strategy, weights, rows = audited(told, HONEST + LIARS, out)
    assert strategy.failure is None
    assert weights == truthful[0]
    assert rows.keys() == truthful[1].keys()
    for name, row in rows.items():
        assert row == {key: about(value) for key, value in truthful[1][name].items()}


@pytest.mark.long
@pytest.mark.parametrize("runs", [1, pytest.param(RUNS, marks=pytest.mark.fuzz)])
def test_lies_beside_an_honest_training_change_nothing(
    runs: int, truthful: tuple[dict[str, bytes], dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    @of_runs(runs)
    @given(st.lists(LIES, min_size=LIARS, max_size=LIARS))
    def lie(lies: list[Lie]) -> None:
        expect_unmoved(lies, truthful, tmp_path_factory.mktemp("lies"))

    lie()


def in_training(lie: Lie) -> Lie:
    """Apply the same lie in training messages too."""
    return lambda content, probe: tolerant(lie)(content, True)


@pytest.mark.parametrize("runs", [1, pytest.param(RUNS, marks=pytest.mark.fuzz)])
def test_training_replies_that_lie_come_to_what_they_come_to_without_audit(
    runs: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    @of_runs(runs)
    @given(st.lists(LIES, min_size=LIARS, max_size=LIARS))
    def lie(lies: list[Lie]) -> None:
        told = {HONEST + k: in_training(lie) for k, lie in enumerate(lies)}
        clients = HONEST + LIARS
        _, weights, _ = audited(told, clients, tmp_path_factory.mktemp("lies"), Sane)
        assert weights == as_bytes(trained(Sane(fedavg(clients)), told, clients))

    lie()
