"""Statistical test of a mechanism: draws on neighbors give a lower bound on epsilon with stated confidence."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_privacy import checks
from fl_privacy.dp_check.bounds import gaussian_epsilon, gaussian_mu, noticed_mu
from fl_privacy.dp_check.claims import Claim, expect_claim
from fl_privacy.dp_check.counted import Drawn
from fl_privacy.dp_check.draws import (
    Mechanism,
    Neighbors,
    Pilot,
    Statistics,
    directions_of,
    draw_statistics,
    flattened,
    looked_at,
    pilot,
    slices_of,
    statistics_for,
)
from fl_privacy.dp_check.known_noise import by_its_round, by_known_seeds
from fl_privacy.dp_check.reasons import Measured, reason_for
from fl_privacy.dp_check.structure import Uncovered, held_rows, told_by_covariance, uncovered
from fl_privacy.errors import UserError
from fl_privacy.progress import counted
from fl_privacy.rng import derive_generator
from fl_privacy.types import Tensors

ACCUSATION = 0.999
"""Confidence required to call a claim false."""

PILOT = ((24, 5), (64, 2), (192, 1))
"""Stages of the pilot: draws per neighbor of each remaining pair, and number of pairs kept, the most distinguished."""

SCALES = (1.0, 10.0, 1e4)
"""Norms of an update in units of the clipping norm; unclipped values grow with them."""


@dataclass(frozen=True, kw_only=True)
class MechanismCheck:
    """Result of many draws of a mechanism for a claim.

    Attributes:
        epsilon: lower bound at the claim's delta for one release with any noise.
        epsilon_if_gaussian: lower bound for all releases of the claim with fresh Gaussian noise each round; ``None`` if
            the moments show other noise, or only a sample of the units participates.
        confidence: joint confidence of both bounds.
        showable: largest ``epsilon`` that this number of draws could show.
        noticed: least true epsilon at which four of five such tests would call the claim false, for Gaussian noise.
        by: statistic that distinguished the neighbors best.
        contradicted: ``True`` if the claim is false with confidence ``ACCUSATION``.
        reason: fact that disagrees with the claim, or empty.
        noise_std: standard deviation of the noise in the most distinguishing direction.
        moved: l2 distance by which the unit moves the release.
        bare: arrays with content that no fresh noise covers.
    """

    claim: Claim
    epsilon: float
    epsilon_if_gaussian: float | None
    confidence: float
    showable: float
    noticed: float | None
    draws: int
    compared: str
    by: str
    contradicted: bool
    reason: str
    noise_std: float
    moved: float
    bare: tuple[str, ...]

    @property
    def lower_bound(self) -> float:
        return max(self.epsilon, self.epsilon_if_gaussian or 0.0)

    @property
    def doubted(self) -> bool:
        return not self.contradicted and self.lower_bound > self.claim.epsilon

    @property
    def conclusion(self) -> str:
        if not self.doubted:
            return "nothing contradicts the claim"
        return (
            f"the bound lies above the claim with a confidence of {100 * self.confidence:.3g} %, and"
            f" {100 * ACCUSATION:.4g} % are needed to call it false: repeat with {4 * self.draws:,} draws"
        )

    @property
    def sentence(self) -> str:
        claimed = f"claimed {shown_epsilon(self.claim.epsilon)}"
        if self.contradicted:
            because = f", because {self.reason}" if self.reason else ""
            found = "nothing bounds it" if self.bare else f"at least {shown_epsilon(self.lower_bound)}"
            return f"{claimed}; {found}: the claim is false{because}."
        return (
            f"{claimed}; at least {shown_epsilon(self.lower_bound)} by {self.draws:,} draws on either neighbor"
            f" ({self.power}): {self.conclusion}."
        )

    @property
    def power(self) -> str:
        if self.noticed is not None and math.isfinite(self.noticed):
            return f"four of five such tests call the claim false from {shown_epsilon(self.noticed)} on"
        return f"so many can show at most {shown_epsilon(self.showable)} of noise of any shape"


def shown_epsilon(epsilon: float) -> str:
    """Format an epsilon with three digits."""
    if math.isinf(epsilon):
        return "∞"
    return f"{epsilon:.3g}" if epsilon >= 10 else f"{epsilon:.2f}".rstrip("0").rstrip(".")


def check_mechanism(
    mechanism: Mechanism,
    *,
    claimed: float | Claim,
    delta: float | None = None,
    like: Tensors | None = None,
    clip_norm: float | None = None,
    neighbors: Neighbors | Sequence[Neighbors] | None = None,
    noise: Literal["gaussian", "other"] = "gaussian",
    draws: int = 4000,
    confidence: float = 0.95,
    seed: int = 0,
) -> MechanismCheck:
    """Test the claimed privacy of ``mechanism`` by drawing from it many times.

    A pilot chooses the most distinguished neighbors: updates as large as the clipping norm and far larger against none
    (or their negative if a unit is replaced). Fresh draws then give a lower bound.

    Args:
        mechanism: function from an update (tensors like ``like``) to the release (tensors); called some 2.5 x ``draws``
            + 1,800 times, each with new randomness.
        claimed: epsilon, or a ``Claim`` with unit, neighbors and rounds.
        delta: delta of ``claimed``, if that is a number.
        like: tensors with the names and shapes of an update.
        clip_norm: stated clipping norm (l2) of one unit's contribution, above 0; by default 1.
        neighbors: pairs of inputs that differ in one unit, such as two batches, instead of ``like``.
        noise: ``gaussian`` if the claim rests on fresh Gaussian noise in each round; ``other`` makes no assumption.
        draws: draws per neighbor, at least 200.
        confidence: confidence of the bounds, in (0, 1).
        seed: seed of the directions, not of the noise.

    Raises:
        UserError: neither ``like`` nor ``neighbors`` is given, or the releases can't be compared.
    """
    claim = expect_claim(claimed, delta)
    checks.whole("draws", draws, at_least=200, example=4000)
    checks.number("confidence", confidence, above=0, below=1, example=0.95)
    outputs, pairs = _pairs(mechanism, claim, like=like, clip_norm=clip_norm, neighbors=neighbors, seed=seed)
    places = slices_of(outputs)
    bare, telling = _looked_for(mechanism, _everywhere(pairs), outputs, draws=draws, delta=claim.delta, seed=seed)
    found, statistics = _fixed(mechanism, pairs, places, telling, most=draws // 2)
    drawn = Drawn.of(draw_statistics(mechanism, found.neighbors, statistics, draws), statistics, claim)

    measured = Measured(
        pilot=found,
        claim=claim,
        clip_norm=clip_norm,
        moved=drawn.moved,
        noise_std=drawn.noise_std,
        unchanged=drawn.unchanged,
        uncovered=bare,
        now_and_then=drawn.aligned((1 - ACCUSATION) / 10) > claim.epsilon >= _total(drawn.mu(1 - ACCUSATION), claim),
    )
    return _judged(measured, drawn, by=statistics.names[drawn.widest], gaussian=noise == "gaussian", level=confidence)


def _looked_for(
    mechanism: Mechanism, pair: Neighbors, outputs: Tensors, *, draws: int, delta: float, seed: int
) -> tuple[list[Uncovered], Tensor | None]:
    found = [*by_its_round(mechanism, pair), *by_known_seeds(mechanism, pair)]
    shapes = {name: torch.as_tensor(value).shape for name, value in outputs.items()}
    held = held_rows(mechanism, pair, draws, shapes)
    found += uncovered(mechanism, pair, held, shapes=shapes, delta=delta, seed=seed)
    return found, told_by_covariance(held, _known(pair, slices_of(outputs)))


def _fixed(
    mechanism: Mechanism,
    pairs: Sequence[Neighbors],
    places: Mapping[str, slice],
    telling: Tensor | None,
    *,
    most: int,
) -> tuple[Pilot, Statistics]:
    everywhere = _everywhere(pairs)
    if telling is None:
        found, known = _worst(mechanism, pairs, places, most=most, preferred=everywhere)
        return found, statistics_for(found, places, known, {})
    found = pilot(mechanism, everywhere, min(PILOT[-1][0], most))
    also = {"the direction that tells most by the noise's covariance": telling}
    return found, statistics_for(found, places, _known(everywhere, places), also)


def _everywhere(pairs: Sequence[Neighbors]) -> Neighbors:
    """Return the pair that moves every array, beyond the clipping norm; else the first."""
    drawn = [pair for pair in pairs if pair.at_random and "alone" not in pair.what]
    return drawn[-2] if len(drawn) > 1 else pairs[0]


def _judged(measured: Measured, drawn: "Drawn", *, by: str, gaussian: bool, level: float) -> MechanismCheck:
    claim = measured.claim

    gaussian = gaussian and drawn.gaussian

    def bounds(error: float) -> tuple[float, float | None]:
        """Compute both bounds, each with half of the error, so that the larger one holds with the stated confidence."""
        if not gaussian:
            return drawn.epsilon(error), None
        return drawn.epsilon(error / 2), _total(drawn.mu(error / 2), claim)

    epsilon, total = bounds(1 - level)
    strict = max(bound or 0.0 for bound in bounds(1 - ACCUSATION))
    bare: list[Uncovered] = list(measured.uncovered)
    contradicted = math.isfinite(claim.epsilon) and (strict > claim.epsilon or bool(bare))
    return MechanismCheck(
        claim=claim,
        epsilon=epsilon,
        epsilon_if_gaussian=total,
        confidence=level,
        showable=drawn.showable((1 - level) / 2 if gaussian else 1 - level),
        noticed=_noticed(claim, len(drawn.first)) if gaussian else None,
        draws=drawn.draws,
        compared=measured.pilot.neighbors.what,
        by=by,
        contradicted=contradicted,
        reason=reason_for(measured) if contradicted else "",
        noise_std=0.0 if bare else measured.noise_std,
        moved=max([each.moved for each in bare], default=0.0) or measured.moved,
        bare=tuple(dict.fromkeys(name for each in bare for name in each.arrays)),
    )


def _worst(
    mechanism: Mechanism, pairs: Sequence[Neighbors], places: Mapping[str, slice], *, most: int, preferred: Neighbors
) -> tuple[Pilot, Tensor | None]:
    """Choose the most distinguished pair, and the direction of its difference if known.

    At most ``most`` draws per pair; ``preferred`` is taken unless another is better by more than chance.
    """
    kept = list(pairs)
    for draws, number in PILOT:
        if len(kept) > number or number == 1:
            rated = [_rated(mechanism, pair, places, min(draws, most)) for pair in counted("pair of neighbors", kept)]
            rated.sort(key=lambda each: (-each[0], -float(each[1].shift.norm())))
            kept = [drawn.neighbors for _, drawn, _ in rated[:number]]
            if preferred not in kept:
                kept.append(preferred)
    usual = next(each for each in rated if each[1].neighbors is preferred)
    chance = 2 * math.sqrt(2 / min(PILOT[-1][0], most))
    return usual[1:] if rated[0][0] < usual[0] + chance else rated[0][1:]


def _rated(
    mechanism: Mechanism, pair: Neighbors, places: Mapping[str, slice], draws: int
) -> tuple[float, Pilot, Tensor | None]:
    known, drawn = _known(pair, places), pilot(mechanism, pair, draws)
    directions = [] if known is None else list(directions_of(known, places).values())
    return drawn.separation(directions), drawn, known


def _total(mu: float, claim: Claim) -> float:
    if claim.delta == 0:
        return math.inf if mu > 0 else 0.0
    return gaussian_epsilon(mu * math.sqrt(claim.rounds), claim.delta)


def _noticed(claim: Claim, draws: int) -> float | None:
    if claim.delta == 0 or not math.isfinite(claim.epsilon):
        return None
    once = gaussian_mu(claim.epsilon, claim.delta) / math.sqrt(claim.rounds)
    return _total(noticed_mu(once, draws, error=(1 - ACCUSATION) / 2), claim)


def _pairs(
    mechanism: Mechanism,
    claim: Claim,
    *,
    like: Tensors | None,
    clip_norm: float | None,
    neighbors: Neighbors | Sequence[Neighbors] | None,
    seed: int,
) -> tuple[Tensors, list[Neighbors]]:
    if neighbors is not None:
        given = [neighbors] if isinstance(neighbors, Neighbors) else list(neighbors)
        return _sent(mechanism, given[0]), given
    if like is None:
        raise UserError(
            "check_mechanism is expected to know what an update looks like; give like=dict(model.named_parameters()),"
            " or neighbors=."
        )
    norm = 1.0 if clip_norm is None else clip_norm
    checks.number("clip_norm", norm, above=0, example=1.0)
    made = list(update_neighbors(like, norm=norm, replaced=claim.neighbors == "replace", seed=seed))
    return _sent(mechanism, made[0]), made


def _sent(mechanism: Mechanism, pair: Neighbors) -> Tensors:
    outputs = mechanism(pair.second)
    flattened(outputs)
    return outputs


def update_neighbors(like: Tensors, *, norm: float, replaced: bool, seed: int) -> Iterable[Neighbors]:
    """Pair updates of several directions and sizes with zero, or with their negative if ``replaced``."""
    rng = derive_generator(seed, "dp_check", "directions")
    shapes = {name: torch.as_tensor(value).shape for name, value in like.items()}
    random = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    even = {name: value / value.norm().clamp_min(1e-12) for name, value in random.items() if value.numel()}
    directions: dict[str, Mapping[str, Tensor]] = {"an update in a random direction": random}
    if len(even) > 1:
        directions["an update that is as large in each array"] = even
        directions |= {f"an update of {name} alone": {name: value} for name, value in looked_at(even).items()}
    for what, direction in directions.items():
        length = math.sqrt(sum(float(value.square().sum()) for value in direction.values()))
        for scale in SCALES if "alone" not in what else SCALES[1:2]:
            first = {
                name: direction[name] * (scale * norm / length) if name in direction else torch.zeros(shape)
                for name, shape in shapes.items()
            }
            second = {name: -value if replaced else torch.zeros_like(value) for name, value in first.items()}
            against = "its negative" if replaced else "none"
            yield Neighbors(first=first, second=second, what=f"{what} of norm {scale * norm:.3g} against {against}",
                            norm=scale * norm * (2 if replaced else 1), at_random=True)  # fmt: skip


def _known(neighbors: Neighbors, places: Mapping[str, slice]) -> Tensor | None:
    first, second = neighbors.first, neighbors.second
    if not (isinstance(first, Mapping) and isinstance(second, Mapping) and set(first) <= set(places)):
        return None
    if any(torch.as_tensor(value).numel() != places[name].stop - places[name].start for name, value in first.items()):
        return None
    known = torch.zeros(max(place.stop for place in places.values()), dtype=torch.float64)
    for name, value in first.items():
        known[places[name]] = flattened({name: value}) - flattened({name: second[name]})
    return known
