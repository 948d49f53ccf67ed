"""``attack=auto``: exact solutions if possible, else the best of several descents."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from fl_privacy.attacks.attack import Report, even_share, part_of, seconds_left, within
from fl_privacy.attacks.auto import sub_attacks
from fl_privacy.attacks.auto.other_modalities import TableMembers, TextMembers
from fl_privacy.attacks.auto.race import Race
from fl_privacy.attacks.exact import CocktailParty, ExactInversion
from fl_privacy.attacks.exact.attack import BLOCKS
from fl_privacy.attacks.exact.certificate import ROUNDING, Reproduction, model_as_sent
from fl_privacy.attacks.exact.first_layer import HiddenFeatures, first_hidden_layer, hidden_features
from fl_privacy.attacks.gradient_inversion import GradientInversion, evident_defense, sme, targets
from fl_privacy.attacks.gradient_inversion.grouping import Group, Groups, failed
from fl_privacy.attacks.likelihood import BlindDeconvolution, MaximumAPosteriori
from fl_privacy.attacks.likelihood.attack import Posterior, WithPosterior
from fl_privacy.attacks.presets import model_inversion
from fl_privacy.checks import number, one_of, whole
from fl_privacy.effects import OtherImages, PrivateLayers, PrivateLoss, Transformed
from fl_privacy.models.gradients import number_of_steps
from fl_privacy.progress import Progress, counted, no_progress
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, Certainty, Observation, Reconstruction
from fl_privacy.types.modality import ROWS, TEXTS, Modality, modality_of

logger: logging.Logger = logging.getLogger(__name__)
Found = Mapping[int, Reconstruction]  # a stage's reconstructions by position; ``None`` if the stage does not apply


@dataclass
class StageState:
    """State of ``attack=auto`` for one group: the updates left to attack, and results by index in the attacked list."""

    group: Group
    seed: int
    evaluations: int | None = None  # evaluations of a victim; ``None`` for a budget in seconds
    dtype: Literal["float32", "float64"] = "float32"
    device: str | None = None
    most_victims: int | None = None
    cut: bool = False  # ``True`` once the clock has ended a search for exact solutions
    results: dict[int, Reconstruction] = field(default_factory=dict)
    starts: dict[int, list[tuple[Batch, str]]] = field(default_factory=dict)  # images, with the attack that found them
    features: dict[int, HiddenFeatures] = field(default_factory=dict)  # exact inputs of a hidden fully connected layer
    likeliest: dict[int, WithPosterior] = field(default_factory=dict)  # results of :func:`find_likeliest`

    @property
    def victims(self) -> Mapping[int, Observation]:
        return self.group.observations

    def take(self, found: Found) -> None:
        self.results |= found
        self.group = self.group.only(position for position in self.victims if position not in found)


Stage = tuple[str, Callable[[StageState, Report], Found | None], float]
"""Name, attack on the remaining victims (``None`` if inapplicable), and the share of the progress bar at its end."""


def _in_units(report: Report) -> Progress:
    return lambda done, total: report(done / max(total, 1))


def invert_features(state: StageState, report: Report) -> Found | None:
    """Reconstruct images from the features that a client shared; ``None`` if it shared none."""
    if state.group.first.knowledge.features is None:
        return None
    asked, evaluations = list(state.victims.values()), state.evaluations

    def inverted(evaluations: int, progress: Progress) -> list[Reconstruction]:
        iterations = max(2, evaluations // sub_attacks.LEAST)
        attack = model_inversion(lr=1.0, line_search="strong_wolfe", iterations=iterations, restarts=1)
        return attack(asked, seed=state.seed, progress=progress)

    if evaluations is None:
        each = sub_attacks.time_of_one(
            lambda number: (
                sub_attacks.seconds_of(lambda: inverted(number, no_progress)) / max(2 * sub_attacks.LEAST, number)
            )
        )
        evaluations = max(2 * sub_attacks.LEAST, int(min(sub_attacks.EVALUATIONS["standard"], seconds_left() / each)))
        logger.info(sub_attacks.how_to_repeat(evaluations, len(asked), cut=False))
    pairs = zip(state.victims, inverted(evaluations, _in_units(report)), strict=True)
    return {position: replace(one, member="model inversion") for position, one in pairs if one.failure is None}


def _has_equations(first: Observation) -> bool:
    known = first.knowledge
    transformed = any(isinstance(part.effect, Transformed) for part in known.defense or ())
    return known.features is None and not transformed


def _rounds(state: StageState) -> int:
    return min(400, max(1, state.evaluations // 12)) if state.evaluations else 400


def separate(state: StageState, report: Report) -> Found | None:
    """Return certain results of :class:`CocktailParty`; store uncertain ones as starts of later gradient descents."""
    first = state.group.first
    if not _has_equations(first) or first.knowledge.bounds is not None or first.upload.num_examples == 1:
        return None
    attack = CocktailParty(steps=min(20, _rounds(state)))
    found = attack(list(state.victims.values()), seed=state.seed, progress=_in_units(report))
    results = {}
    for position, one in zip(state.victims, found, strict=True):
        if one.batch is not None and one.certainty is Certainty.APPROXIMATE:
            state.starts[position] = [(one.batch, "cocktail party")]
        elif one.batch is not None:
            results[position] = replace(one, member="cocktail party")
    return results


_NO_DESCENT = 1e-2  # unexplained share of squared features below which a solution behind residual blocks is final


def solve(state: StageState, report: Report) -> Found | None:
    """Return (nearly) certain results of :class:`ExactInversion`; store others as starts of later gradient descents."""
    if not _has_equations(state.group.first):
        return None
    evaluations = max(4, state.evaluations or sub_attacks.EVALUATIONS["standard"])
    attack = ExactInversion(rounds=_rounds(state), evaluations=evaluations)
    solved = attack(list(state.victims.values()), seed=state.seed, progress=_in_units(report))
    results = {}
    for position, one in zip(state.victims, solved, strict=True):
        if one.member == BLOCKS and one.loss is not None and one.loss < _NO_DESCENT:
            results[position] = one
        elif one.certainty is not Certainty.APPROXIMATE:
            results[position] = replace(one, member="exact")
        elif one.batch is not None:
            state.starts.setdefault(position, []).insert(0, (one.batch, "exact"))
    return results


def solve_features(state: StageState, report: Report) -> Found | None:
    """Store the exact inputs of a hidden linear layer in ``state.features`` for later stages; return no results."""
    if state.group.first.knowledge.bounds is not None:
        return None
    path = first_hidden_layer(state.group.first)
    if path is None:
        return {}
    model = model_as_sent(state.group.first)
    for done, (position, observation) in enumerate(counted("hidden features", list(state.victims.items()))):
        rng = derive_generator(state.seed, "hidden", str(observation.id))
        with even_share(len(state.victims) - done):
            found = hidden_features(Reproduction(observation, model), path, rng)
        if found is not None:
            state.features[position] = found
    return {}


def deconvolve(state: StageState, report: Report) -> Found | None:
    """Reconstruct images by blind deconvolution if the clients' first layers are private and stay unknown."""
    known = state.group.first.knowledge
    if known.private is None or known.colluder is not None or known.features is not None:
        return None
    found = BlindDeconvolution().solve(state.group, state.seed, report)
    return {position: one for position, one in found.items() if one.failure is None}


