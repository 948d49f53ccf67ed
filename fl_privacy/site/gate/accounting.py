"""Epsilon of a site's releases, from zero-concentrated differential privacy, which adds up."""

import math

from fl_privacy import checks


def epsilon_of(rho: float, delta: float) -> float:
    """Return the epsilon at ``delta`` of releases that are together ``rho``-zCDP.

    Their Renyi divergences are at most rho a for every order a > 1 (Bun, Steinke 2016); by Proposition 12 of Canonne,
    Kamath, Steinke 2020, epsilon = rho a + log((a - 1) / a) - (log(delta) + log(a)) / (a - 1), minimal over a. This is
    the RDP accountant for Gaussian noise without sampling.

    Args:
        rho: zCDP parameter, at least 0; infinite without noise.
        delta: failure probability in (0, 1).
    """
    checks.number("rho", rho, at_least=0, infinite=True, example=0.1)
    checks.number("delta", delta, above=0, below=1, example=1e-5)
    if rho == 0:
        return 0.0
    if math.isinf(rho):
        return math.inf
    import numpy as np  # noqa: PLC0415  (policies are read without it)

    center = 1 + math.sqrt(math.log(1 / delta) / rho)
    orders = 1 + (center - 1) * np.geomspace(1e-3, 1e3, 20_001)
    values = rho * orders + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return max(0.0, float(values.min()))


def most_rho(epsilon: float, delta: float) -> float:
    """Return the largest rho, to a millionth, whose epsilon at ``delta`` is at most ``epsilon``."""
    checks.number("budget.epsilon", epsilon, above=0, example=8)
    low, high = 0.0, epsilon + 1.0
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon_of(middle, delta) <= epsilon else (low, middle)
    return low


FACTORS = {"client": 1.0, "any_data": 4.0}
"""Factor on rho by the unit of protection.

``client``: the site's change is there or zero, sensitivity C. ``any_data``: any two data sets of the site,
whose changes are up to 2 C apart.
"""
