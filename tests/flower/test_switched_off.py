"""Nothing that a server sends keeps a defense from acting: the kind of its numbers, its names, a second question."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from fl_privacy import defend, defense_mod
from fl_privacy.defenses import Defense, dp_noise, pruning
from fl_privacy.errors import UserError
from fl_privacy.flower.inside.identity import identify_process
from fl_privacy.flower.inside.legacy import NumPyClient
from fl_privacy.flower.upload_defense import DefendedUpload


class Tied(nn.Module):
    """Two layers of one weight, as a language model's embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(30, 30, bias=False)
        self.second = nn.Linear(30, 30, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def context() -> Context:
    return Context(1, 1, {"partition-id": 0, "num-partitions": 2}, RecordDict(), {})


def asked(arrays: dict[str, np.ndarray], number: int | None = 1) -> Message:
    identify_process()
    config = ConfigRecord({} if number is None else {"server-round": number})
    record = ArrayRecord.from_numpy_ndarrays(list(arrays.values()))
    named = ArrayRecord(dict(zip(arrays, record.values(), strict=True)))
    return Message(RecordDict({"arrays": named, "config": config}), 1, "train")


def trains(message: Message, _: Context) -> Message:
    """Reply with all arrays plus one, in the number format in which they came."""
    (record,) = message.content.array_records.values()
    arrays = {key: (array.numpy() + 1).astype(array.numpy().dtype) for key, array in record.items()}
    replied = ArrayRecord(
        dict(zip(arrays, ArrayRecord.from_numpy_ndarrays(list(arrays.values())).values(), strict=True))
    )
    return Message(RecordDict({"arrays": replied, "m": MetricRecord({"num-examples": 1})}), reply_to=message)


def refusal(reply: Message) -> str:
    """Return the line that a server gets in place of an answer."""
    assert reply.has_error() and "\n" not in reply.error.reason
    return reply.error.reason


def values(reply: Message) -> dict[str, np.ndarray]:
    (record,) = reply.content.array_records.values()
    return {key: array.numpy() for key, array in record.items()}


@pytest.mark.parametrize("dtype", ["complex64", "int64", "int8", "bool"])
@pytest.mark.parametrize("buffers", ["kept", "withheld", "defended"])
def test_a_parameter_of_another_kind_of_numbers_is_refused(dtype: str, buffers: Any) -> None:
    net = nn.Linear(4, 3)
    mod = defense_mod(pruning(rate=0.9), model=net, buffers=buffers)
    sent = {name: np.zeros(tuple(t.shape), dtype=dtype) for name, t in net.state_dict().items()}
    assert "is expected to be of float32" in refusal(mod(asked(sent), context(), trains))


def test_one_array_among_many_is_refused_too() -> None:
    net = nn.Linear(4, 3)
    mod = defense_mod(dp_noise(scale=10.0, clip_norm=1.0), model=net)
    sent = {"weight": np.zeros((3, 4), dtype=np.float32), "bias": np.zeros(3, dtype=np.complex64)}
    assert "bias is expected to be of float32" in refusal(mod(asked(sent), context(), trains))


def test_what_a_server_names_like_a_statistic_is_defended_without_a_model() -> None:
    mod = defense_mod(Defense(upload=(lambda update, state, rng: {n: t * 0 for n, t in update.items()},)))
    sent = {"x.running_mean": np.ones(5, dtype=np.float32), "w": np.ones(5, dtype=np.float32)}
    replied = values(mod(asked(sent), context(), trains))
    assert all(np.array_equal(replied[name], sent[name]) for name in sent)


def test_whole_numbers_stay_where_nobody_knows_the_model() -> None:
    mod = defense_mod(pruning(rate=0.5))
    sent = {"w": np.ones(6, dtype=np.float32), "secret": np.ones(6, dtype=np.int64)}
    assert np.array_equal(values(mod(asked(sent), context(), trains))["secret"], sent["secret"])


def test_nothing_is_called_defended_where_nothing_was() -> None:
    mod = defense_mod(pruning(rate=0.5))
    said = refusal(mod(asked({"w": np.ones(6, dtype=np.int64)}), context(), trains))
    assert "there are none; send weights" in said


def test_a_tied_weight_leaves_with_one_noise_under_both_names() -> None:
    net = Tied()
    guard = DefendedUpload.around(dp_noise(scale=1.0, clip_norm=1.0), net, None, "kept")
    before = {name: torch.zeros(30, 30) for name in net.state_dict()}
    after = {name: torch.full((30, 30), 0.5) for name in before}
    replied = guard(before, after, Any, torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    assert torch.equal(replied["first.weight"], replied["second.weight"])
    assert replied["first.weight"].std() > 0.9


class Adds(NumPyClient):
    """A client with complex arrays, as a server has sent them."""

    def fit(self, parameters: Any, config: Any) -> Any:
        return [array + 1 for array in parameters], 1, {}


def test_a_wrapped_client_refuses_them_as_well() -> None:
    net = nn.Linear(4, 3)
    client = defend(Adds(), pruning(rate=0.9), model=net)
    with pytest.raises(UserError, match="floating-point"):
        client.fit([t.numpy().astype(np.complex64) for t in net.state_dict().values()], {"server-round": 1})