_SHARE = 0.25  # share of a victim's evaluations, or seconds, for its likeliest images, or a surrogate model's

_SEVERAL_STEPS, _MANY_STEPS = 4, 32
"""Local steps from which the surrogate model is tried, and above which a batch of several images is not replayed."""

_SURROGATE = 1000  # most iterations
ON_THE_WAY = "surrogate model"  # name of results at an intermediate model, from which descents start


def surrogate(state: StageState, report: Report) -> Found | None:
    """Reconstruct images by :class:`SurrogateModel`, at a model interpolated between the sent and the returned one.

    Results for several images and many local steps are returned; others only become starts of later gradient descents.
    """
    first, known = state.group.first, state.group.first.knowledge
    plan, size = first.plan, first.upload.num_examples
    if known.defense or known.private is not None or known.features is not None or plan.shares == "gradient":
        return None
    if (steps := number_of_steps(size, plan)) < _SEVERAL_STEPS:
        return None
    too_many_steps = size > 1 and steps > _MANY_STEPS
    share = 1.0 if too_many_steps else _SHARE
    number = _SURROGATE if state.evaluations is None else max(_LEAST_ITERATIONS, int(share * state.evaluations))
    attack = sme.SurrogateModel(dtype=state.dtype, device=state.device, iterations=min(_SURROGATE, number))
    with within(seconds_left() if state.evaluations else share * seconds_left()):
        found = attack.solve(state.group, state.seed, report)
    if too_many_steps and all(one.batch is not None for one in found.values()):
        return {position: replace(one, member=ON_THE_WAY) for position, one in found.items()}
    for position, one in found.items():
        state.starts.setdefault(position, []).extend([(one.batch, ON_THE_WAY)] if one.batch is not None else [])
    return {}


