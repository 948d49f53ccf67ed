"""``attack=auto``: exact solutions if possible, else the best of several descents."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fl_privacy.attacks.attack import Progress, Report, even_share, no_progress, part_of, seconds_left, within
from fl_privacy.attacks.auto.attempts import Winner
from fl_privacy.attacks.auto.budget import (
    EVALUATIONS,
    LEAST,
    SOLVED,
    Budget,
    affordable,
    expect_budget,
    how_to_repeat,
    most_attempts,
    rungs,
    seconds_of,
    time_of_one,
)
from fl_privacy.attacks.auto.likeliest import (
    ON_THE_WAY,
    ROUNDS_RACED,
    likelier,
    likeliest,
    on_the_way,
    read_blindly,
    too_many_steps,
)
from fl_privacy.attacks.auto.race import Race
from fl_privacy.attacks.auto.sub_attacks import entries
from fl_privacy.attacks.auto.tables import TableMembers
from fl_privacy.attacks.auto.texts import TextMembers
from fl_privacy.attacks.exact import CocktailParty, ExactInversion
from fl_privacy.attacks.exact.attack import BLOCKS
from fl_privacy.attacks.exact.certificate import ROUNDING, Reproduction, model_as_sent
from fl_privacy.attacks.exact.hidden_layer import HiddenFeatures, first_hidden_layer, hidden_features
from fl_privacy.attacks.feature_inversion import ModelInversion
from fl_privacy.attacks.feature_presets import model_inversion
from fl_privacy.attacks.gradient_inversion import GradientInversion
from fl_privacy.attacks.gradient_inversion.evident_defense import seen_through
from fl_privacy.attacks.gradient_inversion.grouping import Group, attack_in_groups, failed
from fl_privacy.attacks.gradient_inversion.sme import SurrogateModel
from fl_privacy.attacks.likelihood import MaximumAPosteriori
from fl_privacy.checks import one_of, whole
from fl_privacy.effects import Transformed
from fl_privacy.progress import counted
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, Certainty, Observation, Reconstruction
from fl_privacy.types.modality import ROWS, TEXTS, Modality, modality_of

logger = logging.getLogger(__name__)

_NO_DESCENT = 1e-2
"""Share of squared features left behind residual blocks below which no descent on the whole update, which fails there,
starts from the solution."""

_SHOWN, _LIKELIEST = 0.1, 0.3
"""Shares of the progress after the exact solutions, and after the likeliest images."""


_MEMBERS: Mapping[Modality, type[TextMembers] | type[TableMembers]] = {TEXTS: TextMembers, ROWS: TableMembers}
"""Attacks on examples other than images."""

Given = tuple[Batch, str]
"""Images of a victim that one may start from, and the attack that found them."""


@dataclass(frozen=True, kw_only=True)
class AutoAttack:
    """The strongest attacker without a setting, like AutoAttack (Croce and Hein 2020) for gradient inversion.

    Exact solutions come first: ``attack=cocktail_party`` for batches, then ``attack=exact``. Victims that are proven,
    or whose update is reproduced to rounding, need no descent.

    For the others descents from several starts compete under successive halving. Smooth models get L-BFGS on angle and
    distance of the updates, others signed Adam with little and with much total variation. Batch-norm statistics are
    used if they were sent. Unproven solutions are starts, too. Features leaked by a hidden layer in front of a ReLU
    give labels to all, and one attempt is held to them. All answer a defense that is known or that the update shows
    (zeros, few levels, empty columns, noise). If it leaves fewer values than pixels, or added noise, images are smooth
    (:mod:`fl_privacy.attacks.gradient_inversion.noise`).

    Attributes:
        budget: work for a victim: ``quick``, ``standard`` or ``thorough``, reproducible numbers of evaluations; or
            seconds, not reproducible, shared among all victims. Exact solutions take at most three quarters of the
            seconds. An attempt always has 25 evaluations.
        evaluations: evaluations of loss and gradient for each victim, instead of ``budget``. The number logged for a
            budget in seconds repeats its descents. It repeats their starts unless a search for exact solutions took
            more than ``evaluations / 12`` rounds or was cut by the clock.
        device: device of the computation; ``None``: that of the values sent.
        most_victims: most victims in one chunk; ``None``: found from the free memory.
    """

    budget: Budget | float = "standard"
    evaluations: int | None = None
    dtype: Literal["float32", "float64"] = "float32"
    device: str | None = None
    most_victims: int | None = None

    def __post_init__(self) -> None:
        expect_budget(self.budget, self.evaluations)
        one_of("attack.dtype", self.dtype, ("float32", "float64"))
        if self.most_victims is not None:
            whole("attack.most_victims", self.most_victims, at_least=1, example=64)

    def __call__(
        self, observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
    ) -> list[Reconstruction]:
        kinds = {modality_of(observation.model) for observation in observations}
        if len(kinds) == 1 and (own := _MEMBERS.get(kinds.pop())) is not None:
            members = own(evaluations=self._named, device=self.device, most_victims=self.most_victims)
            with within(len(observations) * self._seconds):
                return members(observations, seed=seed, progress=progress)
        left = len(observations)
        with within(left * self._seconds):

            def attack(group: Group, report: Report) -> dict[int, Reconstruction]:
                nonlocal left
                size = len(group.observations)
                with within(seconds_left() * size / max(size, left)):  # victims that are attacked again no longer count
                    left -= size
                    return self._attack(group, seed, report)

            return attack_in_groups(observations, attack, progress=progress, see=seen_through)

    @property
    def _named(self) -> int | None:
        """Return the evaluations of a victim; ``None`` for a budget in seconds."""
        return self.evaluations or EVALUATIONS.get(str(self.budget))

    @property
    def _seconds(self) -> float:
        return math.inf if self._named else float(self.budget)

    def _attack(self, group: Group, seed: int, report: Report) -> dict[int, Reconstruction]:
        with within(SOLVED * seconds_left()) as limit:
            results, partly = _solved(group, seed, self._named, part_of(report, 0.0, _SHOWN))
            rest = {position: o for position, o in group.observations.items() if position not in results}
            if not rest:
                return results
            earlier = [
                Group({position: one.observations[position] for position in rest}, one.earlier) for one in group.earlier
            ]
            group = Group(rest, earlier)
            features = _features_of(group, seed) if group.first.knowledge.bounds is None else {}
        blind = read_blindly(group, seed, part_of(report, _SHOWN, 1.0))
        if len(blind) == len(rest):
            return results | blind
        steps = SurrogateModel(dtype=self.dtype, device=self.device)
        at_once = on_the_way(group, steps, self._named, seed, part_of(report, _SHOWN, _LIKELIEST))
        if too_many_steps(group.first) and len(at_once) == len(rest):
            return results | at_once
        for position, one in at_once.items():
            partly.setdefault(position, []).extend([(one.batch, one.member)] if one.batch else [])
        answers = likeliest(group, self._likeliest, self._named, seed, part_of(report, _SHOWN, _LIKELIEST))
        group = Group(group.observations, group.earlier[-ROUNDS_RACED + 1 :])
        race, evaluations = self._race(group, partly, features, seed)
        if race.attempts and self._seconds < math.inf:
            logger.info(how_to_repeat(evaluations, len(race.attempts), cut=limit.cut))
        race.run(rungs(evaluations, race.most), part_of(report, _LIKELIEST if answers else _SHOWN, 1.0))
        failures = {position: failed(group.observations[position], why) for position, why in race.failures.items()}
        model = model_as_sent(group.first)
        found = {
            position: _reconstruction(Reproduction(group.observations[position], model), race.winner(position))
            for position in race.attempts
        }
        return results | failures | likelier(answers, found) | blind

    def _race(
        self, group: Group, partly: dict[int, list[Given]], features: dict[int, HiddenFeatures], seed: int
    ) -> tuple[Race, int]:
        """Set up the race, with the evaluations given or affordable; a start that is no solution replaces another."""
        started = any(found_by == ON_THE_WAY for given in partly.values() for _, found_by in given)

        def entered(evaluations: int) -> Race:
            own = entries(group.first, max(1, most_attempts(evaluations) - started), self._placed)
            race = Race(group, own, seed, features=features)
            for position, given in partly.items():
                for batch, found_by in given:
                    race.add(position, batch, found_by)
            return race

        if self._named is not None:
            return entered(self._named), self._named
        race = entered(LEAST)
        if not race.attempts or not seconds_left():
            return race, LEAST
        each = time_of_one(lambda evaluations: len(race.attempts) * race.seconds_per_evaluation(evaluations))
        found = affordable(seconds_left() / each, race.most - 1)
        return (race if most_attempts(found) == 1 else entered(found)), found

    @property
    def _likeliest(self) -> MaximumAPosteriori:
        return MaximumAPosteriori(dtype=self.dtype, device=self.device, most_victims=self.most_victims)

    def _placed(self, attack: GradientInversion) -> GradientInversion:
        return replace(attack, dtype=self.dtype, device=self.device, most_victims=self.most_victims)


def _solved(
    group: Group, seed: int, evaluations: int | None, report: Report
) -> tuple[dict[int, Reconstruction], dict[int, list[Given]]]:
    """Return the victims solved by equations, and images from which others may start, by position."""
    if group.first.knowledge.features is not None:
        return _from_features(group, seed, evaluations, report), {}
    if any(isinstance(part.effect, Transformed) for part in group.first.knowledge.defense or ()):
        return {}, {}  # equations give the transformed images
    if group.first.knowledge.bounds is not None:
        return {}, {}  # equations take all of a gradient
    rounds = max(1, evaluations // 12) if evaluations else 400
    apart = _taken_apart(group, seed, steps=min(20, rounds), report=part_of(report, 0.0, 0.5))
    results = {position: one for position, one in apart.items() if one.certainty is not Certainty.APPROXIMATE}
    rest = {position: o for position, o in group.observations.items() if position not in results}
    exact = ExactInversion(rounds=min(400, rounds), evaluations=max(4, evaluations or EVALUATIONS["standard"]))
    partly = dict[int, list[Given]]()
    solved = exact(list(rest.values()), seed=seed, progress=_shares(part_of(report, 0.5, 1.0)))
    for position, one in zip(rest, solved, strict=True):
        if one.member == BLOCKS and one.loss is not None and one.loss < _NO_DESCENT:
            results[position] = one
        elif one.certainty is not Certainty.APPROXIMATE:
            results[position] = replace(one, member="exact")
        else:
            found = [replace(one, member="exact"), *([apart[position]] if position in apart else [])]
            partly[position] = [(each.batch, each.member) for each in found if each.batch is not None]
    return results, partly


def _taken_apart(group: Group, seed: int, *, steps: int, report: Report) -> dict[int, Reconstruction]:
    if group.first.upload.num_examples == 1:
        return {}
    found = CocktailParty(steps=steps)(list(group.observations.values()), seed=seed, progress=_shares(report))
    return {
        position: replace(one, member="cocktail party")
        for position, one in zip(group.observations, found, strict=True)
        if one.batch is not None
    }


def _features_of(group: Group, seed: int) -> dict[int, HiddenFeatures]:
    """Find features, by position, that a later fully connected layer leaks exactly."""
    path = first_hidden_layer(group.first)
    if path is None:
        return {}
    found, model = {}, model_as_sent(group.first)
    for number, (position, observation) in enumerate(counted("hidden features", list(group.observations.items()))):
        rng = derive_generator(seed, "hidden", str(observation.id))
        with even_share(len(group.observations) - number):
            own = hidden_features(Reproduction(observation, model), path, rng)
        if own is not None:
            found[position] = own
    return found


def _from_features(group: Group, seed: int, evaluations: int | None, report: Report) -> dict[int, Reconstruction]:
    asked = list(group.observations.values())

    def inversion(evaluations: int) -> ModelInversion:
        iterations = max(2, evaluations // LEAST)
        return model_inversion(lr=1.0, line_search="strong_wolfe", iterations=iterations, restarts=1)

    if evaluations is None:
        each = time_of_one(
            lambda number: seconds_of(lambda: inversion(number)(asked, seed=seed)) / max(2 * LEAST, number)
        )
        evaluations = max(2 * LEAST, int(min(EVALUATIONS["standard"], seconds_left() / each)))
        logger.info(how_to_repeat(evaluations, len(asked), cut=False))
    found = inversion(evaluations)(asked, seed=seed, progress=_shares(report))
    pairs = zip(group.observations, found, strict=True)
    return {position: replace(one, member="model inversion") for position, one in pairs if one.failure is None}


def _shares(report: Report) -> Progress:
    return lambda done, total: report(done / max(total, 1))


def _reconstruction(reproduction: Reproduction, winner: Winner | None) -> Reconstruction:
    observation = reproduction.observation
    if winner is None:
        return failed(observation, "The objective is not finite at any start; check the update.")
    certainty = Certainty.APPROXIMATE
    if winner.mismatch < ROUNDING and reproduction.distance(winner.batch) < ROUNDING:
        certainty = Certainty.CONSISTENT
    return Reconstruction(
        id=observation.id,
        batch=winner.batch,
        loss=winner.mismatch,
        history=winner.history,
        film=winner.film,
        label_source=winner.label_source,
        countermeasures=winner.countermeasures,
        certainty=certainty,
        member=winner.member,
    )
