"""Malformed uploads, one by one: excluded for one reason, and the others' round is what it is without them."""

import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.federation import Failure, Server, ServerPlan
from fl_privacy.federation.replies import (
    WITHHELD,
    UnansweredError,
    UnfitMessageError,
    attempt,
    expect_sound,
    hide_reason,
    sort_out,
)
from fl_privacy.types import LocalPlan, ModelState, Upload

HONEST = 4
EVIL = HONEST
Change = Callable[[Upload], Upload]


def state() -> ModelState:
    rng = torch.Generator().manual_seed(3)
    return ModelState(
        {"conv.weight": torch.randn(3, 2, generator=rng), "out.bias": torch.randn(4, generator=rng)},
        {
            "norm.running_mean": torch.randn(3, generator=rng),
            "norm.running_var": torch.rand(3, generator=rng) + 0.5,
            "norm.num_batches_tracked": torch.tensor(7),
        },
    )


def server(shares: str = "delta", **rules: float) -> Server:
    plan = LocalPlan(shares=shares)  # type: ignore[arg-type]
    return Server(state=state(), local_plan=plan, plan=ServerPlan(**rules), clients=range(HONEST + 1), seed=1)  # type: ignore[arg-type]


def honest(client: int, shares: str = "delta") -> Upload:
    rng, sent = torch.Generator().manual_seed(client), state()
    step = {n: 0.01 * (1 + client) * torch.randn(t.shape, generator=rng) for n, t in sent.parameters.items()}
    buffers = {n: t + 1 if n.endswith("tracked") else t * 1.1 for n, t in sent.buffers.items()}
    tensors = {n: sent.parameters[n] + t for n, t in step.items()} if shares == "weights" else step
    return Upload(tensors=tensors, buffers=buffers, num_examples=20 + client)


def parameter(change: Callable[[Tensor], Tensor], name: str = "out.bias") -> Change:
    return lambda upload: replace(upload, tensors={**upload.tensors, name: change(upload.tensors[name])})


