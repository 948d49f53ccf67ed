"""The guarantee of a defense, where there is one: what a client releases, in the terms of the accountants."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fl_privacy import checks
from fl_privacy.defenses.defense import Defense
from fl_privacy.defenses.privacy.accountants import Accountant, epsilon, epsilons
from fl_privacy.effects import (
    ClippedExamples,
    Effect,
    Gaussian,
    Heuristic,
    Noise,
    Part,
    PerExample,
    PostProcessing,
    PrivateRelease,
)


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """What differential privacy a defense gives one client against the server that reads all its uploads.

    Attributes:
        unit: what is protected: ``example`` (one of the client's examples added or removed) or ``client`` (all of its
            update there or not).
        noise_multiplier: standard deviation of the noise over the sensitivity.
        sample_rate: of the accountant. A client's own sampling of examples is hidden from the server; which clients
            take part is not, hence 1 for the unit ``client``.
        steps_per_round: noised releases in a round.
        delta: at which epsilon is given.
        accountant: ``rdp`` or ``prv``.
        missing: why there is no guarantee; ``None`` if there is one.
        once: epsilon that was spent before the first round and covers all; ``None`` where rounds spend it.
    """

    unit: Literal["example", "client"]
    noise_multiplier: float
    sample_rate: float
    steps_per_round: int
    delta: float
    accountant: Accountant
    missing: str | None = None
    once: float | None = None

    def epsilon(self, rounds: int) -> float:
        """Epsilon of a client that has taken part in ``rounds`` rounds; infinite where there is no guarantee."""
        if self.missing is not None:
            return math.inf
        if self.once is not None:
            return self.once
        return epsilon(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            steps=rounds * self.steps_per_round,
            delta=self.delta,
            accountant=self.accountant,
        )

    def course(self, rounds: Sequence[int]) -> list[float]:
        """``epsilon`` of each of the ascending numbers ``rounds``, or a bound above it (see ``epsilons``)."""
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
        """One sentence for a report."""
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
    """The guarantee of ``defense``, alone or composed with defenses that only process its noised update.

    Args:
        defense: clipped examples protect an example, clipped Gaussian noise the client's whole update.
        sample_rate: local batch size over the client's number of examples, in (0, 1].
        delta: in (0, 1).
        steps_per_round: local steps S; noise on the upload is drawn once whatever S.
        accountant: ``rdp`` or ``prv``.
        num_tensors: of the model, by which per-layer clip norms add up: sensitivity C sqrt(num_tensors).
        buffers_shared: whether batch-norm statistics are uploaded too, which no noise covers.
    """
    checks.number("sample_rate", sample_rate, above=0, at_most=1, example=0.1)
    checks.number("delta", delta, above=0, below=1, example=1e-5)
    checks.one_of("accountant", accountant, ("rdp", "prv"))
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
    """Whether a part of ``defense`` noises what it has clipped, so that somebody may count on a guarantee.

    What leaves a client beside such an upload, as an exact loss, is covered by no guarantee and has to stay.
    """
    effects = [part.effect for part in defense.parts]
    return any(
        isinstance(effect, ClippedExamples | PrivateRelease) or (isinstance(effect, Noise) and effect.clip is not None)
        for effect in effects
    )


def mechanism(defense: Defense) -> Part | None:
    """The part of ``defense`` whose noise the accountants count, clipped or not; ``None`` where none or several do."""
    found = _mechanisms(defense)
    return found[0] if len(found) == 1 else None


def _mechanisms(defense: Defense) -> list[Part]:
    return [part for part in defense.parts if isinstance(part.effect, Noise | ClippedExamples)]


def _why_missing(defense: Defense, buffers_shared: bool) -> str | None:
    declared = (PostProcessing, PerExample, Heuristic, PrivateRelease, Noise, ClippedExamples)
    foreign = [part.name for part in defense.parts if not isinstance(part.effect, declared)]
    uncovered = [part for part in defense.parts if isinstance(part.effect, Heuristic | PrivateRelease)]
    part = mechanism(defense)
    effect = part.effect if part else None
    reasons = {
        "clients do not defend themselves": not defense.parts,
        f"none is known of {', '.join(foreign)}, whose noise, if it adds any, the accountants cannot see": bool(
            foreign
        ),
        f"{defense.name} adds no calibrated noise": not _mechanisms(defense),
        f"the accountants do not cover {defense.name}": effect is None or bool(uncovered),
        "batch-norm statistics are uploaded without noise": buffers_shared,
        "nothing is clipped, so that no noise scale bounds what one record changes": _norm(effect) is None,
        "the accountants cover Gaussian noise only": not isinstance(effect, Gaussian | ClippedExamples),
        "there is no noise": not noise_of(effect),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _norm(effect: Effect | None) -> float | None:
    """To which something was clipped; ``None`` where nothing was, or nobody says to what."""
    if isinstance(effect, ClippedExamples):
        return effect.norm
    return effect.clip.norm if isinstance(effect, Noise) and effect.clip else None


def noise_of(effect: Effect | None) -> float | None:
    """Standard deviation of the noise, or its noise multiplier; ``None`` where there is none, or it is not told."""
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
