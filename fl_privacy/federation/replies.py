"""Validate clients' replies, and exclude those that could end or poison a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from fl_privacy.errors import UserError, in_one_line, visible

if TYPE_CHECKING:  # an app's process loads PyTorch only if the app does
    from torch import Tensor

    from fl_privacy.types import ModelState, Tensors, Upload

T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)

FACTOR = 100.0
"""Replies are excluded if their norm is over this many times the largest median so far; honest ones stay below."""

ENOUGH = 3  # least number of replies for a meaningful median
MOST_EXAMPLES = 2**53  # largest whole number that is exact in double precision
MOST_STEPS = 2**40  # largest change of a counter in a round, so that it overflows only after millions of rounds
VARIANCE, COUNT = "running_var", "num_batches_tracked"  # names of batch norm's nonnegative buffers
MOST_LETTERS = 1000  # most characters of a reason, possibly from a client, which is logged and recorded in each round


@dataclass(frozen=True)
class Failure:
    """The reason why a client's reply does not count: one printable line of at most ``MOST_LETTERS``."""

    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason))


def printable(text: str) -> str:
    """Return the first ``MOST_LETTERS`` characters of ``text``, with spaces instead of unprintable ones."""
    return visible(text[:MOST_LETTERS])


def attempt(function: Callable[[], T], *, placed: bool = False) -> T | Failure:
    """Return the result of ``function``, or its error as a ``Failure``; the traceback is logged at debug level.

    With ``placed``, the reason names the file and line of the user's code. Interrupts pass through.
    """
    try:
        return function()
    except (Exception, SystemExit) as error:
        logger.debug("The call failed", exc_info=error)
        plain = f"{type(error).__name__}: {error}".splitlines()[0]
        return Failure(in_one_line(error) if placed and not isinstance(error, UserError) else plain)


WITHHELD = "The client can't answer this; its own log says why."
"""Only error that a server sees once a client works on its examples."""


class UnansweredError(UserError):
    """Error in place of a reply; the message is always ``WITHHELD``, so that it reveals nothing about the examples."""


class UnfitMessageError(UserError):
    """Refusal of a message for a reason that the server may see, since it does not depend on the client's examples."""


def hide_reason(work: Callable[[], T]) -> T:
    """Return the result of ``work``; every error but ``UnfitMessageError`` becomes the same ``UnansweredError``."""

    def expected() -> T | UnfitMessageError | UnansweredError:
        try:
            return work()
        except (UnfitMessageError, UnansweredError) as error:
            return error

    with _denormals_flushed():
        found = attempt(expected)
    if isinstance(found, UnfitMessageError | UnansweredError):
        raise found
    if isinstance(found, Failure):
        logger.error("A question is not answered: %s", found.reason)
        raise UnansweredError(WITHHELD)
    return found


@contextmanager
def _denormals_flushed() -> Iterator[None]:
    import torch  # noqa: PLC0415

    before = float(torch.tensor(2e-38) * 0.1) == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


LARGEST_MODEL = 1e9
"""Largest l2 norm of a model's floating-point values that a defended client accepts; trained ones are below 1e6."""


def expect_sound(values: Tensors) -> None:
    """Raise ``UnfitMessageError`` if values are not finite, or the norm of all but running variances is too large."""
    for name, value in values.items():
        if not value.isfinite().all():
            raise UnfitMessageError(
                f"The values of {name} are expected to be finite, but some are not; lower the learning rate."
            )
    floats = {n: t for n, t in values.items() if t.is_floating_point() and n.rpartition(".")[2] != VARIANCE}
    if (size := norm(floats)) > LARGEST_MODEL:
        raise UnfitMessageError(
            f"A model of a norm of at most {LARGEST_MODEL:g} is expected, but got {size:.3g}; lower the learning rate."
        )


@dataclass(frozen=True)
class Sorted:
    """A round's usable and excluded replies, with what the next round needs to exclude others."""

    usable: Mapping[int, Upload]  # by client, in ascending order
    weights: tuple[int, ...]  # number of examples as which each usable reply counts
    excluded: Mapping[int, str]  # reason by client
    usual: Mapping[str, float]  # largest median norm so far, for the next round, by kind of change


