"""Uploads that would end or poison a run, in every tensor of a reply: excluded for a reason, and the others count."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.federation import Server, ServerPlan
from fl_privacy.types import ModelState, Upload
from tests.federation import harness
from tests.fuzz.judge import Case, cases

STATE = ModelState.of(harness.small_net())
HOSTILE = 4
"""The last of five clients."""

Change = Callable[[Tensor], Any]

CHANGES: dict[str, Change] = {
    "nan": lambda t: torch.full_like(t, math.nan),
    "one nan": lambda t: torch.where(torch.arange(t.numel()).view(t.shape) == 0, math.nan, t),
    "inf": lambda t: torch.full_like(t, math.inf),
    "-inf": lambda t: torch.full_like(t, -math.inf),
    "3e38": lambda t: torch.full_like(t, 3e38),
    "-3e38": lambda t: torch.full_like(t, -3e38),
    "1e300": lambda t: torch.full_like(t, 1e300, dtype=torch.float64),
    "bool": lambda t: t.bool(),
    "int64": lambda t: t.long(),
    "uint8": lambda t: t.to(torch.uint8),
    "complex": lambda t: t.to(torch.complex64),
    "float16": lambda t: t.half(),
    "float64": lambda t: t.double(),
    "flat": lambda t: t.flatten()[None],
    "halved": lambda t: t[: len(t) // 2],
    "empty": lambda t: t[:0],
    "a number": lambda t: t.sum(),
    "repeated": lambda t: torch.cat([t, t]),
    "huge": lambda t: 1e9 * torch.ones_like(t),
}

COUNTS: dict[str, Any] = {"0": 0, "-1": -1, "true": True, "1.5": 1.5, "nan": math.nan, "text": "5", "1e30": 10**30}


def honest(seed: int) -> Upload:
    rng = torch.Generator().manual_seed(seed)
    update = {name: 0.01 * torch.randn(t.shape, generator=rng) for name, t in STATE.parameters.items()}
    return Upload(tensors=update, buffers={n: t.clone() for n, t in STATE.buffers.items()}, num_examples=10)


def spoilt() -> Iterator[tuple[str, Upload]]:
    fine = honest(HOSTILE)
    for name, tensor in fine.tensors.items():
        for change, act in CHANGES.items():
            yield (
                f"{name} {change}",
                Upload(tensors={**fine.tensors, name: act(tensor)}, buffers=fine.buffers, num_examples=10),
            )
    for name, tensor in fine.buffers.items():
        if tensor.dim():
            for change in ("nan", "inf", "3e38", "1e300", "bool", "complex", "flat", "repeated"):
                changed = {**fine.buffers, name: CHANGES[change](tensor)}
                yield f"{name} {change}", Upload(tensors=fine.tensors, buffers=changed, num_examples=10)
    for name in ("norm.running_var", "norm.num_batches_tracked"):
        changed = {**fine.buffers, name: -fine.buffers[name] - 1}
        yield f"{name} negative", Upload(tensors=fine.tensors, buffers=changed, num_examples=10)
    for name, count in COUNTS.items():
        yield f"{name} examples", Upload(tensors=fine.tensors, buffers=fine.buffers, num_examples=count)
    yield "unknown", Upload(tensors={**fine.tensors, "x": torch.zeros(1)}, buffers=fine.buffers, num_examples=10)
    yield "nothing", Upload(tensors={}, buffers={}, num_examples=10)


def server() -> Server:
    return Server(state=STATE, local_plan=harness.FEDAVG, plan=ServerPlan(), clients=list(range(HOSTILE + 1)), seed=0)


@pytest.mark.parametrize("case", cases(spoilt()))
def test_an_upload_is_excluded_for_a_reason_and_the_others_count(case: Case) -> None:
    replies = {client: honest(client) for client in range(HOSTILE)}
    alone, beside = server(), server()
    assert alone.receive(replies) == {}
    excluded = beside.receive({**replies, HOSTILE: case.content})
    assert set(excluded) == {HOSTILE}
    assert excluded[HOSTILE].strip() and "\n" not in excluded[HOSTILE]
    for name, value in beside.state.parameters.items():
        assert torch.equal(value, alone.state.parameters[name])
    for name, value in beside.state.buffers.items():
        assert torch.equal(value, alone.state.buffers[name])


def test_when_none_is_left_the_run_ends_in_a_line() -> None:
    replies = {client: Upload(tensors={}, buffers={}, num_examples=1) for client in range(HOSTILE)}
    with pytest.raises(UserError) as error:
        server().receive(replies)
    assert "\n" not in str(error.value)
