"""Differential privacy of defenses, computed by Opacus' accountants."""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fl_privacy import checks
from fl_privacy.checks.packages import lacks
from fl_privacy.defenses.defense import Defense
from fl_privacy.effects import (
    ClippedExamples,
    Effect,
    Gaussian,
    Heuristic,
    Noise,
    NoisedLayers,
    Part,
    PerExample,
    PostProcessing,
    PrivateRelease,
    SparseVector,
)
from fl_privacy.errors import UserError

Accountant = Literal["rdp", "prv"]
MILESTONES = 16  # number of values of an epsilon curve that the slow PRV accountant computes


def epsilon(
    *, noise_multiplier: float, sample_rate: float, steps: int, delta: float, accountant: Accountant = "rdp"
) -> float:
    """Return epsilon after ``steps`` releases of the subsampled Gaussian mechanism; infinite without noise.

    Args:
        noise_multiplier: standard deviation of the noise divided by the l2 sensitivity, at least 0.
        sample_rate: probability that a step uses a given example (Poisson sampling), in (0, 1].
        steps: number of releases, at least 0.
        delta: probability in (0, 1), below one over the number of examples.
        accountant: ``rdp`` (an upper bound by Renyi divergence) or ``prv`` (tight to 0.01, Gopi et al. 2021).

    >>> round(epsilon(noise_multiplier=1.0, sample_rate=0.01, steps=1000, delta=1e-5), 2)
    2.1
    """
    checks.number("noise_multiplier", noise_multiplier, at_least=0, example=1.0)
    _expect(sample_rate=sample_rate, steps=steps, least=0, delta=delta, accountant=accountant)
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
    """Return :func:`epsilon` after each of the ascending ``steps``, faster than by separate calls.

    ``prv``, which is slow, is computed for some steps; each other step gets the epsilon of the next computed one.
    """
    settings: dict[str, Any] = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate, "delta": delta}
    if not steps:
        return []
    first = epsilon(**settings, steps=steps[0], accountant=accountant)
    if len(steps) == 1:
        return [first]
    last = epsilon(**settings, steps=steps[-1], accountant=accountant)
    if len(steps) == 2 or math.isinf(last):
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
    """Return the least noise multiplier that spends at most ``epsilon``; ``UserError`` if no noise is enough.

    It spends at least 99.9 % of ``epsilon`` or, with ``prv``, epsilon - 0.02. For the arguments see :func:`epsilon`.
    """
    checks.number("epsilon", epsilon, above=0, example=8.0)
    _expect(sample_rate=sample_rate, steps=steps, delta=delta, accountant=accountant)
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
    """Return epsilon after ``steps`` Gaussian releases, each of which uses a given example at random.

    Args:
        noise_multiplier: noise multiplier s of a release with sensitivity 1, above 0.
        share: probability q that a release depends on the example, in (0, 1].
        steps: number of releases, at least 1.
        delta: probability in (0, 1).
    """
    checks.number("noise_multiplier", noise_multiplier, above=0, example=1.0)
    checks.number("share", share, above=0, at_most=1, example=0.1)
    checks.number("steps", steps, at_least=1, example=100)
    checks.number("delta", delta, above=0, below=1, example=1e-5)
    with _opacus():
        from opacus.accountants import RDPAccountant  # noqa: PLC0415
        from opacus.accountants.analysis import rdp  # noqa: PLC0415

        orders = np.array([a for a in RDPAccountant.DEFAULT_ALPHAS if a > 1])
        # since exp((a - 1) D_a) is jointly convex, the Renyi divergence D_a of order a is at most
        # log(1 - q + q exp((a - 1) a / (2 s^2))) / (a - 1)
        exponents = (orders - 1) * orders / (2 * noise_multiplier**2)
        divergences = np.logaddexp(np.log1p(-share) if share < 1 else -np.inf, np.log(share) + exponents) / (orders - 1)
        return float(rdp.get_privacy_spent(orders=orders, rdp=steps * divergences, delta=delta)[0])


