"""Compute a run's differential privacy by round, and the noise for a privacy budget."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_privacy.defenses.privacy import Accountant, Guarantee, guarantee, mechanism, noise_multiplier_for, noise_of
from fl_privacy.errors import UserError
from fl_privacy.federation.client import local_batches
from fl_privacy.measure.roc import promises_little
from fl_privacy.rng import derive_generator
from fl_privacy.runs.build import build_defense
from fl_privacy.runs.config import RunSettings
from fl_privacy.runs.setup import Setup, build_setup


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Privacy guarantee of the client with the largest epsilon."""

    statement: str
    missing: str | None  # reason why there is no guarantee, if so
    epsilons: tuple[float, ...] | None  # epsilon after each round; ``None`` without guarantee
    unit: str | None = None  # protected unit, ``example`` or ``client``
    covered: bool = False  # ``True`` if the accountant's assumptions hold for the sampling of batches

    def epsilon(self, round: int) -> float | None:
        return self.epsilons[round - 1] if self.epsilons else None


_UNKNOWN = "it depends on the clients' numbers of examples, which stay on their nodes"
UNKNOWN = Privacy(statement=f"No differential privacy is claimed: {_UNKNOWN}.", missing=_UNKNOWN, epsilons=None)
"""Privacy of clients with data of their own, for which no guarantee can be computed."""


def privacy_of(setup: Setup, *, delta: float, accountant: Accountant) -> Privacy:
    """Compute epsilon over the rounds for the worst-off client, or the reason why there is none.

    ``delta``: value in (0, 1) below one over a client's number of examples. Sampling of clients does not amplify
    privacy.
    """
    candidates = guarantees(setup, delta=delta, accountant=accountant)
    missing = candidates[0].missing
    if missing is not None:
        return Privacy(statement=candidates[0].describe(setup.rounds), missing=missing, epsilons=None)
    taken_part = rounds_taken_part(setup)
    distinct = sorted(set(taken_part))
    courses = [dict(zip(distinct, candidate.course(distinct), strict=True)) for candidate in candidates]
    worst, _ = max(zip(candidates, courses, strict=True), key=lambda pair: pair[1][distinct[-1]])
    sentences = [worst.describe(taken_part[-1])]
    if promises_little(epsilon=worst.epsilon(taken_part[-1]), delta=worst.delta):
        sentences.append("An epsilon or delta of that size promises little.")
    if taken_part[-1] > 1:
        sentences.append(f"After one round epsilon is {worst.epsilon(1):.4g}.")
    if worst.sample_rate < 1:
        sentences.append("This run draws its batches without replacement instead, which the accountant does not cover.")
    return Privacy(
        statement=" ".join(sentences),
        missing=None,
        epsilons=tuple(max(course[number] for course in courses) for number in taken_part),
        unit=worst.unit,
        covered=all(candidate.sample_rate == 1 for candidate in candidates),
    )


def guarantees(setup: Setup, *, delta: float, accountant: Accountant) -> list[Guarantee]:
    """Return the guarantees of clients at most risk: no other has both as high a sampling rate and as many steps."""
    server, plan = setup.server, setup.server.local_plan
    kinds = set()
    for client in setup.clients.values():
        number = len(client.indices)
        size = min(plan.batch_size or number, number)
        kinds.add((size / number, len(local_batches(number, plan, derive_generator(0)))))
    return [
        guarantee(
            setup.defense,
            sample_rate=sample_rate,
            delta=delta,
            steps_per_round=steps,
            accountant=accountant,
            num_tensors=len(server.state.parameters),
            buffers_shared=bool(server.state.buffers) and plan.buffers == "shared" and plan.batch_norm == "train",
        )
        for sample_rate, steps in sorted(kinds)
        if not any(rate >= sample_rate and n >= steps for rate, n in kinds - {(sample_rate, steps)})
    ]


def rounds_taken_part(setup: Setup) -> Sequence[int]:
    """Return, for each round, in how many rounds so far the client with the most participations took part."""
    turns = len(setup.clients) if setup.server.plan.aggregation == "round_robin" else 1
    return [math.ceil(round / turns) for round in range(1, setup.rounds + 1)]


def calibrated(config: RunSettings) -> RunSettings:
    """Return ``config`` with the least noise that keeps the training within ``privacy.epsilon``, if that is set."""
    changes = noise_for_budget(config)
    return config.changed(changes) if changes else config


def noise_for_budget(config: RunSettings) -> dict[str, float | None]:
    """Return setting -> noise that spends the budget ``privacy.epsilon`` by the last round; empty without a budget.

    The setting ``privacy.epsilon`` gets ``None``, since the noise replaces it. ``UserError`` if the defense gives no
    guarantee, or no single setting scales its noise.
    """
    done: dict[str, float | None] = {"privacy.epsilon": None}
    if config.privacy.epsilon is None:
        return {}
    if config.choices["defense"] == "none":
        return done
    noise = _noise_setting(config.defense, config.choices["defense"])
    delta, accountant = config.privacy.delta, config.privacy.accountant
    setup = build_setup(config)
    candidates = guarantees(setup, delta=delta, accountant=accountant)
    if (missing := candidates[0].missing) is not None:
        raise UserError(
            f"privacy.epsilon is expected with a defense that gives a guarantee, but {missing}; choose another defense,"
            " or leave privacy.epsilon out."
        )
    number = rounds_taken_part(setup)[-1]
    factor = max(
        noise_multiplier_for(
            epsilon=config.privacy.epsilon,
            sample_rate=candidate.sample_rate,
            steps=number * candidate.steps_per_round,
            delta=delta,
            accountant=accountant,
        )
        / candidate.noise_multiplier
        for candidate in candidates
    )
    return {f"defense.{noise}": float(config.defense[noise]) * factor, **done}


def _noise_setting(section: Mapping[str, Any], name: str) -> str:
    part = mechanism(build_defense(section))
    if part and part.strength and part.strength in section:
        other = mechanism(build_defense({**section, part.strength: 2 * section[part.strength]}))
        if other and noise_of(other.effect) == 2 * (noise_of(part.effect) or 0.0):
            return part.strength
    raise UserError(
        "privacy.epsilon is expected with a defense whose noise is proportional to one of its settings, such as dp_sgd,"
        f" or dp_noise with a clip_norm, but got defense={name}; set privacy.epsilon=null."
    )
