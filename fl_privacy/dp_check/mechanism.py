"""Statistical test of a mechanism, whose draws on two neighbors give a lower bound on epsilon."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_privacy import checks
from fl_privacy.dp_check.bounds import measured_mu, noticed_mu
from fl_privacy.dp_check.claims import Claim, expect_claim
from fl_privacy.dp_check.counted import Drawn
from fl_privacy.dp_check.draws import (
    ROUNDING,
    ByRound,
    ManyAtOnce,
    Mechanism,
    Neighbors,
    Pilot,
    directions_of,
    draw_statistics,
    flattened,
    looked_at,
    pilot,
    slices_of,
    statistics_for,
)
from fl_privacy.dp_check.structure import Uncovered, direction_by_covariance, held_rows, uncovered
from fl_privacy.errors import UserError
from fl_privacy.progress import counted
from fl_privacy.rng import derive_generator
from fl_privacy.types import Tensors

ACCUSATION = 0.999  # confidence with which a claim is called false

PILOT = ((24, 5), (64, 2), (192, 1))
"""Stages of the pilot: number of draws per neighbor of each pair, and number of most distinguished pairs to keep."""

SCALES = (1.0, 10.0, 1e4)
"""Norms of the tested updates, in units of the clipping norm; large ones reveal unclipped values."""


@dataclass(frozen=True, kw_only=True)
class MechanismCheck:
    """Result of a mechanism's test against a claim."""

    claim: Claim
    epsilon: float  # lower bound on epsilon, at the claim's delta, for one release with any noise
    epsilon_if_gaussian: float | None  # the same for all releases with Gaussian noise; ``None`` if it looks otherwise
    confidence: float
    showable: float  # largest ``epsilon`` that this number of draws could give
    noticed: float | None  # least true epsilon at which four of five tests find a false claim, for Gaussian noise
    draws: int  # number for each neighbor
    compared: str
    by: str  # name of the projection that distinguished the neighbors best
    contradicted: bool  # ``True`` if the claim is false with confidence ``ACCUSATION``
    reason: str  # phrase on what disagrees with the claim; empty unless ``contradicted``
    noise_std: float  # standard deviation of the noise in the projection ``by``
    moved: float  # distance by which the unit moves the release in the projection ``by``
    bare: tuple[str, ...]  # names of arrays that hold something without fresh noise
    estimate: float | None = None  # estimated epsilon of all releases, if the noise is Gaussian

    @property
    def lower_bound(self) -> float:
        return max(self.epsilon, self.epsilon_if_gaussian or 0.0)

    @property
    def doubted(self) -> bool:
        return not self.contradicted and self.lower_bound > self.claim.epsilon

    @property
    def sentence(self) -> str:
        claimed = f"claimed {shown_epsilon(self.claim.epsilon)}"
        if self.contradicted:
            because = f", because {self.reason}" if self.reason else ""
            found = "nothing bounds it" if self.bare else f"at least {shown_epsilon(self.lower_bound)}"
            return f"{claimed}; {found}: the claim is false{because}."
        conclusion = "nothing contradicts the claim"
        if self.doubted:
            conclusion = f"{doubt_in_words(self.confidence)}: repeat with {4 * self.draws:,} draws"
        return (
            f"{claimed}; at least {shown_epsilon(self.lower_bound)} by {self.draws:,} draws on either neighbor"
            f" ({self.power}): {conclusion}."
        )

    @property
    def power(self) -> str:
        if self.noticed is not None and math.isfinite(self.noticed):
            return f"four of five such tests call the claim false from {shown_epsilon(self.noticed)} on"
        return f"so many can show at most {shown_epsilon(self.showable)} of noise of any shape"


def doubt_in_words(confidence: float) -> str:
    """Explain why a lower bound above the claimed epsilon does not prove the claim false at this ``confidence``."""
    above = f"the bound lies above the claim with a confidence of {100 * confidence:.3g} %"
    return f"{above}, and {100 * ACCUSATION:.4g} % are needed to call it false"


