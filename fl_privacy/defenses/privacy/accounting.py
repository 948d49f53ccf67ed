"""The guarantee of a defense, where there is one: what a client releases, in the terms of the accountants."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fl_privacy import checks
from fl_privacy.defenses.defense import Defense
from fl_privacy.defenses.privacy.accountants import Accountant, epsilon, epsilons

_AFTER_NOISE = {"none", "pruning", "quantization", "selective_sharing"}
"""Defenses that look at nothing but the noised update, hence cost no privacy."""


_EXAMPLE_BY_EXAMPLE = {"ats"}
"""Defenses that change each example without a look at others, hence leave the accountants' argument as it is."""

_MADE_UP = {"dp_merf", "gs_wgan"}
"""Defenses that put images of a private generator in place of the client's, so that nothing later costs privacy."""

_NO_CALIBRATED_NOISE = _AFTER_NOISE | _EXAMPLE_BY_EXAMPLE | {
    "dc", "dm", "dsa", "fdl_pp", "instahide", "refiner", "soteria", "soteria_mixing", "split_fed", "spn",
}  # fmt: skip
"""Those of this package that add none. Of any other that is no mechanism either nothing is known."""


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
            f" after {rounds} rounds of taking part ({self.accountant.upper()} accountant{sampling})."
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
        defense: ``dp_sgd`` protects an example, ``dp_noise`` with a clip norm the client's whole update.
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
    made_up = [name for name in defense.name.split("+") if name in _MADE_UP]
    if made_up and defense.name.split("+")[0] == made_up[0]:
        settings = _settings(defense, made_up[0])
        return Guarantee(
            unit="example",
            noise_multiplier=settings["noise_multiplier"],
            sample_rate=1.0,
            steps_per_round=0,
            delta=settings["delta"],
            accountant=accountant,
            once=settings["epsilon"],
        )
    mechanisms = [name for name in defense.name.split("+") if name in ("dp_sgd", "dp_noise")]
    settings = _settings(defense, mechanisms[0]) if mechanisms else {}
    missing = _why_missing(defense, mechanisms, settings, buffers_shared)
    of_example = mechanisms == ["dp_sgd"]
    every_step = of_example or settings.get("at") == "gradient"
    return Guarantee(
        unit="example" if of_example else "client",
        noise_multiplier=_noise_multiplier(settings, num_tensors) if missing is None else 0.0,
        sample_rate=sample_rate if of_example else 1.0,
        steps_per_round=steps_per_round if every_step else 1,
        delta=delta,
        accountant=accountant,
        missing=missing,
    )


def _why_missing(defense: Defense, mechanisms: list[str], settings: dict[str, Any], buffers_shared: bool) -> str | None:
    parts = defense.name.split("+")
    foreign = [name for name in parts if name not in {*mechanisms, *_MADE_UP, *_NO_CALIBRATED_NOISE}]
    others = set(defense.name.split("+")) - set(mechanisms) - _AFTER_NOISE - _EXAMPLE_BY_EXAMPLE
    reasons = {
        "clients do not defend themselves": defense.name == "none",
        f"none is known of {', '.join(foreign)}, whose noise, if it adds any, the accountants cannot see": bool(
            foreign
        ),
        f"{defense.name} adds no calibrated noise": not mechanisms,
        f"the accountants do not cover {defense.name}": len(mechanisms) > 1 or bool(others),
        "batch-norm statistics are uploaded without noise": buffers_shared,
        "nothing is clipped, so that no noise scale bounds what one record changes": settings.get("clip_norm") is None,
        "the accountants cover Gaussian noise only": settings.get("noise", "gaussian") != "gaussian",
        "there is no noise": 0 in (settings.get("scale"), settings.get("noise_multiplier")),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _noise_multiplier(settings: dict[str, Any], num_tensors: int) -> float:
    if "noise_multiplier" in settings:
        return float(settings["noise_multiplier"])
    bounds = num_tensors if settings["clip_scope"] == "layer" else 1
    return float(settings["scale"] / (settings["clip_norm"] * math.sqrt(bounds)))


def _settings(defense: Defense, name: str) -> dict[str, Any]:
    """The public settings of the part ``name`` of ``defense``, however deep it was composed."""
    parts = {key: key.split(".") for key in defense.public}
    return {
        path[-1]: defense.public[key] for key, path in parts.items() if defense.name == name or path[-2:-1] == [name]
    }