_MOST_ITERATIONS, _LEAST_ITERATIONS, _ATTEMPTS = 150, 25, 2


def find_likeliest(state: StageState, report: Report) -> Found | None:
    """Store the likeliest images under the known defense in ``state.likeliest``, for :func:`descend`."""
    parts = state.group.first.knowledge.defense
    if not parts or any(isinstance(part.effect, PrivateLoss | PrivateLayers | OtherImages) for part in parts):
        return None
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


ROUNDS_RACED = 8  # most rounds of the same examples that descents match; the likelihood takes all


def descend(state: StageState, report: Report) -> Found:
    """Return each victim's best gradient descent, or its image from :func:`find_likeliest` if that is more probable."""
    race, evaluations = begin_race(state)
    if race.attempts and state.evaluations is None:
        logger.info(sub_attacks.how_to_repeat(evaluations, len(race.attempts), cut=state.cut))
    race.run(sub_attacks.rungs(evaluations, race.most), report)
    failures = {position: failed(state.victims[position], why) for position, why in race.failures.items()}
    model, found = model_as_sent(state.group.first), {}
    for position in race.attempts:
        best = race.best(position)
        if best.batch is not None and best.loss < ROUNDING:
            reproduced = Reproduction(state.victims[position], model).distance(best.batch) < ROUNDING
            best = replace(best, certainty=Certainty.CONSISTENT if reproduced else best.certainty)
        found[position] = best
    return failures | likelier(state.likeliest, found)


def begin_race(state: StageState) -> tuple[Race, int]:
    """Return a :class:`Race` of gradient descents, and the evaluations per victim: as set, or as time allows."""
    started = any(found_by == ON_THE_WAY for given in state.starts.values() for _, found_by in given)
    group = Group(state.group.observations, state.group.earlier[-ROUNDS_RACED + 1 :])

    def placed(attack: GradientInversion) -> GradientInversion:
        return replace(attack, dtype=state.dtype, device=state.device, most_victims=state.most_victims)

    def enter(evaluations: int) -> Race:
        own = sub_attacks.entries(group.first, max(1, sub_attacks.most_attempts(evaluations) - started), placed)
        race = Race(group, own, state.seed, features=state.features)
        for position, given in state.starts.items():
            for batch, found_by in given:
                race.add(position, batch, found_by)
        return race

    if state.evaluations is not None:
        return enter(state.evaluations), state.evaluations
    race = enter(sub_attacks.LEAST)
    if not race.attempts or not seconds_left():
        return race, sub_attacks.LEAST
    each = sub_attacks.time_of_one(lambda evaluations: len(race.attempts) * race.seconds_per_evaluation(evaluations))
    found = sub_attacks.affordable(seconds_left() / each, race.most - 1)
    return (race if sub_attacks.most_attempts(found) == 1 else enter(found)), found


def likelier(likeliest: Mapping[int, WithPosterior], found: Found) -> dict[int, Reconstruction]:
    """Return each victim's more probable result: that of gradient descent, ``found``, or that in ``likeliest``."""
    result, chunks = dict(found), dict[Posterior, list[int]]()
    for position, answer in likeliest.items():
        if answer.posterior is not None and position in found:
            chunks.setdefault(answer.posterior, []).append(position)
    for posterior, positions in chunks.items():
        losses = posterior.losses({likeliest[position].row: found[position].batch for position in positions})
        for position in positions:
            descent, own = found[position], likeliest[position].reconstruction
            exact = descent.certainty is not Certainty.APPROXIMATE and descent.batch is not None
            if not exact and own.batch is not None and not losses[likeliest[position].row] < own.loss:
                result[position] = own
    return result