def shown_epsilon(epsilon: float) -> str:
    """Format ``epsilon`` with three digits, or two decimals below 10."""
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
    """Test the claimed privacy of ``mechanism`` by many draws (outputs), and return a lower bound on its epsilon.

    Inputs are an update and zero, or an update and its negative if neighbors exchange a unit (example or client). A few
    draws choose the update's direction and norm (up to 10,000 clipping norms); fresh draws give the bound.
    ``UserError`` if neither ``like`` nor ``neighbors`` is given, or the outputs can't be compared.

    Args:
        mechanism: function from an update (tensors like ``like``) to its output (tensors), with fresh randomness at
            each of about 2.5 x ``draws`` + 1,800 calls.
        claimed: claimed epsilon, or a ``Claim`` with unit, neighbors and rounds.
        delta: delta of the claim, if ``claimed`` is a number.
        like: tensors with the names and shapes of an update.
        clip_norm: clipping norm (l2) of one unit's contribution, above 0; ``None`` takes 1.
        neighbors: pairs of inputs that differ in one unit, such as two batches, instead of ``like``.
        noise: ``gaussian`` if the claim assumes fresh Gaussian noise in each round; ``other`` makes no assumption.
        draws: number of draws per neighbor, at least 200.
        confidence: confidence of the bounds, in (0, 1).
    """
    claim = expect_claim(claimed, delta)
    checks.whole("draws", draws, at_least=200, example=4000)
    checks.number("confidence", confidence, above=0, below=1, example=0.95)
    pairs = _pairs(claim, like=like, clip_norm=clip_norm, neighbors=neighbors, seed=seed)
    outputs = mechanism(pairs[0].second)
    flattened(outputs)  # checks that it is a release
    places = slices_of(outputs)
    # the pair that moves every array, beyond the clipping norm; else the first
    at_random = [pair for pair in pairs if pair.at_random and "alone" not in pair.what]
    everywhere = at_random[-2] if len(at_random) > 1 else pairs[0]
    shapes = {name: torch.as_tensor(value).shape for name, value in outputs.items()}
    bare = [*by_its_round(mechanism, everywhere), *by_known_seeds(mechanism, everywhere)]
    held, known = held_rows(mechanism, everywhere, draws, shapes), _known(everywhere, places)
    bare += uncovered(mechanism, everywhere, held, shapes=shapes, delta=claim.delta, seed=seed)
    also: dict[str, Tensor] = {}
    if (telling := direction_by_covariance(held, known)) is not None:
        also["the most revealing direction by the noise's covariance"] = telling
        found = pilot(mechanism, everywhere, min(PILOT[-1][0], draws // 2))
    else:
        found, known = _worst(mechanism, pairs, places, most=draws // 2, preferred=everywhere)
    statistics = statistics_for(found, places, known, also)
    drawn = Drawn.of(draw_statistics(mechanism, found.neighbors, statistics, draws), statistics, claim)
    check = _judged(claim, found, drawn, bare, clip_norm=clip_norm, gaussian=noise == "gaussian", level=confidence)
    return _over_calls(check, mechanism, everywhere, places, seed=seed, clip_norm=clip_norm, noise=noise)


def _over_calls(
    check: MechanismCheck,
    mechanism: Mechanism,
    pair: Neighbors,
    places: Mapping[str, slice],
    *,
    seed: int,
    clip_norm: float | None,
    noise: Literal["gaussian", "other"],
) -> MechanismCheck:
    known, most = _known(pair, places), (clip_norm or 0.0) * (2 if check.claim.neighbors == "replace" else 1)
    if not check.contradicted or check.bare or known is None or check.moved <= most * BEYOND:
        return check
    if not carries_over(mechanism, pair, known, check.draws // 8):
        return check
    after = check_mechanism(
        in_sequence(mechanism, pair, known),
        claimed=check.claim,
        neighbors=Neighbors(first=pair.first, second=pair.second, what=f"{pair.what}, once"),
        clip_norm=clip_norm,
        noise=noise,
        draws=min(check.draws, MOST_SEQUENCES),
        confidence=check.confidence,
        seed=seed,
    )
    again = f"later calls send an update again, but the noise is sized for one call: in {LATER + 1} calls together"
    return replace(after, reason=f"{again}, {after.reason}") if after.contradicted else after


LATER, MOST_SEQUENCES, BEFORE = 30, 200, 10
"""Calls without the unit after one with it; most such sequences; calls with the unit before one without it."""


def in_sequence(mechanism: Mechanism, pair: Neighbors, known: Tensor) -> Mechanism:
    """Return a mechanism for testing if one call of ``mechanism`` shows in later ones.

    It calls ``mechanism`` with its input, then ``LATER`` times with the second of ``pair``, and returns the projections
    of all outputs onto ``known`` (d,).
    """
    unit = known / known.norm()

    def sequence(given: Any) -> Tensors:
        calls = [mechanism(given), *(mechanism(pair.second) for _ in range(LATER))]
        return {"the update's direction": torch.stack([flattened(sent) @ unit for sent in calls])}

    return sequence


def carries_over(mechanism: Mechanism, pair: Neighbors, known: Tensor, number: int) -> bool:
    """Return whether earlier calls with a unit (example or client) show in later outputs without it, as by momentum.

    ``pair``: inputs with and without the unit. ``known``: direction (d,) onto which outputs are projected. ``number``:
    compared outputs for each input.
    """
    if isinstance(mechanism, ManyAtOnce):
        return False
    unit, seen = known / known.norm(), np.empty((2, number))
    for place in range(number):
        for side, given in enumerate((pair.first, pair.second)):
            for _ in range(BEFORE):
                mechanism(given)
            seen[side, place] = float(flattened(mechanism(pair.second)) @ unit)
    return measured_mu(seen[0], seen[1], error=1e-4) > 0


def _judged(
    claim: Claim,
    found: Pilot,
    drawn: Drawn,
    bare: Sequence[Uncovered],
    *,
    clip_norm: float | None,
    gaussian: bool,
    level: float,
) -> MechanismCheck:
    gaussian = gaussian and claim.delta > 0 and drawn.gaussian

    def bounds(error: float) -> tuple[float, float | None]:
        if not gaussian:
            return drawn.epsilon(error), None
        return drawn.epsilon(error / 2), claim.total(drawn.mu(error / 2))

    epsilon, total = bounds(1 - level)
    strict = max(bound or 0.0 for bound in bounds(1 - ACCUSATION))
    noticed = None
    if gaussian and claim.delta > 0 and math.isfinite(claim.epsilon):
        noticed = claim.total(noticed_mu(claim.mu, len(drawn.first), error=(1 - ACCUSATION) / 2))
    contradicted = math.isfinite(claim.epsilon) and (strict > claim.epsilon or bool(bare))
    return MechanismCheck(
        claim=claim,
        epsilon=epsilon,
        epsilon_if_gaussian=total,
        confidence=level,
        showable=drawn.showable((1 - level) / 2 if gaussian else 1 - level),
        noticed=noticed,
        draws=drawn.draws,
        compared=found.neighbors.what,
        by=drawn.statistics.names[drawn.widest],
        contradicted=contradicted,
        reason=_reason(claim, found, drawn, bare, clip_norm) if contradicted else "",
        noise_std=0.0 if bare else drawn.noise_std,
        moved=max([each.moved for each in bare], default=0.0) or drawn.moved,
        bare=tuple(dict.fromkeys(name for each in bare for name in each.arrays)),
        estimate=claim.total(drawn.moved / drawn.pooled_std) if gaussian else None,
    )


def _worst(
    mechanism: Mechanism, pairs: Sequence[Neighbors], places: Mapping[str, slice], *, most: int, preferred: Neighbors
) -> tuple[Pilot, Tensor | None]:
    """Return a few outputs on the pair that is easiest to distinguish, and the difference (d,) of its inputs if known.

    ``places``: slice of each array in an output. ``most``: most draws per neighbor. ``preferred``: pair that is taken
    unless another is clearly easier.
    """
    kept = list(pairs)
    for draws, number in PILOT:
        if len(kept) > number or number == 1:
            rated = []
            for pair in counted("pair of neighbors", kept):
                known, drawn = _known(pair, places), pilot(mechanism, pair, min(draws, most))
                directions = [] if known is None else list(directions_of(known, places).values())
                rated.append((drawn.separation(directions), drawn, known))
            rated.sort(key=lambda each: (-each[0], -float(each[1].shift.norm())))
            kept = [drawn.neighbors for _, drawn, _ in rated[:number]]
            if preferred not in kept:
                kept.append(preferred)
    usual = next(each for each in rated if each[1].neighbors is preferred)
    chance = 2 * math.sqrt(2 / min(PILOT[-1][0], most))
    return usual[1:] if rated[0][0] < usual[0] + chance else rated[0][1:]


Pairs = Neighbors | Sequence[Neighbors]


def _pairs(
    claim: Claim, *, like: Tensors | None, clip_norm: float | None, neighbors: Pairs | None, seed: int
) -> list[Neighbors]:
    if neighbors is not None:
        return [neighbors] if isinstance(neighbors, Neighbors) else list(neighbors)
    if like is None:
        raise UserError(
            "check_mechanism is expected to know what an update looks like, but got neither; give"
            " like=dict(model.named_parameters()), or neighbors=."
        )
    norm = checks.number("clip_norm", 1.0 if clip_norm is None else clip_norm, above=0, example=1.0)
    return list(update_neighbors(like, norm=norm, replaced=claim.neighbors == "replace", seed=seed))


def update_neighbors(like: Tensors, *, norm: float, replaced: bool, seed: int) -> Iterable[Neighbors]:
    """Yield neighboring inputs: an update and zero, for several directions and norms of the update.

    If neighbors exchange a unit (``replaced``), the second input is the negated update. ``like``: tensors with an
    update's names and shapes. ``norm``: clipping norm.
    """
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
    if neighbors.shift is not None:
        return flattened(neighbors.shift)
    if not (isinstance(first, Mapping) and isinstance(second, Mapping) and set(first) <= set(places)):
        return None
    if any(torch.as_tensor(value).numel() != places[name].stop - places[name].start for name, value in first.items()):
        return None
    known = torch.zeros(max(place.stop for place in places.values()), dtype=torch.float64)
    for name, value in first.items():
        known[places[name]] = flattened({name: value}) - flattened({name: second[name]})
    return known


ROUND_LIKE = 10_000_001  # number of a round that no training reaches


def by_its_round(mechanism: Mechanism, pair: Neighbors) -> list[Uncovered]:
    """Find noise that is the same whenever a round is repeated, and so hides nothing; for :class:`ByRound` only."""
    if not isinstance(mechanism, ByRound):
        return []
    try:
        first, second = (
            torch.stack([flattened(mechanism.at(given, ROUND_LIKE + number)) for number in range(4)])
            for given in (pair.first, pair.second)
        )
    except UserError:  # a mod may refuse to answer a round again
        return []
    difference, rounded = first - second, 4 * ROUNDING * second.abs().amax(0)
    same = ((difference - difference[0]).abs() <= rounded).all(0) & (difference[0].abs() > 10 * rounded)
    noisy = (second - second[0]).abs().amax(0) > 100 * rounded
    if not bool((same & noisy).any()):
        return []
    reason = "the noise of a round follows from its number, so that two replies in one round differ by the data alone"
    return [Uncovered(reason=reason, arrays=("the reply",), moved=float(difference[0][same & noisy].norm()))]


SEEDS, FIRST = 1 << 14, 16  # number of seeds that are tried, from 0, and number of first values that are compared


@cache
def _streams(number: int) -> torch.Tensor:
    drawn, generator, legacy = list[np.ndarray](), torch.Generator(), np.random.RandomState()  # reused: slow to make
    for seed in range(SEEDS):
        legacy.seed(seed)
        drawn.append(torch.randn(number, generator=generator.manual_seed(seed)).numpy())
        drawn += [made.normal(size=number) for made in (np.random.default_rng(seed), legacy)]
    return torch.nn.functional.normalize(torch.from_numpy(np.stack(drawn).astype(np.float64)))


def by_known_seeds(mechanism: Mechanism, pair: Neighbors) -> list[Uncovered]:
    """Detect noise from generators with small seeds, by comparison with their first values in PyTorch and NumPy."""
    if isinstance(mechanism, ManyAtOnce):
        return []
    releases = [mechanism(pair.second) for _ in range(8)]
    name = next((name for name, value in releases[0].items() if 8 <= torch.as_tensor(value).numel() <= 1 << 14), None)
    if name is None:
        return []
    shape = torch.as_tensor(releases[0][name]).shape
    given = pair.second[name] if isinstance(pair.second, Mapping) and name in pair.second else torch.zeros(shape)
    noise = torch.stack([(torch.as_tensor(each[name]).double() - given.double()).reshape(-1) for each in releases])
    first = noise[:, : FIRST if noise.shape[1] >= 2 * FIRST else None]
    best = (torch.nn.functional.normalize(first) @ _streams(first.shape[1]).T).max(1)
    if len(best.indices[best.values > 1 - 1e-6].unique()) < 4:
        return []
    return [Uncovered(reason="each call seeds its noise with a small number, which anybody can try", arrays=(name,))]


MOST_UNCHANGED = 0.5  # mean number of unchanged values above which they are given as the reason
BEYOND = 1.1  # least ratio of a measured to a claimed norm to be given as the reason


def _reason(claim: Claim, found: Pilot, drawn: Drawn, bare: Sequence[Uncovered], clip_norm: float | None) -> str:
    if bare and (bare[0].moved or drawn.unchanged < MOST_UNCHANGED):
        return bare[0].reason
    if drawn.unchanged >= MOST_UNCHANGED:
        return "some values leave as they are, neither clipped nor noised"
    norms, given = found.norms[0], found.neighbors.norm
    mean, noisy = float(norms.mean()), bool((found.deviations > 0).any())
    if noisy and float(norms.std()) <= 1e-4 * mean and (given is None or mean < given / BEYOND):
        return (
            f"what leaves always has the norm {mean:.3g}: the noise is added before the clipping, which takes most of"
            " it away again"
        )
    bound = None if clip_norm is None else clip_norm * (2 if claim.neighbors == "replace" else 1)
    if reason := _not_clipped(claim, given, bound, drawn):
        return reason
    strictly = 1 - ACCUSATION
    if drawn.aligned(strictly / 10) > claim.epsilon >= claim.total(drawn.mu(strictly)):
        return "in some calls the update leaves as it is, or with far less noise than in the others"
    return _too_little_noise(claim, bound, drawn)


def _not_clipped(claim: Claim, given: float | None, bound: float | None, drawn: Drawn) -> str:
    moved = drawn.moved
    whole = given is not None and moved >= given / BEYOND
    surely = max(0.0, moved - drawn.noise_std / 10)  # less the possible noise in the mean of 1,000 draws
    clipped = not whole if bound is None else surely <= bound * BEYOND
    if clipped:
        return ""
    if given is not None and whole and (bound is None or given > bound * BEYOND):
        return f"nothing is clipped: an update of norm {given:.3g} changes what is sent by {moved:.3g}"
    return (
        f"one {claim.unit} changes what is sent by {moved:.3g}, more than the stated clipping norm {bound:.3g}"
        " (one possible cause: clipping each array by itself)"
    )


def _too_little_noise(claim: Claim, bound: float | None, drawn: Drawn) -> str:
    noise, moved = drawn.noise_std, drawn.moved if bound is None else min(drawn.moved, bound)
    needed = math.inf if claim.delta == 0 or not claim.mu else moved / claim.mu
    if claim.delta == 0 or noise == 0 or noise >= needed:  # the size of the noise is not what is wrong
        return f"{drawn.statistics.names[drawn.tests[0][0]]} reveals the {claim.unit} more often than the claim allows"
    once = needed / math.sqrt(claim.rounds)
    over = "" if claim.rounds == 1 else f" over {claim.rounds} rounds"
    enough = f" (one round alone needs {once:.3g})" if claim.rounds > 1 and noise >= once / 1.05 else ""
    return (
        f"one {claim.unit} changes what is sent by {moved:.3g}; the noise's standard deviation is {noise:.3g}, and the"
        f" claim{over} needs {needed:.3g}{enough}"
    )
