"""Epsilon of the subsampled Gaussian mechanism, by Opacus' accountants."""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from fl_privacy import checks
from fl_privacy.errors import UserError
from fl_privacy.extras import lacks

Accountant = Literal["rdp", "prv"]

MILESTONES = 16
"""A course of epsilon asks the PRV accountant, which takes tenths of a second each time, for so many values."""


def epsilon(
    *, noise_multiplier: float, sample_rate: float, steps: int, delta: float, accountant: Accountant = "rdp"
) -> float:
    """Epsilon at ``delta`` after ``steps`` releases of the subsampled Gaussian mechanism; infinite without noise.

    Args:
        noise_multiplier: standard deviation of the noise over the l2 sensitivity, at least 0.
        sample_rate: probability that a step uses a given record (Poisson sampling), in (0, 1].
        steps: number of releases, at least 0.
        delta: in (0, 1), below one over the number of records.
        accountant: ``rdp`` (Renyi, an upper bound) or ``prv`` (tight to 0.01, Gopi et al. 2021, upper estimate).

    >>> round(epsilon(noise_multiplier=1.0, sample_rate=0.01, steps=1000, delta=1e-5), 2)
    2.1
    """
    checks.number("noise_multiplier", noise_multiplier, at_least=0, example=1.0)
    checks.number("sample_rate", sample_rate, above=0, at_most=1, example=0.1)
    checks.number("steps", steps, at_least=0, example=100)
    checks.number("delta", delta, above=0, below=1, example=1e-5)
    checks.one_of("accountant", accountant, ("rdp", "prv"))
    if steps == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    with _opacus():
        from opacus.accountants import create_accountant  # noqa: PLC0415

        opacus_accountant: Any = create_accountant(mechanism=accountant)
        opacus_accountant.history = [(noise_multiplier, sample_rate, steps)]
        return float(opacus_accountant.get_epsilon(delta))


def epsilons(
    *, noise_multiplier: float, sample_rate: float, steps: Sequence[int], delta: float, accountant: Accountant = "rdp"
) -> list[float]:
    """``epsilon`` after each of the ascending numbers ``steps``, for much less than asking for each of them.

    Renyi divergences add up, so that ``rdp`` computes them once. Of ``prv`` only some values are computed; in between
    stands the next larger one, an upper bound.
    """
    settings: dict[str, Any] = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate, "delta": delta}
    if not steps:
        return []
    first, last = (epsilon(**settings, steps=number, accountant=accountant) for number in (steps[0], steps[-1]))
    if len(steps) < 3 or math.isinf(last):
        return [first, *(last for _ in steps[1:])]
    if accountant == "prv":
        asked = sorted({round(k) for k in np.geomspace(1, len(steps), MILESTONES)})
        known = {k: epsilon(**settings, steps=steps[k - 1], accountant="prv") for k in asked[1:-1]}
        known |= {1: first, len(steps): last}
        return [known[next(k for k in asked if k > index)] for index in range(len(steps))]
    with _opacus():
        from opacus.accountants import RDPAccountant  # noqa: PLC0415
        from opacus.accountants.analysis import rdp  # noqa: PLC0415

        orders = RDPAccountant.DEFAULT_ALPHAS
        one = rdp.compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=orders)
        return [float(rdp.get_privacy_spent(orders=orders, rdp=one * n, delta=delta)[0]) if n else 0.0 for n in steps]