def sort_out(
    replies: Mapping[int, Upload | Failure],
    state: ModelState,
    shares: str,
    *,
    factor: float = FACTOR,
    usual: Mapping[str, float] | None = None,
) -> Sorted:
    """Separate usable replies from excluded ones.

    A reply is excluded if it is a ``Failure`` or :func:`fault` finds a reason. If three or more are left, a reply is
    also excluded if the norm of its change exceeds ``factor`` times the larger of two medians: this round's and
    ``usual``, the largest of earlier rounds. This is done by kind: parameters, floating-point buffers, counters. A
    client's number of examples is capped at ``factor`` times the lower median. ``shares``: see ``LocalPlan``.
    """
    largest = dict(usual or {})
    excluded: dict[int, str] = {}
    usable: dict[int, Upload] = {}
    for client, reply in sorted(replies.items()):
        if isinstance(reply, Failure):
            excluded[client] = reply.reason
        elif reason := fault(reply, state):
            excluded[client] = printable(reason)
        else:
            usable[client] = reply
    for kind, change in _changes(state, shares).items():
        norms = {client: norm(change(upload)) for client, upload in usable.items()}
        if len(norms) < ENOUGH:
            continue
        largest[kind] = max(_median(norms.values()), largest.get(kind, 0.0))
        for client, size in norms.items():
            if size > factor * largest[kind] > 0:
                excluded[client] = (
                    f"the norm of its {kind}, {size:.3g}, is over {factor:g} times the median {largest[kind]:.3g}"
                )
                del usable[client]
    most = factor * _median(upload.num_examples for upload in usable.values())
    return Sorted(usable, tuple(int(min(upload.num_examples, most)) for upload in usable.values()), excluded, largest)


def fault(upload: Upload, state: ModelState) -> str | None:
    """Return why ``upload`` is unusable as a reply to the model ``state``; ``None`` if it is usable."""
    number = upload.num_examples
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MOST_EXAMPLES:
        return f"expected at least 1 example and at most {MOST_EXAMPLES}, got {number}"
    if state.parameters and not upload.tensors:
        return "no parameter is in it"
    pairs = ((upload.tensors, state.parameters), (upload.buffers, state.buffers))
    reasons = (_tensor_fault(name, tensor, known) for held, known in pairs for name, tensor in held.items())
    return next(filter(None, reasons), None)


def norm(tensors: Tensors) -> float:
    """Compute the l2 norm of all tensors together, in double precision."""
    return math.sqrt(sum(float(t.double().norm()) ** 2 for t in tensors.values()))


def unrounded(buffers: Tensors) -> dict[str, Tensor]:
    """Replace negative variances and counters of batch norm, caused by rounding in a secure sum, by zero."""
    return {n: t.clamp_min(0) if n.rpartition(".")[2] in (VARIANCE, COUNT) else t for n, t in buffers.items()}


def _tensor_fault(name: str, tensor: Tensor, known: Tensors) -> str | None:
    if name not in known:
        return f"unknown tensor {name}"
    like = known[name]
    if tensor.dtype != like.dtype:
        kind, got = (str(t.dtype).removeprefix("torch.") for t in (like, tensor))
        return f"{name}: expected {kind} as sent, got {got}"
    if tensor.shape != like.shape:
        return f"{name}: expected shape {tuple(like.shape)}, got {tuple(tensor.shape)}"
    return _value_fault(name, tensor, like)


def _value_fault(name: str, tensor: Tensor, sent: Tensor) -> str | None:
    import torch  # noqa: PLC0415

    if tensor.is_floating_point() and tensor.numel():
        widest = torch.promote_types(tensor.dtype, torch.float32)
        if not float(torch.linalg.vector_norm(tensor.double())) <= math.sqrt(torch.finfo(widest).max):
            if not torch.isfinite(tensor).all():
                return f"{name}: not finite"
            return f"{name}: values up to {float(tensor.abs().max()):.3g} do not stay finite when squared"
    elif not torch.isfinite(tensor).all():
        return f"{name}: not finite"
    if name.rpartition(".")[2] in (VARIANCE, COUNT) and (tensor < 0).any():
        return f"{name}: expected at least 0, got {tensor.min().item():.3g}"
    if _counts(name, tensor) and ((tensor.double() - sent.double()).abs() > MOST_STEPS).any():
        return f"{name}: expected to change by at most {MOST_STEPS}, got {tensor.double().abs().max():.3g}"
    return None


def _counts(name: str, tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or name.rpartition(".")[2] == COUNT  # some strategies give fractions


def _changes(state: ModelState, shares: str) -> dict[str, Callable[[Upload], Tensors]]:
    def from_sent(held: Tensors, sent: Tensors, counters: bool) -> Tensors:
        return {n: t.double() - sent[n].double() for n, t in held.items() if _counts(n, t) == counters}

    def update(upload: Upload) -> Tensors:
        return from_sent(upload.tensors, state.parameters, False) if shares == "weights" else upload.tensors

    return {
        "update": update,
        "buffers": lambda upload: from_sent(upload.buffers, state.buffers, False),
        "counters": lambda upload: from_sent(upload.buffers, state.buffers, True),
    }


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return float(ordered[(len(ordered) - 1) // 2]) if ordered else 0.0
