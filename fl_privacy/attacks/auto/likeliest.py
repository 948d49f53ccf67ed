"""Parts of ``attack=auto`` for likelihoods, private layers and many local steps."""

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
"""Results by position."""

_SHARE = 0.25
"""Share of a victim's evaluations, or seconds, for its likeliest images."""

_SEVERAL_STEPS, _MANY_STEPS = 4, 32
"""Local steps from which the surrogate model is tried, and beyond which those over several images are not replayed:
each evaluation takes as many times as long, and their unknown order matters more than the images."""

_SURROGATE = 1000
"""Most iterations."""

ON_THE_WAY = "surrogate model"
"""Name of results at a model on the way, from which descents start."""

_MOST_ITERATIONS, _LEAST_ITERATIONS, _ATTEMPTS = 150, 25, 2

ROUNDS_RACED = 8
"""Most rounds of the same examples that descents match; the likelihood takes all."""

_WITHOUT_LIKELIHOOD = (PrivateLoss, PrivateLayers, OtherImages)
"""Effects without a likelihood; descents answer them."""


def has_likelihood(observation: Observation) -> bool:
    """Return ``True`` if the defense has a useful likelihood."""
    parts = observation.knowledge.defense or ()
    return bool(parts) and not any(isinstance(part.effect, _WITHOUT_LIKELIHOOD) for part in parts)


def likeliest(group: Group, placed: MaximumAPosteriori, evaluations: int | None, seed: int, report: Report) -> Answers:
    """Find the likeliest images of ``group``, by position; empty without a likelihood."""
    if not has_likelihood(group.first):
        return {}
    attack = sized(placed, evaluations)
    try:
        with within(seconds_left() if evaluations else _SHARE * seconds_left()):
            return attack.explain(group, seed, report)
    except NotAttackableError:
        return {}


def sized(attack: MaximumAPosteriori, evaluations: int | None) -> MaximumAPosteriori:
    """Set the iterations of ``attack`` by its share of ``evaluations``."""
    number = _MOST_ITERATIONS if evaluations is None else int(_SHARE * evaluations / _ATTEMPTS)
    return replace(attack, iterations=max(_LEAST_ITERATIONS, min(_MOST_ITERATIONS, number)), attempts=_ATTEMPTS)


def likelier(answers: Answers, found: Mapping[int, Reconstruction]) -> dict[int, Reconstruction]:
    """Return the likelier of descents' results and likeliest images, by position."""
    result = dict(found)
    chunks: dict[int, list[int]] = {}
    for position, answer in answers.items():
        if answer.posterior is not None and position in found:
            chunks.setdefault(id(answer.posterior), []).append(position)
    for positions in chunks.values():
        result |= _compared({position: answers[position] for position in positions}, found)
    return result


def _compared(answers: Answers, found: Mapping[int, Reconstruction]) -> dict[int, Reconstruction]:
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
    """Reconstruct, by position, images behind an unknown private convolution."""
    first = group.first
    if first.knowledge.private is None or first.knowledge.colluder is not None or first.knowledge.features is not None:
        return {}
    try:
        found = BlindDeconvolution().solve(group, seed, report)
    except NotAttackableError:
        return {}
    return {position: one for position, one in found.items() if one.failure is None}


def too_many_steps(observation: Observation) -> bool:
    """Return ``True`` if an update has too many steps to be replayed."""
    plan, size = observation.plan, observation.upload.num_examples
    return plan.shares != "gradient" and size > 1 and number_of_steps(size, plan) > _MANY_STEPS


def on_the_way(
    group: Group, placed: SurrogateModel, evaluations: int | None, seed: int, report: Report
) -> dict[int, Reconstruction]:
    """Find images, by position, behind many undefended steps."""
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
