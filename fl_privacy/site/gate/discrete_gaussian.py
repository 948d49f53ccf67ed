"""Exact integer samples of the discrete Gaussian, from the operating system's randomness.

P(y) is proportional to exp(-y^2 / (2 s^2)) over the integers (Canonne, Kamath, Steinke 2020, "The Discrete Gaussian for
Differential Privacy", Definition 1). On integers of l2 sensitivity D, a release is D^2 / (2 s^2)-zCDP (Theorem 14).

Samples are proposed and rejected as in Karney 2016 ("Sampling Exactly from the Normal Distribution", Algorithm D, with
s a power of two): +-(k s + j), except "-0", with P(k) proportional to exp(-k^2 / 2) and j uniform in 0..s-1, is
accepted with probability exp(-j (2 k s + j) / (2 s^2)). The sampling time reveals nothing of the noise (Jin et al.
2022).
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal, localcontext
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Bytes = Callable[[int], bytes]  # function from a number to that many random bytes
LOG2_SCALE = 20  # base-2 logarithm of the standard deviation, in steps of the grid

SCALE = 1 << LOG2_SCALE

_DIGITS = 100  # decimal digits of an exponential, more than the bits of ``_PRECISION``
_PRECISION = 256  # bits of a probability in comparisons that floating point can't decide
_WHOLE_BITS = 16  # random bits of the first comparison for k
_MARGIN = 2.0**-47  # bound on the error of a probability in double precision
_LARGEST_K = 19  # smallest k with exp(-k^2/2) below 2^-260
_BLOCK = 1 << 15  # number of values drawn at once, which fit into a processor's cache
_SHARE = 1 << 20  # number of values in one task of a thread


def discrete_gaussian(number: int, *, random: Bytes = os.urandom) -> Integers:
    """Draw integers (number,) int64 of the discrete Gaussian with standard deviation ``SCALE``."""
    found = np.empty(number, dtype=np.int64)
    shares = [found[start : start + _SHARE] for start in range(0, number, _SHARE)]
    if len(shares) > 1:
        with ThreadPoolExecutor(min(len(shares), os.cpu_count() or 1)) as pool:
            list(pool.map(lambda share: _fill(share, random), shares))
    else:
        _fill(found, random)
    return found


def _fill(found: Integers, random: Bytes) -> None:
    filled = 0
    while filled < len(found):
        wanted = len(found) - filled
        drawn = _draw(min(_BLOCK, int(wanted * 1.45) + 64), random)[:wanted]
        found[filled : filled + len(drawn)] = drawn
        filled += len(drawn)


def _draw(trials: int, random: Bytes) -> Integers:
    words = np.frombuffer(random(8 * trials), dtype=np.uint64)
    k = _whole_parts((words >> np.uint64(64 - _WHOLE_BITS)).astype(np.uint16), random)
    j = (words & np.uint64(SCALE - 1)).astype(np.int64)
    signs = -((words >> np.uint64(LOG2_SCALE)) & np.uint64(1)).astype(np.int64)  # 0, or -1 where negative
    bits = 64 - _WHOLE_BITS - LOG2_SCALE - 1
    uniform = (words >> np.uint64(LOG2_SCALE + 1)) & np.uint64((1 << bits) - 1)
    values: Integers = k << LOG2_SCALE
    kept = _happens(uniform, bits, j * (2 * values + j), random)  # exponents over 2 s^2; below 2^47
    values += j
    kept &= (values != 0) | (signs == 0)
    signs = signs[kept]
    return (values[kept] ^ signs) - signs


def _whole_parts(words: npt.NDArray[np.uint16], random: Bytes) -> Integers:
    bounds = _cumulative()[:-1]
    high = [bound >> (_PRECISION - _WHOLE_BITS) for bound in bounds]
    found, open_yet = np.zeros(len(words), np.uint8), np.zeros(len(words), np.bool_)
    for first in sorted(set(high)):
        found += words > first
        open_yet |= words == first
    for place in np.flatnonzero(open_yet):  # one in 13,000: the next bits decide
        drawn = int(words[place]) << (_PRECISION - _WHOLE_BITS) | _more_bits(_PRECISION - _WHOLE_BITS, random)
        found[place] = sum(bound <= drawn for bound in bounds)
    return found.astype(np.int64)


def _more_bits(number: int, random: Bytes) -> int:
    return int.from_bytes(random(-(-number // 8)), "little") & ((1 << number) - 1)


@lru_cache(maxsize=1)
def _cumulative() -> tuple[int, ...]:
    """Return 2^256 times P(k <= 0), P(k <= 1), ... for k in a proposed sample k s + j; the last entry is 2^256."""
    sums = list(accumulate(exp_of_minus(k * k, 2) for k in range(_LARGEST_K)))
    return tuple((one << _PRECISION) // sums[-1] for one in sums)


def _happens(uniform: npt.NDArray[np.uint64], bits: int, exponents: Integers, random: Bytes) -> npt.NDArray[np.bool_]:
    """Return booleans that are true with probability exp(-exponent / (2 SCALE^2)) for each of ``exponents``.

    ``uniform``: a random number of ``bits`` bits for each; more bits are drawn if necessary.
    """
    half = 2.0 ** -(bits + 1)
    away = np.exp(exponents * (-0.5 / SCALE**2))
    away -= uniform * (2 * half) + half  # from the middle of the uniform number's interval
    happens: npt.NDArray[np.bool_] = away > 0
    for place in np.flatnonzero(np.abs(away) <= half + _MARGIN):  # one in 2^27 with the scale above
        drawn = int(uniform[place]) << (_PRECISION - bits) | _more_bits(_PRECISION - bits, random)
        happens[place] = drawn < exp_of_minus(int(exponents[place]), 2 * SCALE**2)
    return happens


def exp_of_minus(numerator: int, denominator: int) -> int:
    """Return 2^256 exp(-numerator / denominator), rounded; numerator >= 0, denominator > 0."""
    with localcontext(prec=_DIGITS):
        return int(((Decimal(-numerator) / denominator).exp() * (1 << _PRECISION)).to_integral_value())