def mixture_noise_multiplier(*, epsilon: float, share: float, steps: int, delta: float) -> float:
    """Return the least noise multiplier with which :func:`mixture_epsilon` is ``epsilon``, or raise ``UserError``.

    ``share``: probability that a release depends on a given example; ``steps``: number of releases.
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


def svt_epsilon(elements: int, *, fraction: float = 0.1, epsilon: float = 0.1, noise_var: float = 0.1) -> float:
    """Return the epsilon (delta 0) of one upload by the filter ``svt`` (sparse vector technique, NVFlare).

    It protects any change of the update, and is the sum over the threshold, accepted queries (Lyu, Su and Li 2017,
    theorem 4) and uploaded values. The filter may accept all ``elements``; NVFlare's accountant counts only uploaded
    ones.

    Args:
        elements: number of elements n of the update, of which ceil(fraction n) are uploaded.
        fraction, epsilon, noise_var: arguments of ``svt``.

    >>> round(svt_epsilon(7_000_000))
    70001
    """
    shared = min(math.ceil(elements * fraction), elements)
    threshold, query = svt_split(epsilon, shared)
    return threshold + query * elements / shared + shared * noise_var


def svt_split(epsilon: float, shared: int) -> tuple[float, float]:
    """Split ``epsilon`` between threshold and queries of the sparse vector technique; ``shared``: uploaded elements."""
    threshold = epsilon / (1 + (2 * shared) ** (2 / 3))
    return threshold, epsilon - threshold


def _expect(*, sample_rate: float, delta: float, accountant: str, steps: int = 1, least: int = 1) -> None:
    checks.number("sample_rate", sample_rate, above=0, at_most=1, example=0.1)
    checks.number("steps", steps, at_least=least, example=100)
    checks.number("delta", delta, above=0, below=1, example=1e-5)
    checks.one_of("accountant", accountant, ("rdp", "prv"))


@contextmanager
def _opacus() -> Iterator[None]:
    try:
        with np.errstate(divide="ignore"), warnings.catch_warnings():  # PRV takes log(1 - sample_rate)
            warnings.filterwarnings("ignore", message="Optimal order is")
            yield
    except ImportError as error:
        raise lacks("opacus", "Epsilon") from error


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """Differential privacy of one client against a server that sees all its uploads."""

    unit: Literal["example", "client"]  # protects one example added or removed, or the client's whole update
    noise_multiplier: float  # standard deviation of the noise over the sensitivity
    sample_rate: float  # sampling rate of examples; 1 for ``client``, since the server sees which clients take part
    steps_per_round: int  # noised releases in a round
    delta: float
    accountant: Accountant
    missing: str | None = None  # reason for which there is no guarantee, or ``None``
    once: float | None = None  # epsilon of one release that covers all rounds; ``None`` if each round spends

    def epsilon(self, rounds: int) -> float:
        return self.course([rounds])[0]

    def course(self, rounds: Sequence[int]) -> list[float]:
        if self.missing is not None:
            return [math.inf] * len(rounds)
        if self.once is not None:
            return [self.once] * len(rounds)
        return epsilons(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            steps=[number * self.steps_per_round for number in rounds],
            delta=self.delta,
            accountant=self.accountant,
        )

    def describe(self, rounds: int) -> str:
        if self.missing is not None:
            return f"No differential privacy guarantee: {self.missing}."
        if self.once is not None:
            return (
                f"({self.once:.4g}, {self.delta:.3g})-differential privacy of one {self.unit} against whoever sees what"
                " the client trains on or uploads, however often: all of it is made of one noised release. The number"
                " of the client's examples counts as public."
            )
        sampling = (
            f", if each step samples its examples independently with probability {self.sample_rate:.4g}"
            if self.unit == "example"
            else ""
        )
        return (
            f"({self.epsilon(rounds):.4g}, {self.delta:.3g})-differential privacy of one {self.unit} against the server"
            f" after {rounds} rounds of taking part ({self.accountant.upper()} accountant{sampling}). It covers the"
            " updates; the number of the client's examples counts as public."
        )


def guarantee(
    defense: Defense,
    *,
    sample_rate: float,
    delta: float,
    steps_per_round: int = 1,
    accountant: Accountant = "rdp",
    num_tensors: int = 1,
    buffers_shared: bool = False,
) -> Guarantee:
    """Return the differential privacy guarantee of ``defense``, which may include post-processing.

    Args:
        defense: defense that clips examples (unit ``example``) or noises clipped updates (unit ``client``).
        sample_rate: local batch size over the client's number of examples, in (0, 1].
        delta: probability in (0, 1).
        steps_per_round: number of local steps; noise on the upload is drawn once for all.
        num_tensors: number of the model's tensors; clipping each to C gives sensitivity C sqrt(num_tensors).
        buffers_shared: ``True`` if batch-norm statistics are uploaded without noise.
    """
    _expect(sample_rate=sample_rate, delta=delta, accountant=accountant)
    if isinstance(release := defense.parts[0].effect if defense.parts else None, PrivateRelease):
        return Guarantee(
            unit="example",
            noise_multiplier=release.noise_multiplier,
            sample_rate=1.0,
            steps_per_round=0,
            delta=release.delta,
            accountant=accountant,
            once=release.epsilon,
        )
    part = mechanism(defense)
    effect = part.effect if part else None
    missing = _why_missing(defense, buffers_shared)
    of_example = isinstance(effect, ClippedExamples)
    every_step = of_example or (isinstance(effect, Noise) and effect.at == "gradient")
    return Guarantee(
        unit="example" if of_example else "client",
        noise_multiplier=_noise_multiplier(effect, num_tensors) if effect and missing is None else 0.0,
        sample_rate=sample_rate if of_example else 1.0,
        steps_per_round=steps_per_round if every_step else 1,
        delta=delta,
        accountant=accountant,
        missing=missing,
    )


def promises_privacy(defense: Defense) -> bool:
    """Return whether the defense looks private: a part clips and adds noise, or trains on data released privately."""
    kinds = [part.effect for part in defense.parts]
    clipped = any(isinstance(effect, Noise) and effect.clip is not None for effect in kinds)
    return clipped or any(isinstance(effect, ClippedExamples | PrivateRelease) for effect in kinds)


def mechanism(defense: Defense) -> Part | None:
    """Return the only part of ``defense`` that adds noise or clips examples; ``None`` if there are none or several."""
    found = [part for part in defense.parts if isinstance(part.effect, Noise | ClippedExamples)]
    return found[0] if len(found) == 1 else None


def _why_missing(defense: Defense, buffers_shared: bool) -> str | None:
    declared = (PostProcessing, PerExample, Heuristic, PrivateRelease, Noise, ClippedExamples)
    foreign = [part.name for part in defense.parts if not isinstance(part.effect, declared)]
    uncovered = [part for part in defense.parts if isinstance(part.effect, Heuristic | PrivateRelease)]
    part = mechanism(defense)
    effect = part.effect if part else None
    unseen = f"none is known of {', '.join(foreign)}, whose noise, if it adds any, the accountants cannot see"
    reasons = {
        "clients do not defend themselves": not defense.parts,
        unseen: bool(foreign),
        "epsilon of svt grows with the number of elements, to about 70,000 a round for 7 million at its defaults"
        " (fl_privacy.defenses.privacy.svt_epsilon)": any(isinstance(p.effect, SparseVector) for p in defense.parts),
        "some layers are uploaded without noise": any(isinstance(p.effect, NoisedLayers) for p in defense.parts),
        f"{defense.name} adds no calibrated noise": not any(isinstance(p.effect, declared[-2:]) for p in defense.parts),
        f"the accountants do not cover {defense.name}": effect is None or bool(uncovered),
        "batch-norm statistics are uploaded without noise": buffers_shared,
        "nothing is clipped, so that no noise scale bounds what one record changes": _norm(effect) is None,
        "the accountants cover Gaussian noise only": not isinstance(effect, Gaussian | ClippedExamples),
        "there is no noise": not noise_of(effect),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _norm(effect: Effect | None) -> float | None:
    if isinstance(effect, ClippedExamples):
        return effect.norm
    return effect.clip.norm if isinstance(effect, Noise) and effect.clip else None


def noise_of(effect: Effect | None) -> float | None:
    """Return the noise, in clipping norms if ``effect`` clips examples, else its deviation; ``None`` if not known."""
    if isinstance(effect, ClippedExamples):
        return effect.noise_multiplier
    return effect.std if isinstance(effect, Noise) else None


def _noise_multiplier(effect: Effect, num_tensors: int) -> float:
    norm, amount = _norm(effect), noise_of(effect)
    assert norm is not None and amount is not None, "otherwise there is no guarantee"
    if isinstance(effect, ClippedExamples):
        return float(amount)
    layered = isinstance(effect, Noise) and effect.clip is not None and effect.clip.scope == "layer"
    return float(amount / (norm * math.sqrt(num_tensors if layered else 1)))