SOLUTIONS: tuple[Stage, ...] = (
    ("model inversion", invert_features, 0.1),
    ("cocktail party", separate, 0.05),
    ("exact", solve, 0.1),
    ("hidden features", solve_features, 0.1),
)
"""Stages that share at most three quarters of a budget in seconds, in order."""

SEARCHES: tuple[Stage, ...] = (
    ("blind deconvolution", deconvolve, 0.9),
    ("surrogate model", surrogate, 0.3),
    ("maximum a posteriori", find_likeliest, 0.3),
    ("descents", descend, 1.0),
)
"""Stages on the remaining victims, in order."""

_MEMBERS: Mapping[Modality, type[TextMembers] | type[TableMembers]] = {TEXTS: TextMembers, ROWS: TableMembers}


@dataclass(frozen=True, kw_only=True)
class AutoAttack:
    """Attack that combines the strongest attacks without any setting, like AutoAttack (Croce and Hein 2020).

    Exact solutions come first: ``attack=cocktail_party`` for batches, then ``attack=exact``. For the other victims,
    gradient descents from different first images compete by successive halving: L-BFGS on smooth models, signed Adam on
    others. Some start from exact solutions that could not be verified. A known or inferred defense is countered.

    Attributes:
        budget: work for a victim. ``quick``, ``standard`` and ``thorough`` are reproducible numbers of evaluations. A
            number is seconds, pooled over all victims; results are then not reproducible.
        evaluations: evaluations of loss and gradient for each victim; replaces ``budget``. A run limited by seconds
            logs the number that repeats it. Images then differ only if the time limit stopped the search for exact
            solutions, or that took more than ``evaluations / 12`` rounds.
        device: device of the computation; ``None``: that of the sent values.
        most_victims: most victims in one chunk; ``None``: found from the free memory.
    """

    budget: sub_attacks.Budget | float = "standard"
    evaluations: int | None = None
    dtype: Literal["float32", "float64"] = "float32"
    device: str | None = None
    most_victims: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.budget, str):
            number("attack.budget", self.budget, above=0, example=30)
        else:
            one_of("attack.budget, unless seconds for each victim,", self.budget, sub_attacks.EVALUATIONS)
        if self.evaluations is not None:
            whole("attack.evaluations", self.evaluations, at_least=1, example=sub_attacks.EVALUATIONS["standard"])
        one_of("attack.dtype", self.dtype, ("float32", "float64"))
        if self.most_victims is not None:
            whole("attack.most_victims", self.most_victims, at_least=1, example=64)

    def __call__(
        self, observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
    ) -> list[Reconstruction]:
        kinds = {modality_of(observation.model) for observation in observations}
        with within(len(observations) * (math.inf if self._evaluations else float(self.budget))):
            if len(kinds) == 1 and (own := _MEMBERS.get(kinds.pop())) is not None:
                members = own(evaluations=self._evaluations, device=self.device, most_victims=self.most_victims)
                return members(observations, seed=seed, progress=progress)
            left = len(observations)
            groups = Groups(observations, progress=progress, see=evident_defense.undo_evident_defenses)
            for group in groups:
                size = len(group.observations)
                with groups.attempt(group) as report, within(seconds_left() * size / max(size, left)):
                    left -= size  # victims that are attacked again no longer count
                    groups.results |= self._attack(group, seed, report)
            return groups.reconstructions()

    @property
    def _evaluations(self) -> int | None:
        return self.evaluations or sub_attacks.EVALUATIONS.get(str(self.budget))

    def _attack(self, group: Group, seed: int, report: Report) -> dict[int, Reconstruction]:
        state = StageState(group, seed, self._evaluations, self.dtype, self.device, self.most_victims)
        done, why = 0.0, ""
        for stages, share in ((SOLUTIONS, sub_attacks.SOLVED), (SEARCHES, 1.0)):
            with within(share * seconds_left()) as limit:
                for name, run, until in stages:
                    if not state.victims:
                        break
                    try:
                        found = run(state, part_of(report, done, max(done, until)))
                    except targets.NotAttackableError as reason:
                        why, found = str(reason), {}
                        logger.debug("%s left out: %s", name, why)
                    if found is not None:
                        state.take(found)
                        done = max(done, until)
            state.cut = state.cut or limit.cut
        return state.results | {position: failed(one, why) for position, one in state.victims.items()}
