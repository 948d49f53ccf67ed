"""The stages of ``attack=auto``: each reconstructs some of a group's victims, or leaves starts to later ones."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from fl_privacy.attacks.attack import Progress, Report, even_share, seconds_left, within
from fl_privacy.attacks.auto.race import Race
from fl_privacy.attacks.auto.sub_attacks import (
    EVALUATIONS,
    LEAST,
    affordable,
    entries,
    how_to_repeat,
    most_attempts,
    rungs,
    seconds_of,
    time_of_one,
)
from fl_privacy.attacks.exact import CocktailParty, ExactInversion
from fl_privacy.attacks.exact.attack import BLOCKS
from fl_privacy.attacks.exact.certificate import ROUNDING, Reproduction, model_as_sent
from fl_privacy.attacks.exact.first_layer import HiddenFeatures, first_hidden_layer, hidden_features
from fl_privacy.attacks.feature_presets import model_inversion
from fl_privacy.attacks.gradient_inversion import GradientInversion
from fl_privacy.attacks.gradient_inversion.grouping import Group, failed
from fl_privacy.attacks.gradient_inversion.sme import SurrogateModel
from fl_privacy.attacks.likelihood import BlindDeconvolution, MaximumAPosteriori
from fl_privacy.attacks.likelihood.attack import WithPosterior
from fl_privacy.effects import OtherImages, PrivateLayers, PrivateLoss, Transformed
from fl_privacy.models.gradients import number_of_steps
from fl_privacy.progress import counted
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, Certainty, Observation, Reconstruction

logger = logging.getLogger(__name__)

Found = Mapping[int, Reconstruction]
"""Reconstructions by position."""


@dataclass(kw_only=True)
class StageState:
    """The victims of a group that are left, and what stages found out about them, by position.

    Attributes:
        evaluations: evaluations of a victim; ``None`` for a budget in seconds.
        cut: ``True`` once the clock has ended a search for exact solutions.
        starts: images that one may start from, and the attacks that found them.
        features: features that a later fully connected layer leaks exactly.
        likeliest: likeliest images.
    """

    group: Group
    seed: int
    evaluations: int | None = None
    dtype: Literal["float32", "float64"] = "float32"
    device: str | None = None
    most_victims: int | None = None
    cut: bool = False
    results: dict[int, Reconstruction] = field(default_factory=dict)
    starts: dict[int, list[tuple[Batch, str]]] = field(default_factory=dict)
    features: dict[int, HiddenFeatures] = field(default_factory=dict)
    likeliest: dict[int, WithPosterior] = field(default_factory=dict)

    @property
    def victims(self) -> Mapping[int, Observation]:
        return self.group.observations

    def take(self, found: Found) -> None:
        self.results |= found
        self.group = self.group.only(position for position in self.victims if position not in found)


@dataclass(frozen=True)
class AutoStage:
    """One way to reconstruct victims.

    Attributes:
        applies: test of an observation of the group.
        run: attack on the victims left, which fails with ``NotAttackableError``.
        until: share of the progress after it.
    """

    name: str
    applies: Callable[[Observation], bool]
    run: Callable[[StageState, Report], Found]
    until: float


def _shares(report: Report) -> Progress:
    return lambda done, total: report(done / max(total, 1))


def has_features(first: Observation) -> bool:
    """Test that the client shared features of a layer."""
    return first.knowledge.features is not None


def invert_features(state: StageState, report: Report) -> Found:
    """Reconstruct images from the features of their layer that a client shared."""
    asked, evaluations = list(state.victims.values()), state.evaluations

    def inverted(evaluations: int, progress: Progress) -> list[Reconstruction]:
        iterations = max(2, evaluations // LEAST)
        attack = model_inversion(lr=1.0, line_search="strong_wolfe", iterations=iterations, restarts=1)
        return attack(asked, seed=state.seed, progress=progress)

    if evaluations is None:
        each = time_of_one(
            lambda number: seconds_of(lambda: inverted(number, _shares(lambda share: None))) / max(2 * LEAST, number)
        )
        evaluations = max(2 * LEAST, int(min(EVALUATIONS["standard"], seconds_left() / each)))
        logger.info(how_to_repeat(evaluations, len(asked), cut=False))
    pairs = zip(state.victims, inverted(evaluations, _shares(report)), strict=True)
    return {position: replace(one, member="model inversion") for position, one in pairs if one.failure is None}


def has_equations(first: Observation) -> bool:
    """Test that all of a gradient of the images themselves is known."""
    known = first.knowledge
    transformed = any(isinstance(part.effect, Transformed) for part in known.defense or ())
    return known.features is None and known.bounds is None and not transformed


def has_equations_of_batch(first: Observation) -> bool:
    """Test the same for several images."""
    return has_equations(first) and first.upload.num_examples > 1


def _rounds(state: StageState) -> int:
    """Return the rounds of a search for exact solutions."""
    return min(400, max(1, state.evaluations // 12)) if state.evaluations else 400


def separate(state: StageState, report: Report) -> Found:
    """Separate a batch by the independence of its images."""
    attack = CocktailParty(steps=min(20, _rounds(state)))
    found = attack(list(state.victims.values()), seed=state.seed, progress=_shares(report))
    results = {}
    for position, one in zip(state.victims, found, strict=True):
        if one.batch is not None and one.certainty is Certainty.APPROXIMATE:
            state.starts[position] = [(one.batch, "cocktail party")]
        elif one.batch is not None:
            results[position] = replace(one, member="cocktail party")
    return results


_NO_DESCENT = 1e-2
"""Share of squared features left behind residual blocks below which no descent on the whole update, which fails there,
starts from the solution."""


def solve(state: StageState, report: Report) -> Found:
    """Solve for images; unproven solutions are the first starts."""
    evaluations = max(4, state.evaluations or EVALUATIONS["standard"])
    attack = ExactInversion(rounds=_rounds(state), evaluations=evaluations)
    solved = attack(list(state.victims.values()), seed=state.seed, progress=_shares(report))
    results = {}
    for position, one in zip(state.victims, solved, strict=True):
        if one.member == BLOCKS and one.loss is not None and one.loss < _NO_DESCENT:
            results[position] = one
        elif one.certainty is not Certainty.APPROXIMATE:
            results[position] = replace(one, member="exact")
        elif one.batch is not None:
            state.starts.setdefault(position, []).insert(0, (one.batch, "exact"))
    return results


def has_gradient(first: Observation) -> bool:
    """Test that all of a gradient is known, not only bounds on it."""
    return first.knowledge.bounds is None


def solve_features(state: StageState, report: Report) -> Found:
    """Find features that a later fully connected layer leaks exactly; the descents use them."""
    path = first_hidden_layer(state.group.first)
    if path is None:
        return {}
    model = model_as_sent(state.group.first)
    for number, (position, observation) in enumerate(counted("hidden features", list(state.victims.items()))):
        rng = derive_generator(state.seed, "hidden", str(observation.id))
        with even_share(len(state.victims) - number):
            found = hidden_features(Reproduction(observation, model), path, rng)
        if found is not None:
            state.features[position] = found
    return {}


def has_private_convolution(first: Observation) -> bool:
    """Test that a client keeps its first layers, and no colluding client knows them."""
    known = first.knowledge
    return known.private is not None and known.colluder is None and known.features is None


def deconvolve(state: StageState, report: Report) -> Found:
    """Reconstruct images behind an unknown private convolution."""
    found = BlindDeconvolution().solve(state.group, state.seed, report)
    return {position: one for position, one in found.items() if one.failure is None}


_SHARE = 0.25
"""Share of a victim's evaluations, or seconds, for its likeliest images, or a surrogate model's."""

_SEVERAL_STEPS, _MANY_STEPS = 4, 32
"""Local steps from which the surrogate model is tried, and beyond which those over several images are not replayed:
each evaluation takes as many times as long, and their unknown order matters more than the images."""

_SURROGATE = 1000
"""Most iterations."""

ON_THE_WAY = "surrogate model"
"""Name of results at a model on the way, from which descents start."""


def has_several_steps(first: Observation) -> bool:
    """Test that an update has many undefended steps."""
    known = first.knowledge
    if known.defense or known.private is not None or known.features is not None:
        return False
    return first.plan.shares != "gradient" and number_of_steps(first.upload.num_examples, first.plan) >= _SEVERAL_STEPS


def surrogate(state: StageState, report: Report) -> Found:
    """Find images at a model between the one sent and the one returned; starts unless steps are too many to replay."""
    plan, size = state.group.first.plan, state.group.first.upload.num_examples
    too_many_steps = size > 1 and number_of_steps(size, plan) > _MANY_STEPS
    share = 1.0 if too_many_steps else _SHARE
    number = _SURROGATE if state.evaluations is None else max(_LEAST_ITERATIONS, int(share * state.evaluations))
    attack = SurrogateModel(dtype=state.dtype, device=state.device, iterations=min(_SURROGATE, number))
    with within(seconds_left() if state.evaluations else share * seconds_left()):
        found = attack.solve(state.group, state.seed, report)
    if too_many_steps and all(one.batch is not None for one in found.values()):
        return {position: replace(one, member=ON_THE_WAY) for position, one in found.items()}
    for position, one in found.items():
        state.starts.setdefault(position, []).extend([(one.batch, ON_THE_WAY)] if one.batch is not None else [])
    return {}


_MOST_ITERATIONS, _LEAST_ITERATIONS, _ATTEMPTS = 150, 25, 2


def has_likelihood(first: Observation) -> bool:
    """Test that the defense has a useful likelihood; descents answer the other effects."""
    parts = first.knowledge.defense or ()
    return bool(parts) and not any(isinstance(part.effect, PrivateLoss | PrivateLayers | OtherImages) for part in parts)


def find_likeliest(state: StageState, report: Report) -> Found:
    """Find the likeliest images, which are compared with the descents'."""
    number = _MOST_ITERATIONS if state.evaluations is None else int(_SHARE * state.evaluations / _ATTEMPTS)
    attack = MaximumAPosteriori(
        dtype=state.dtype,
        device=state.device,
        most_victims=state.most_victims,
        iterations=max(_LEAST_ITERATIONS, min(_MOST_ITERATIONS, number)),
        attempts=_ATTEMPTS,
    )
    with within(seconds_left() if state.evaluations else _SHARE * seconds_left()):
        state.likeliest = attack.explain(state.group, state.seed, report)
    return {}


