"""What ``attack=auto`` makes of defenses by their likelihood, of private layers blindly, of many steps at once."""

from collections.abc import Mapping
from dataclasses import replace

from fl_privacy.attacks.attack import Report, seconds_left, within
from fl_privacy.attacks.gradient_inversion.attackable import NotAttackableError
from fl_privacy.attacks.gradient_inversion.grouping import Group
from fl_privacy.attacks.gradient_inversion.sme import SurrogateModel
from fl_privacy.attacks.likelihood.attack import MaximumAPosteriori, WithPosterior
from fl_privacy.attacks.likelihood.blind import BlindDeconvolution
from fl_privacy.effects import OtherImages, PrivateLayers, PrivateLoss
from fl_privacy.models.gradients import number_of_steps
from fl_privacy.types import Certainty, Observation, Reconstruction

Answers = Mapping[int, WithPosterior]
"""By position."""

_SHARE = 0.25
"""Of the evaluations of a victim that go into its likeliest images, and of the seconds."""

_SEVERAL_STEPS, _MANY_STEPS = 4, 32
"""Local steps from which the surrogate model is tried, and beyond which those over several images are not replayed:
each evaluation takes as many times as long, and their order, which nobody knows, decides more than what is found."""

_SURROGATE = 1000
"""Iterations at most."""

ON_THE_WAY = "surrogate model"
"""Name of what is found at a model on the way, from which descents start."""

_MOST_ITERATIONS, _LEAST_ITERATIONS, _ATTEMPTS = 150, 25, 2

ROUNDS_RACED = 8
"""Rounds of the same examples that descents match; the likelihood is of all."""

_WITHOUT_LIKELIHOOD = (PrivateLoss, PrivateLayers, OtherImages)
"""Effects that no likelihood is of; descents answer them."""


def has_likelihood(observation: Observation) -> bool:
    """Say whether the defense of ``observation``, known or evident, is one whose likelihood is worth a try."""
    parts = observation.knowledge.defense or ()
    return bool(parts) and not any(isinstance(part.effect, _WITHOUT_LIKELIHOOD) for part in parts)


def likeliest(group: Group, placed: MaximumAPosteriori, evaluations: int | None, seed: int, report: Report) -> Answers:
    """Find the likeliest images of ``group``, by position; empty where there is no likelihood.

    Args:
        group: of victims, with all rounds of theirs.
        placed: the attack on the device and in the dtype asked for.
        evaluations: of a victim; ``None`` where the clock decides.
        seed: of the attack.
        report: of the progress.
    """
    if not has_likelihood(group.first):
        return {}
    attack = sized(placed, evaluations)
    try:
        with within(seconds_left() if evaluations else _SHARE * seconds_left()):
            return attack.explain(group, seed, report)
    except NotAttackableError:
        return {}


def sized(attack: MaximumAPosteriori, evaluations: int | None) -> MaximumAPosteriori:
    """Return ``attack`` with as many iterations as its share of ``evaluations`` allows."""
    number = _MOST_ITERATIONS if evaluations is None else int(_SHARE * evaluations / _ATTEMPTS)
    return replace(attack, iterations=max(_LEAST_ITERATIONS, min(_MOST_ITERATIONS, number)), attempts=_ATTEMPTS)


def likelier(answers: Answers, found: Mapping[int, Reconstruction]) -> dict[int, Reconstruction]:
    """Return for each position of ``found`` whichever is likelier: what descents found, or the likeliest images."""
    result = dict(found)
    chunks: dict[int, list[int]] = {}
    for position, answer in answers.items():
        if answer.posterior is not None and position in found:
            chunks.setdefault(id(answer.posterior), []).append(position)
    for positions in chunks.values():
        result |= _compared({position: answers[position] for position in positions}, found)
    return result


def _compared(answers: Answers, found: Mapping[int, Reconstruction]) -> dict[int, Reconstruction]:
    """Compare what was found of the victims of one chunk."""
    posterior = next(iter(answers.values())).posterior
    assert posterior is not None
    losses = posterior.losses({answer.row: found[position].batch for position, answer in answers.items()})
    chosen = {}
    for position, answer in answers.items():
        descent, own = found[position], answer.reconstruction
        exact = descent.certainty is not Certainty.APPROXIMATE and descent.batch is not None
        if not exact and own.batch is not None and not losses[answer.row] < own.loss:
            chosen[position] = own
    return chosen


def read_blindly(group: Group, seed: int, report: Report) -> dict[int, Reconstruction]:
    """Read, by position, images behind a private convolution that nothing is known of."""
    first = group.first
    if first.knowledge.private is None or first.knowledge.colluder is not None or first.knowledge.features is not None:
        return {}
    try:
        found = BlindDeconvolution().solve(group, seed, report)
    except NotAttackableError:
        return {}
    return {position: one for position, one in found.items() if one.failure is None}


def too_many_steps(observation: Observation) -> bool:
    """Say whether the steps behind an update are too many to be replayed."""
    plan, size = observation.plan, observation.upload.num_examples
    return plan.shares != "gradient" and size > 1 and number_of_steps(size, plan) > _MANY_STEPS


def on_the_way(
    group: Group, placed: SurrogateModel, evaluations: int | None, seed: int, report: Report
) -> dict[int, Reconstruction]:
    """Find, by position, images behind many steps that nobody defended; empty where there are few."""
    first = group.first
    plan, size, known = first.plan, first.upload.num_examples, first.knowledge
    if plan.shares == "gradient" or number_of_steps(size, plan) < _SEVERAL_STEPS:
        return {}
    if known.defense or known.private is not None or known.features is not None:
        return {}
    share = 1.0 if too_many_steps(first) else _SHARE
    number = _SURROGATE if evaluations is None else max(_LEAST_ITERATIONS, int(share * evaluations))
    attack = replace(placed, iterations=min(_SURROGATE, number))
    try:
        with within(seconds_left() if evaluations else share * seconds_left()):
            found = attack.solve(group, seed, report)
    except NotAttackableError:
        return {}
    return {position: replace(one, member=ON_THE_WAY) for position, one in found.items() if one.batch is not None}