def noise_multiplier_for(
    *, epsilon: float, sample_rate: float, steps: int, delta: float, accountant: Accountant = "rdp"
) -> float:
    """The least noise multiplier, up to a thousandth of ``epsilon``, that spends at most ``epsilon`` in ``steps``.

    Args:
        epsilon: the budget, above 0.
        sample_rate: as in ``fl_privacy.defenses.privacy.accountants.epsilon``.
        steps: number of releases, at least 1.
        delta: in (0, 1).
        accountant: ``rdp`` or ``prv`` (to 0.02).

    Raises:
        UserError: no noise is enough.
    """
    checks.number("epsilon", epsilon, above=0, example=8.0)
    checks.number("sample_rate", sample_rate, above=0, at_most=1, example=0.1)
    checks.number("steps", steps, at_least=1, example=100)
    checks.number("delta", delta, above=0, below=1, example=1e-5)
    checks.one_of("accountant", accountant, ("rdp", "prv"))
    with _opacus():
        from opacus.accountants.utils import get_noise_multiplier  # noqa: PLC0415

        try:
            return float(
                get_noise_multiplier(
                    target_epsilon=epsilon,
                    target_delta=delta,
                    sample_rate=sample_rate,
                    steps=steps,
                    accountant=accountant,
                    epsilon_tolerance=epsilon / 1000 if accountant == "rdp" else max(0.02, epsilon / 1000),
                )
            )
        except ValueError as error:
            raise UserError(
                f"epsilon is expected to be within reach, but no noise brings {steps} releases down to {epsilon:g};"
                " raise epsilon or take fewer rounds."
            ) from error


def mixture_epsilon(*, noise_multiplier: float, share: float, steps: int, delta: float) -> float:
    """Epsilon at ``delta`` after ``steps`` Gaussian releases, each of which depends on a given record at random.

    What the other releases look like does not matter, other than in ``epsilon``. With probability ``share`` a release
    of sensitivity 1 depends on the record; as exp((a - 1) D_a) is jointly convex, its Renyi divergence of order a is at
    most log(1 - q + q exp((a - 1) a / (2 s^2))) / (a - 1).

    Args:
        noise_multiplier: s, above 0.
        share: q, in (0, 1].
        steps: at least 1.
        delta: in (0, 1).
    """
    checks.number("noise_multiplier", noise_multiplier, above=0, example=1.0)
    checks.number("share", share, above=0, at_most=1, example=0.1)
    checks.number("steps", steps, at_least=1, example=100)
    checks.number("delta", delta, above=0, below=1, example=1e-5)
    with _opacus():
        from opacus.accountants import RDPAccountant  # noqa: PLC0415
        from opacus.accountants.analysis import rdp  # noqa: PLC0415

        orders = np.array([a for a in RDPAccountant.DEFAULT_ALPHAS if a > 1])
        exponents = (orders - 1) * orders / (2 * noise_multiplier**2)
        divergences = np.logaddexp(np.log1p(-share) if share < 1 else -np.inf, np.log(share) + exponents) / (orders - 1)
        return float(rdp.get_privacy_spent(orders=orders, rdp=steps * divergences, delta=delta)[0])


def mixture_noise_multiplier(*, epsilon: float, share: float, steps: int, delta: float) -> float:
    """The least noise multiplier, up to a thousandth, by which ``mixture_epsilon`` is at most ``epsilon``.

    Raises:
        UserError: no noise is enough.
    """
    checks.number("epsilon", epsilon, above=0, example=8.0)
    low, high = 1e-2, 1e6
    settings: dict[str, Any] = {"share": share, "steps": steps, "delta": delta}
    if mixture_epsilon(noise_multiplier=high, **settings) > epsilon:
        raise UserError(
            f"epsilon is expected to be within reach, but no noise brings {steps} releases down to {epsilon:g};"
            " raise epsilon or take fewer iterations."
        )
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        enough = mixture_epsilon(noise_multiplier=middle, **settings) <= epsilon
        low, high = (low, middle) if enough else (middle, high)
    return high


@contextmanager
def _opacus() -> Iterator[None]:
    """Around its use: its absence is one line, and it warns of nothing that concerns an upper bound."""
    try:
        with np.errstate(divide="ignore"), warnings.catch_warnings():  # PRV takes log(1 - sample_rate)
            warnings.filterwarnings("ignore", message="Optimal order is")
            yield
    except ImportError as error:
        raise lacks("opacus", "Epsilon") from error
