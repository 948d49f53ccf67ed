"""Draw the discrete Gaussian exactly, in integers, from the operating system's randomness.

The distribution is that of Canonne, Kamath, Steinke 2020 ("The Discrete Gaussian for Differential Privacy",
Definition 1): P(y) is proportional to exp(-y^2 / (2 s^2)) over the integers y. Where integers of l2 sensitivity D get
such noise in each coordinate, the release is D^2 / (2 s^2)-zCDP (their Theorem 14), as with continuous noise.

It is drawn by rejection as in Karney 2016 ("Sampling Exactly from the Normal Distribution", Algorithm D, with s a power
of two): k >= 0 with probability proportional to exp(-k^2 / 2), a sign, j uniform in 0..s-1; y = +-(k s + j) is kept
with probability exp(-j (2 k s + j) / (2 s^2)), and "-0" is not. Each comparison of a uniform number with a probability
takes as many random bits as it needs: floating point decides only where its error can't change the answer, integers of
``_PRECISION`` bits decide the rest. How often a draw is rejected does not depend on what is kept, so that the time that
sampling takes says nothing of the noise (Jin et al. 2022).
"""

import os
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Bytes = Callable[[int], bytes]
"""So many random bytes."""

LOG2_SCALE = 20
"""The standard deviation is 2^20 steps of the grid: rounding to it costs nothing that could be measured."""

SCALE = 1 << LOG2_SCALE

_PRECISION = 256
"""Bits to which a probability is known where floating point can't decide."""

_BITS = 53
"""Random bits that are compared in floating point."""

_MARGIN = 2.0**-47
"""Above the error of a probability in double precision and of the bits that are not looked at yet."""

_LARGEST_K = 19
"""From which on exp(-k^2/2) is below 2^-260."""

_BLOCK = 1 << 18
"""Values that are drawn at once, as fit a processor's cache."""


def discrete_gaussian(number: int, *, random: Bytes = os.urandom) -> Integers:
    """Draw ``number`` independent integers with standard deviation ``SCALE`` (to 2^-200).

    Args:
        number: of values, at least 0.
        random: source of bytes; only tests have another one than the operating system's.

    Returns:
        (number,) of int64.
    """
    found = np.empty(number, dtype=np.int64)
    filled = 0
    while filled < number:
        wanted = number - filled
        drawn = _draw(min(_BLOCK, int(wanted * 1.45) + 64), random)[:wanted]
        found[filled : filled + len(drawn)] = drawn
        filled += len(drawn)
    return found


def _draw(trials: int, random: Bytes) -> Integers:
    """Draw ``trials`` proposals and keep the accepted ones, 71 % on average."""
    words = np.frombuffer(random(24 * trials), dtype=np.uint64).reshape(3, trials)
    k = _whole_parts(words[0], random)
    j = (words[1] & np.uint64(SCALE - 1)).astype(np.int64)
    negative = (words[1] >> np.uint64(LOG2_SCALE)) & np.uint64(1) == 1
    exponents = j * (2 * SCALE * k + j)  # over 2 s^2; below 2^47
    kept = _happens(words[2], exponents, random)
    kept &= ~(negative & (k == 0) & (j == 0))
    values: Integers = k * SCALE + j
    return np.where(negative, -values, values)[kept]


def _whole_parts(words: npt.NDArray[np.uint64], random: Bytes) -> Integers:
    """Draw k >= 0 with probability proportional to exp(-k^2 / 2), by inversion.

    It takes as many bits as the comparison needs.
    """
    bounds = _cumulative()
    high = np.array([bound >> (_PRECISION - 64) for bound in bounds[:-1]], dtype=np.uint64)
    found = np.searchsorted(high, words, side="right").astype(np.int64)
    for place in np.flatnonzero(np.isin(words, high)):  # one in 2^59: the next bits decide
        drawn = int(words[place]) << (_PRECISION - 64) | int.from_bytes(random(_PRECISION // 8 - 8), "little")
        found[place] = sum(bound <= drawn for bound in bounds[:-1])
    return found


@lru_cache(maxsize=1)
def _cumulative() -> tuple[int, ...]:
    """Compute 2^256 P(K <= k) for k = 0, 1, ...; the last is 2^256."""
    weights = [exp_of_minus(k * k, 2) for k in range(_LARGEST_K)]
    total, sums = sum(weights), [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    return tuple((one << _PRECISION) // total for one in sums[1:])


def _happens(words: npt.NDArray[np.uint64], exponents: Integers, random: Bytes) -> npt.NDArray[np.bool_]:
    """Draw booleans that are true with probability exp(-exponent / (2 s^2)) each."""
    uniform = (words >> np.uint64(64 - _BITS)).astype(np.float64) * 2.0**-_BITS
    chances = np.exp(exponents * (-0.5 / SCALE**2))
    happens: npt.NDArray[np.bool_] = uniform < chances
    for place in np.flatnonzero(np.abs(uniform - chances) <= _MARGIN):  # one in 2^46
        drawn = int(words[place]) << (_PRECISION - 64) | int.from_bytes(random(_PRECISION // 8 - 8), "little")
        happens[place] = drawn < exp_of_minus(int(exponents[place]), 2 * SCALE**2)
    return happens


def exp_of_minus(numerator: int, denominator: int) -> int:
    """Compute 2^256 exp(-numerator / denominator), rounded, at most 2^256, in integers only.

    Args:
        numerator: at least 0.
        denominator: above 0.
    """
    halvings = max(0, (numerator // denominator).bit_length() + 8)
    bits = _PRECISION + 64 + 2 * halvings
    x = (numerator << bits) // (denominator << halvings)  # below 2^-7
    term = total = 1 << bits
    index = 0
    while term:
        index += 1
        term = -(term * x >> bits) // index if term > 0 else (-term * x >> bits) // index
        total += term
    for _ in range(halvings):
        total = total * total >> bits
    return (total + (1 << (bits - _PRECISION - 1))) >> (bits - _PRECISION)
