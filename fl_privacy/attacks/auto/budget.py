"""How much work a victim gets, and how it is dealt out among the attempts at it."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from fl_privacy.attacks.attack import seconds_left
from fl_privacy.checks import number, whole
from fl_privacy.errors import UserError

Budget = Literal["quick", "standard", "thorough"]

EVALUATIONS: Mapping[str, int] = {"quick": 600, "standard": 4800, "thorough": 24_000}
"""Of loss and gradient for each victim, over all attempts; ``standard`` is what "Inverting Gradients" takes for one."""

_KEPT = 3
"""Number of attempts of which one goes on to the next rung."""

_LAST = 0.75
"""Share of the evaluations that the best attempt gets in the last rung."""

_MOST = 27
"""Attempts at a victim."""

_STAGE = 150
"""Evaluations of the last rung from which it is cut in stages, at each of which total variation is eased."""

_STAGES = 4
"""At most."""

LEAST = 25
"""Evaluations below which an attempt shows nothing: one iteration of L-BFGS."""

SOLVED = 0.75
"""Share of a budget in seconds that exact answers get, at most; what they leave of it is for descents. It is large
since a search for sparse directions may find all within ten rounds, and of other victims only behind a hundred."""

_PILOTS = (5, 25, 125)
"""Evaluations by which the time of one is measured; the first of a process take longer than others."""

_PILOTED = 0.1
"""Share of the time that is left which the next of them may take."""


@dataclass(frozen=True)
class Rung:
    """A step of successive halving: a number of attempts at a victim, each with the same number of evaluations.

    Attributes:
        attempts: that are left.
        evaluations: of each of them.
        stages: in which these are cut where a member is, total variation being eased at each.
    """

    attempts: int
    evaluations: int
    stages: int = 1


def expect_budget(budget: object, evaluations: int | None) -> None:
    """Refuse what is neither a name nor seconds.

    Raises:
        UserError: a value is out of its range.
    """
    if isinstance(budget, str):
        if budget not in EVALUATIONS:
            raise UserError(
                f"attack.budget is expected to be {', '.join(EVALUATIONS)} or seconds a victim, but got {budget!r}."
            )
    else:
        number("attack.budget", budget, above=0, example=30)  # type: ignore[arg-type]
    if evaluations is not None:
        whole("attack.evaluations", evaluations, at_least=1, example=EVALUATIONS["standard"])


def most_attempts(evaluations: int) -> int:
    """Return the most attempts that ``evaluations`` in all suffice to compare."""
    most = [n for n in range(1, _MOST + 1) if n * LEAST * _early(n) <= (1 - _LAST) * evaluations]
    return max(most, default=1)


def affordable(evaluations: float, beside: int) -> int:
    """Return the most evaluations a victim whose rungs fit in ``evaluations``, at least those of one attempt.

    Args:
        evaluations: that there is time for.
        beside: attempts from images that were found by other means.
    """
    number = max(LEAST, int(evaluations))
    # sum the evaluations of all rungs; no attempt gets less than ``LEAST``
    while (
        number > LEAST
        and sum(rung.attempts * rung.evaluations for rung in rungs(number, most_attempts(number) + beside))
        > evaluations
    ):
        number = max(LEAST, number - max(1, number // 50))
    return number


def time_of_one(seconds_of_each: Callable[[int], float]) -> float:
    """Measure the seconds of one evaluation, by ever more of them while there is time."""
    each = 0.0
    for evaluations in _PILOTS:
        if evaluations * each > _PILOTED * seconds_left():
            break
        each = seconds_of_each(evaluations)
    return each


def seconds_of(work: Callable[[], object]) -> float:
    """Measure the seconds that ``work`` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def how_to_repeat(evaluations: int, victims: int, *, cut: bool) -> str:
    """Say how many evaluations a budget in seconds came to, and whether they repeat all of it.

    Args:
        evaluations: of a victim.
        victims: that were attacked by these.
        cut: whether the clock ended what exact answers are looked for by.
    """
    but = ", which repeat the descents but not what they start from: the clock ended a search for exact answers"
    return f"The seconds came to attack.evaluations={evaluations} for {victims} victims{but * cut}."


def _early(attempts: int) -> int:
    """Count the rungs of the race before the last one."""
    numbers = 0
    while attempts > 1:
        attempts, numbers = math.ceil(attempts / _KEPT), numbers + 1
    return numbers


def rungs(evaluations: int, attempts: int) -> list[Rung]:
    """Plan successive halving (Jamieson and Talwalkar 2016) that starts with ``attempts`` and ends with one.

    What the last one does not get is dealt out evenly among the others. The last is cut in stages. No attempt gets
    less than one iteration of L-BFGS, also where all of them together take more than ``evaluations`` then.
    """
    numbers = [attempts]
    while numbers[-1] > 1:
        numbers.append(math.ceil(numbers[-1] / _KEPT))
    last = int(_LAST * evaluations) if attempts > 1 else evaluations
    stages = max(1, min(_STAGES, last // _STAGE))
    late = Rung(1, max(LEAST, last), stages)
    if attempts == 1:
        return [late]
    each = (1 - _LAST) * evaluations / (len(numbers) - 1)
    early = [Rung(count, max(LEAST, int(each / count))) for count in numbers[:-1]]
    return [*early, late]