ROUNDS_RACED = 8
"""Most rounds of the same examples that descents match; the likelihood takes all."""


def descend(state: StageState, report: Report) -> Found:
    """Race descents from several starts; keep the likelier of the best one and the likeliest images."""
    race, evaluations = entered(state)
    if race.attempts and state.evaluations is None:
        logger.info(how_to_repeat(evaluations, len(race.attempts), cut=state.cut))
    race.run(rungs(evaluations, race.most), report)
    failures = {position: failed(state.victims[position], why) for position, why in race.failures.items()}
    model, found = model_as_sent(state.group.first), {}
    for position in race.attempts:
        best = race.best(position)
        if best.batch is not None and best.loss < ROUNDING:
            reproduced = Reproduction(state.victims[position], model).distance(best.batch) < ROUNDING
            best = replace(best, certainty=Certainty.CONSISTENT if reproduced else best.certainty)
        found[position] = best
    return failures | likelier(state.likeliest, found)


def entered(state: StageState) -> tuple[Race, int]:
    """Set up the race, with the evaluations given or affordable; a start that is no solution replaces another."""
    started = any(found_by == ON_THE_WAY for given in state.starts.values() for _, found_by in given)
    group = Group(state.group.observations, state.group.earlier[-ROUNDS_RACED + 1 :])

    def placed(attack: GradientInversion) -> GradientInversion:
        return replace(attack, dtype=state.dtype, device=state.device, most_victims=state.most_victims)

    def enter(evaluations: int) -> Race:
        own = entries(group.first, max(1, most_attempts(evaluations) - started), placed)
        race = Race(group, own, state.seed, features=state.features)
        for position, given in state.starts.items():
            for batch, found_by in given:
                race.add(position, batch, found_by)
        return race

    if state.evaluations is not None:
        return enter(state.evaluations), state.evaluations
    race = enter(LEAST)
    if not race.attempts or not seconds_left():
        return race, LEAST
    each = time_of_one(lambda evaluations: len(race.attempts) * race.seconds_per_evaluation(evaluations))
    found = affordable(seconds_left() / each, race.most - 1)
    return (race if most_attempts(found) == 1 else enter(found)), found


def likelier(likeliest: Mapping[int, WithPosterior], found: Found) -> dict[int, Reconstruction]:
    """Return the likelier of descents' results and likeliest images, by position."""
    result = dict(found)
    chunks: dict[int, list[int]] = {}
    for position, answer in likeliest.items():
        if answer.posterior is not None and position in found:
            chunks.setdefault(id(answer.posterior), []).append(position)
    for positions in chunks.values():
        posterior = likeliest[positions[0]].posterior
        assert posterior is not None
        losses = posterior.losses({likeliest[position].row: found[position].batch for position in positions})
        for position in positions:
            descent, own = found[position], likeliest[position].reconstruction
            exact = descent.certainty is not Certainty.APPROXIMATE and descent.batch is not None
            if not exact and own.batch is not None and not losses[likeliest[position].row] < own.loss:
                result[position] = own
    return result
