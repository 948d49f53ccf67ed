import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

from fl_privacy.defenses import ClientState, pruning, quantization
from fl_privacy.defenses.encoding import encoded_bytes
from fl_privacy.errors import UserError
from fl_privacy.flower.records import STYPE, array_values, finite_number, plain_array, read_upload, shortest, to_tensors

LIKE = {"weight": torch.zeros(50, 40)}


def defended(defense):
    update = {"weight": torch.randn(50, 40, generator=torch.Generator().manual_seed(0))}
    return defense.upload[0](update, ClientState(), torch.Generator().manual_seed(1))


@pytest.mark.parametrize("defense, share", [(pruning(rate=0.9), 0.15), (quantization(bits=4), 0.14)])
def test_compressed_updates_are_shorter_in_the_message_and_equal_after_it(defense, share):
    update = defended(defense)
    array = shortest(update["weight"].numpy())
    assert len(array.data) == encoded_bytes(update) < share * 4 * 2000
    record = RecordDict({"parameters": ArrayRecord({"weight": array})})
    received = record.array_records["parameters"]
    assert torch.equal(to_tensors(received, LIKE)["weight"], update["weight"])


def test_a_listener_reads_them_by_the_shapes_of_its_model():
    model = torch.nn.Linear(40, 50, bias=False)
    update = defended(pruning(rate=0.9))
    content = RecordDict(
        {
            "parameters": ArrayRecord({"weight": shortest(update["weight"].numpy())}),
            "metrics": MetricRecord({"num-examples": 3}),
        }
    )
    assert torch.equal(read_upload(content, model).tensors["weight"], update["weight"])


@pytest.mark.parametrize("array", [np.random.default_rng(0).normal(size=9), np.arange(4)], ids=["dense", "integers"])
def test_other_arrays_stay_readable_by_any_strategy(array):
    assert (shortest(array).numpy() == array).all()


def test_a_wrong_shape_is_left_to_the_server_to_judge():
    record = {"weight": shortest(np.zeros(2000, np.float32))}
    assert to_tensors(record, LIKE)["weight"].shape == (2000,)


@pytest.mark.parametrize(
    "record, like",
    [
        ({"weight": Array(dtype="float32", shape=(50, 40), stype=STYPE, data=b"\x02")}, LIKE),
        ({"weight": shortest(np.zeros((10, 10), np.float32))}, {}),
        ({"weight": shortest(np.eye(10, dtype=np.float32))}, {"weight": torch.zeros(3)}),
        ({"other": shortest(np.zeros((50, 40), np.float32))}, LIKE),
    ],
    ids=["truncated", "unexpected", "too large", "unknown"],
)
def test_what_the_sender_claims_is_not_trusted(record, like):
    with pytest.raises(UserError, match="expected"):
        to_tensors(record, like)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 1, 4)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64", "uint8", "bool"])
def test_arrays_are_serialized_as_flower_does(dtype: str, shape: tuple[int, ...]) -> None:
    values = (np.arange(np.prod(shape, dtype=int)) % 2).astype(dtype).reshape(shape)
    theirs, ours = Array.from_numpy_ndarray(values), plain_array(values)

    assert (ours.dtype, tuple(ours.shape), ours.stype, ours.data) == (
        theirs.dtype,
        tuple(theirs.shape),
        theirs.stype,
        theirs.data,
    )
    for array in (theirs, ours):
        assert array_values(array).dtype == values.dtype
        assert np.array_equal(array_values(array), values)


def test_arrays_in_another_layout_are_read_as_flower_does() -> None:
    columns = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    claimed = Array(dtype="float32", shape=(2,), stype="numpy.ndarray", data=Array.from_numpy_ndarray(columns).data)

    assert np.array_equal(array_values(Array.from_numpy_ndarray(columns)), columns)
    assert np.array_equal(array_values(claimed), columns), "what it says of itself does not count"
    assert np.array_equal(array_values(plain_array(columns)), columns)


@pytest.mark.parametrize(
    "key, value, wanted",
    [
        ("seconds", -1.0, "at least 0, but got -1.0"),
        ("defense-seconds", -2, "at least 0, but got -2"),
        ("train-loss", float("nan"), "a finite number, but got nan"),
    ],
)
def test_a_metric_that_makes_no_sense_is_refused_with_what_is_expected(key, value, wanted):
    with pytest.raises(UserError, match=f"{key} is expected to be {wanted}"):
        finite_number(MetricRecord({key: value}), key)


def test_a_negative_loss_and_no_time_at_all_are_taken():
    assert finite_number(MetricRecord({"train-loss": -0.5, "seconds": 0}), "train-loss") == -0.5
    assert finite_number(MetricRecord({"seconds": 0}), "seconds") == 0.0