def buffer(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda upload: replace(upload, buffers={**upload.buffers, name: change(upload.buffers[name])})


def first(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed.view(-1)[0] = value
        return changed

    return change


def numbered(number: object) -> Change:
    return lambda upload: replace(upload, num_examples=number)  # type: ignore[arg-type]


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
MEAN, VARIANCE, COUNT = "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"

CASES: dict[str, tuple[Change, str]] = {
    **{f"parameter {t}": (parameter(lambda x, t=t: x.to(t)), "expected float32 as sent, got") for t in DTYPES},
    **{f"mean {t}": (buffer(MEAN, lambda x, t=t: x.to(t)), "expected float32 as sent, got") for t in DTYPES},
    **{
        f"counter {t}": (buffer(COUNT, lambda x, t=t: x.to(t)), "expected int64 as sent, got")
        for t in DTYPES
        if t != torch.int64
    },
    **{
        f"parameter {value}": (parameter(first(value)), reason)
        for value, reason in (
            (float("nan"), "out.bias: not finite"),
            (float("inf"), "out.bias: not finite"),
            (float("-inf"), "out.bias: not finite"),
            (3e38, "do not stay finite when squared"),
            (-3e38, "do not stay finite when squared"),
            (1e20, "do not stay finite when squared"),
            (1e18, "the norm of its update"),
            (-1e6, "the norm of its update"),
            (1e3, "the norm of its update"),
        )
    },
    "1e300": (parameter(lambda x: first(1e300)(x.double())), "expected float32 as sent, got float64"),
    "every value": (parameter(lambda x: torch.full_like(x, 3e38)), "do not stay finite"),
    **{
        f"{name} {value}": (buffer(name, first(value)), reason)
        for name, value, reason in (
            (MEAN, float("nan"), "not finite"),
            (MEAN, float("inf"), "not finite"),
            (MEAN, 3e38, "do not stay finite"),
            (MEAN, -1e9, "the norm of its buffers"),
            (VARIANCE, float("nan"), "not finite"),
            (VARIANCE, 1e30, "do not stay finite"),
            (VARIANCE, 1e9, "the norm of its buffers"),
            (VARIANCE, -1.0, "expected at least 0, got -1"),
            (VARIANCE, -1e-12, "expected at least 0"),
            (COUNT, -1, "expected at least 0, got -1"),
            (COUNT, 2**62, "expected to change by at most"),
            (COUNT, 10**6, "the norm of its counters"),
        )
    },
    "one dimension more": (parameter(lambda x: x[None]), "expected shape (4,), got (1, 4)"),
    "transposed": (parameter(lambda x: x.T, "conv.weight"), "expected shape (3, 2), got (2, 3)"),
    "flat": (parameter(torch.flatten, "conv.weight"), "expected shape (3, 2), got (6,)"),
    "too long": (parameter(lambda x: torch.cat([x, x])), "expected shape (4,), got (8,)"),
    "too short": (parameter(lambda x: x[:1]), "expected shape (4,), got (1,)"),
    "of nothing": (parameter(lambda x: x[:0]), "expected shape (4,), got (0,)"),
    "a scalar": (parameter(lambda x: x.sum()), "expected shape (4,), got ()"),
    "a vector for a counter": (buffer(COUNT, lambda x: x[None]), "expected shape (), got (1,)"),
    "a broadcast million": (parameter(lambda x: torch.zeros(1).expand(10**6)), "got (1000000,)"),
    "unknown name": (lambda u: replace(u, tensors={**u.tensors, "head": torch.zeros(1)}), "unknown tensor head"),
    "unknown buffer": (lambda u: replace(u, buffers={**u.buffers, "head": torch.zeros(1)}), "unknown tensor head"),
    "empty name": (lambda u: replace(u, tensors={"": torch.zeros(1)}), "unknown tensor"),
    "a buffer as a parameter": (lambda u: replace(u, tensors={**u.tensors, MEAN: torch.zeros(3)}), "unknown tensor"),
    "a parameter as a buffer": (lambda u: replace(u, buffers={"out.bias": torch.zeros(4)}), "unknown tensor out.bias"),
    "nothing": (lambda u: replace(u, tensors={}), "no parameter is in it"),
    **{
        f"{number} examples": (numbered(number), "expected at least 1 example")
        for number in (0, -1, -(10**9), True, 1.5, float("nan"), 2**53 + 1, 10**30)
    },
}


def without_evil(shares: str = "delta") -> Server:
    subject = server(shares)
    subject.receive({c: honest(c, shares) for c in range(HONEST)})
    return subject


def test_the_table_is_long_enough() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize("shares", ["delta", "gradient", "weights"])
@pytest.mark.parametrize("case", CASES)
def test_a_malformed_upload_is_excluded_and_changes_nothing(case: str, shares: str) -> None:
    change, reason = CASES[case]
    subject, reference = server(shares), without_evil(shares)

    excluded = subject.receive({**{c: honest(c, shares) for c in range(HONEST)}, EVIL: change(honest(EVIL, shares))})

    assert list(excluded) == [EVIL]
    assert reason in excluded[EVIL]
    assert "\n" not in excluded[EVIL]
    for own, other in (
        (subject.state.parameters, reference.state.parameters),
        (subject.state.buffers, reference.state.buffers),
    ):
        for name, tensor in own.items():
            assert tensor.dtype == other[name].dtype
            assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("case", [c for c in CASES if "norm" not in CASES[c][1]])
def test_alone_it_ends_the_round_with_its_reason_and_leaves_the_model(case: str) -> None:
    change, reason = CASES[case]
    subject = server()
    before = subject.state

    with pytest.raises(UserError) as error:
        subject.receive({0: change(honest(0))})

    assert reason in str(error.value)
    assert subject.state is before


def test_honest_clients_that_differ_by_much_all_count() -> None:
    uploads = {c: honest(c) for c in range(HONEST)}
    uploads[0] = replace(uploads[0], tensors={n: 30 * t for n, t in uploads[0].tensors.items()}, num_examples=1)
    uploads[1] = replace(uploads[1], num_examples=900)

    found = sort_out(uploads, state(), "delta")

    assert not found.excluded
    assert found.weights == (1, 900, 22, 23)


def test_two_clients_are_not_told_apart_by_their_norms() -> None:
    large = replace(honest(1), tensors={n: 1e4 * t for n, t in honest(1).tensors.items()})

    assert not sort_out({0: honest(0), 1: large}, state(), "delta").excluded
    assert list(sort_out({0: honest(0), 1: large, 2: honest(2)}, state(), "delta").excluded) == [1]


def test_updates_of_zeros_make_nobody_an_outlier() -> None:
    still = {c: replace(honest(c), tensors={n: 0 * t for n, t in honest(c).tensors.items()}) for c in range(3)}

    assert not sort_out({**still, 3: honest(3)}, state(), "delta").excluded


@pytest.mark.parametrize(("factor", "excluded"), [(2.0, [1]), (1e9, []), (float("inf"), [])])
def test_the_factor_is_a_setting(factor: float, excluded: list[int]) -> None:
    large = replace(honest(1), tensors={n: 1e4 * t for n, t in honest(1).tensors.items()})
    uploads = {c: honest(0) for c in range(HONEST)} | {1: large}

    assert list(server(norm_factor=factor).receive(uploads)) == excluded


def test_a_claimed_number_of_examples_counts_for_so_many_times_the_median(caplog: pytest.LogCaptureFixture) -> None:
    uploads = {c: replace(honest(c), num_examples=20) for c in range(HONEST)} | {
        EVIL: replace(honest(EVIL), num_examples=10**9)
    }

    assert sort_out(uploads, state(), "delta").weights == (20, 20, 20, 20, 2000)
    server().receive(uploads)
    assert "Client 4 claims 1000000000 examples and counts as 2000, 100 times the median" in caplog.text


def test_what_overflows_together_is_excluded_from_the_largest_on() -> None:
    """Finite in float16 each, their sum with the model is not."""
    half = ModelState({"w": torch.tensor([60000.0, 1.0], dtype=torch.float16)}, {})
    subject = replace(server(), state=half)

    def upload(value: float) -> Upload:
        return Upload(tensors={"w": torch.tensor([value, 0.0], dtype=torch.float16)}, num_examples=1)

    excluded = subject.receive({0: upload(10.0), 1: upload(30000.0)})

    assert list(excluded) == [1]
    assert "the model is not finite with its update of norm 3e+04" in excluded[1]
    assert torch.isfinite(subject.state.parameters["w"]).all()


def test_a_failure_keeps_its_reason() -> None:
    assert sort_out({0: honest(0), 1: Failure("its node is gone")}, state(), "delta").excluded == {
        1: "its node is gone"
    }


@pytest.mark.parametrize("factor", [1.0, 0.0, -5.0, float("nan")])
def test_a_factor_that_excludes_honest_clients_is_refused(factor: float) -> None:
    with pytest.raises(UserError, match="norm_factor is expected to be above 1"):
        ServerPlan(norm_factor=factor)


def test_who_still_learns_counts_once_the_others_have_learnt_their_examples() -> None:
    """Gradients of learnt examples vanish: with one example a client, honest ones are over 100 times the median."""

    def learnt(client: int, share: float) -> Upload:
        return replace(honest(client), tensors={n: share * t for n, t in honest(client).tensors.items()})

    subject = server()
    subject.receive({c: honest(c) for c in range(HONEST)})
    later = {c: learnt(c, 1e-5) for c in range(HONEST)}

    assert list(server().receive({**later, EVIL: honest(EVIL)})) == [EVIL]
    assert not subject.receive({**later, EVIL: honest(EVIL)})
    assert list(subject.receive({**later, EVIL: learnt(EVIL, 1e3)})) == [EVIL]


def test_a_client_that_counts_alone_makes_no_counter_overflow() -> None:
    """An overflown counter is below zero, and then every honest reply to it would be excluded."""
    greedy = buffer(COUNT, lambda x: torch.tensor(2**63 - 1))(honest(0))

    with pytest.raises(UserError, match=f"{COUNT}: expected to change by at most"):
        server().receive({0: greedy})
    with pytest.raises(UserError, match=f"{COUNT}: expected to change by at most"):
        server().receive({0: greedy, 1: greedy})


def test_counters_that_a_strategy_made_fractions_of_hide_no_update() -> None:
    sent = ModelState({"w": torch.zeros(4), COUNT: torch.tensor(7.5, dtype=torch.float64)}, {})

    def upload(step: float, count: float = 1000.0) -> Upload:
        return Upload(tensors={"w": torch.full((4,), step), COUNT: sent.parameters[COUNT] + count}, num_examples=5)

    honest_ones = {c: upload(0.1) for c in range(HONEST)}
    assert not sort_out({**honest_ones, EVIL: upload(0.1, 1e6)}, sent, "weights").excluded
    assert list(sort_out({**honest_ones, EVIL: upload(100.0)}, sent, "weights").excluded) == [EVIL]
    assert list(sort_out({**honest_ones, EVIL: upload(0.1, 1e100)}, sent, "weights").excluded) == [EVIL]


def test_buffers_keep_their_dtype() -> None:
    half = ModelState({"w": torch.zeros(2, dtype=torch.float16)}, {VARIANCE: torch.ones(2, dtype=torch.float16)})
    subject = replace(server(), state=half)

    subject.receive({c: Upload(tensors=half.parameters, buffers=half.buffers, num_examples=1) for c in range(3)})

    assert subject.state.buffers[VARIANCE].dtype == torch.float16


def test_what_a_client_says_is_short_and_moves_no_cursor() -> None:
    said = "\x1b]0;mine\x07\x1b[2J" + "A" * 10_000_000
    named = Upload(tensors={said: torch.ones(1)}, num_examples=1)
    excluded = sort_out({0: Failure(said), 1: named, 2: honest(2)}, state(), "delta").excluded
    assert set(excluded) == {0, 1}
    for reason in excluded.values():
        assert len(reason) <= 1000 and reason.isprintable() and "mine" in reason
    assert Failure("Größe übertrifft 3").reason == "Größe übertrifft 3"


def test_an_exception_becomes_one_line():
    def fail():
        raise OSError("first line\nsecond line")

    assert attempt(fail) == Failure("OSError: first line")


def test_an_interrupt_is_not_swallowed():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(interrupted)


def test_the_call_stays_in_the_callers_thread():
    """Else an interrupt would wait for its end, and gradients would be on again inside ``torch.no_grad``."""
    assert attempt(threading.get_ident) == threading.get_ident()


def test_what_a_client_raises_is_one_line_and_what_a_message_lacks_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise RuntimeError("the third image is bright")

    def refuses() -> None:
        raise UnfitMessageError("fc.weight is missing")

    with pytest.raises(UnansweredError, match=f"^{WITHHELD}$"):
        hide_reason(fails)
    assert "the third image" in caplog.text
    with pytest.raises(UnfitMessageError, match="is missing"):
        hide_reason(refuses)


def test_work_on_examples_takes_no_longer_for_tiny_numbers() -> None:
    """A processor takes a hundred times as long for numbers that have no whole mantissa."""
    tiny = torch.full((4,), 2e-38)
    assert (hide_reason(lambda: hide_reason(lambda: tiny * 0.1) + tiny * 0.1) == 0).all()
    assert (tiny * 0.1 > 0).all(), "the rest of the process is left alone"


@pytest.mark.parametrize(
    ("value", "said"), [(math.nan, "finite"), (math.inf, "finite"), (1.1e9, "norm"), (3e38, "norm"), (9e8, "")]
)
def test_models_on_which_training_overflows_are_refused(value: float, said: str) -> None:
    values = {"fc.weight": torch.tensor([[1.0, value]]), "bn.running_var": torch.full((3,), 1e12), "n": torch.tensor(7)}
    with pytest.raises(UnfitMessageError, match=said) if said else nullcontext():
        expect_sound(values)
