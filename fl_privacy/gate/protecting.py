"""Clip the change of the parameters and add noise on a grid, so that no floating-point number tells what it hides."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from fl_privacy import checks
from fl_privacy.gate.discrete_gaussian import SCALE, Integers, discrete_gaussian

LARGEST = float(np.finfo(np.float64).max)

_SHRINK = 1e-7
"""By which a change that is too long after rounding is made shorter, at least."""


@dataclass(frozen=True, kw_only=True)
class Noising:
    """Clipping and noise of a change.

    Attributes:
        clip_norm: largest l2 norm of the change of all arrays together, above 0.
        noise_multiplier: standard deviation of the noise of each value over ``clip_norm``, from 1/1000 to 1000.
    """

    clip_norm: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        checks.number("protect.clip_norm", self.clip_norm, above=0, at_most=1e12, example=1.0)
        checks.number("protect.noise.noise_multiplier", self.noise_multiplier, at_least=1e-3, at_most=1e3, example=1.1)

    @property
    def step(self) -> float:
        """Return the step of the grid: 2^-20 of the noise's standard deviation."""
        return self.clip_norm * self.noise_multiplier / SCALE

    @property
    def longest(self) -> int:
        """Return the largest squared norm of a clipped change, in steps: its norm is at most ``clip_norm``."""
        return int(Fraction(SCALE) ** 2 / Fraction(self.noise_multiplier) ** 2)

    @property
    def rho(self) -> float:
        """Return the zCDP rho of one reply whose change is there or not: 1 / (2 noise_multiplier^2)."""
        return 0.5 / self.noise_multiplier**2


def noised(
    received: Sequence[npt.NDArray[np.generic]],
    replied: Sequence[npt.NDArray[np.generic]],
    noising: Noising,
    *,
    draw: Callable[[int], Integers] = discrete_gaussian,
) -> list[npt.NDArray[np.generic]]:
    """Return ``received`` plus the clipped and noised change to ``replied``, in the types of ``received``.

    The change is measured in float64, brought to the norm, and rounded to whole steps whose sum of squares is checked
    in integers; noise is added in integers. What leaves depends on these integers and on what came in alone.

    Args:
        received: floating-point arrays as they came, of any shapes; finite.
        replied: of the same shapes; finite.
        noising: how.
        draw: so many values of noise; only tests have another one.
    """
    with np.errstate(over="ignore"):  # of float64
        change = flat(
            [np.asarray(b, np.float64) - np.asarray(a, np.float64) for a, b in zip(received, replied, strict=True)]
        )
    change = np.clip(change, -LARGEST, LARGEST)
    steps = clipped(change, noising)
    steps += draw(len(steps))
    moved = steps * noising.step
    made: list[npt.NDArray[np.generic]] = []
    start = 0
    for before in received:
        after = np.asarray(before, np.float64) + moved[start : start + before.size].reshape(before.shape)
        with np.errstate(over="ignore"):
            made.append(after.astype(before.dtype))
        start += before.size
    return made


def clipped(change: npt.NDArray[np.float64], noising: Noising) -> Integers:
    """Round ``change`` to whole steps of the grid, scaled to a norm of at most ``clip_norm``.

    Args:
        change: (n,), finite.
    """
    largest = float(np.abs(change).max(initial=0.0))
    norm = largest * math.sqrt(float(np.dot(change / largest, change / largest))) if largest > 0 else 0.0
    with np.errstate(over="ignore"):
        factor = min(1.0, noising.clip_norm / norm) if norm > 0 else 1.0
    while True:
        # largest * factor first: a change near the largest number would overflow in steps
        steps: Integers = np.rint(change * factor / noising.step).astype(np.int64)
        length = int(np.dot(steps, steps))
        if length <= noising.longest:
            return steps
        factor *= min(math.sqrt(noising.longest / length), 1 - _SHRINK)


def flat(arrays: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """Concatenate all values."""
    return np.concatenate([np.empty(0), *(array.ravel() for array in arrays)])
