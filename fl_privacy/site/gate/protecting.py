"""Clipping and noise of a change of parameters, in integers, so that floating-point rounding reveals nothing."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from fl_privacy import checks
from fl_privacy.site.gate.discrete_gaussian import SCALE, Integers, discrete_gaussian

Piece = tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]  # values before and after the change, (n,) each

LARGEST = float(np.finfo(np.float64).max)

_SHRINK = 1e-7  # least relative step by which a change that is too long after rounding is shortened
_BLOCK = 1 << 15  # number of values processed at once, which fit into a processor's cache


@dataclass(frozen=True, kw_only=True)
class Noising:
    """How a site clips, and adds noise to, the model's change in a client's reply."""

    clip_norm: float  # largest l2 norm of the change of all arrays together, above 0
    noise_multiplier: float  # noise's standard deviation on each value, divided by ``clip_norm``; from 1/1000 to 1000

    def __post_init__(self) -> None:
        checks.number("protect.clip_norm", self.clip_norm, above=0, at_most=1e12, example=1.0)
        checks.number("protect.noise.noise_multiplier", self.noise_multiplier, at_least=1e-3, at_most=1e3, example=1.1)

    @property
    def step(self) -> float:
        return self.clip_norm * self.noise_multiplier / SCALE

    @property
    def longest(self) -> int:
        """Return the largest squared norm of a clipped change, in units of ``step`` squared."""
        return int(Fraction(SCALE) ** 2 / Fraction(self.noise_multiplier) ** 2)

    @property
    def rho(self) -> float:
        """Return the privacy cost (zCDP rho) of one noised change: 1 / (2 noise_multiplier^2)."""
        return 0.5 / self.noise_multiplier**2


def noised(
    received: Sequence[npt.NDArray[np.generic]],
    replied: Sequence[npt.NDArray[np.generic]],
    noising: Noising,
    *,
    draw: Callable[[int], Integers] = discrete_gaussian,
) -> list[npt.NDArray[np.generic]]:
    """Return ``received`` plus the clipped and noised change to ``replied``, in the types of ``received``.

    ``noising``: settings; change and noise are rounded to multiples of its ``step`` and added as integers, so that the
    result depends only on their sum and ``received``. Arrays are finite. ``draw``: function from a number N to N
    integers.
    """
    flat = [(before.reshape(-1), after.reshape(-1)) for before, after in zip(received, replied, strict=True)]
    pieces = [piece for pair in flat for piece in zip(*map(_cut, pair), strict=True)]
    steps = clipped(pieces, noising)
    steps += draw(len(steps))
    made = [np.empty(before.shape, before.dtype) for before in received]
    into = [piece for array in made for piece in _cut(array.reshape(-1))]
    start = 0
    for (before, _), after in zip(pieces, into, strict=True):
        moved = steps[start : start + len(before)] * noising.step
        with np.errstate(over="ignore"):
            after[:] = (moved + before.astype(np.float64)).astype(before.dtype)
        start += len(before)
    return made


def clipped(pieces: Sequence[Piece], noising: Noising) -> Integers:
    """Return the differences of ``pieces`` (before, after) in one vector, clipped, in multiples of ``noising.step``."""
    largest = max((float(np.abs(_change(*piece)).max(initial=0.0)) for piece in pieces), default=0.0)
    norm = 0.0
    if largest > 0:
        norm = largest * math.sqrt(sum(float(np.square(_change(*piece) / largest).sum()) for piece in pieces))
    with np.errstate(over="ignore"):
        factor = min(1.0, noising.clip_norm / norm) if norm > 0 else 1.0
    steps: Integers = np.empty(sum(len(before) for before, _ in pieces), np.int64)
    while True:
        start = length = 0
        for piece in pieces:
            # largest * factor first: a change near the largest number would overflow in steps
            moved = np.rint(_change(*piece) * factor / noising.step)
            within = steps[start : start + len(moved)]
            within[:] = moved
            length += int(np.dot(within, within))
            start += len(moved)
        if length <= noising.longest:
            return steps
        factor *= min(math.sqrt(noising.longest / length), 1 - _SHRINK)


def _change(before: npt.NDArray[np.generic], after: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    with np.errstate(over="ignore"):
        change = after.astype(np.float64) - before.astype(np.float64)
    return np.clip(change, -LARGEST, LARGEST, out=change)


def _cut(values: npt.NDArray[np.generic]) -> list[npt.NDArray[np.generic]]:
    return [values[start : start + _BLOCK] for start in range(0, len(values), _BLOCK)]
