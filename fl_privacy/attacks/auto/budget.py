"""Share out the work on a victim among its attempts."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from fl_privacy.attacks.attack import seconds_left

logger = logging.getLogger(__name__)

Budget = Literal["quick", "standard", "thorough"]

EVALUATIONS: Mapping[str, int] = {"quick": 600, "standard": 4800, "thorough": 24_000}
"""Evaluations of loss and gradient for each victim, over all attempts; one "Inverting Gradients" takes ``standard``."""

_KEPT = 3
"""Number of attempts of which one goes on to the next rung."""

_LAST = 0.75
"""Share of the evaluations that the best attempt gets in the last rung."""

_MOST = 27
"""Most attempts at a victim."""

_STAGE = 150
"""Fewest evaluations of a stage of the last rung; total variation is eased at each stage."""

_STAGES = 4
"""Most stages."""

LEAST = 25
"""Evaluations below which an attempt shows nothing: one iteration of L-BFGS."""

SOLVED = 0.75
"""Largest share of a budget in seconds for exact solutions; descents get the rest. It is large since a search for
sparse directions may find all within ten rounds, but for other victims only after a hundred."""

_PILOTS = (5, 25, 125)
"""Evaluations that measure the time of one; the first of a process take longer."""

_PILOTED = 0.1
"""Share of the time left that the next measurement may take."""


@dataclass(frozen=True)
class Rung:
    """A step of successive halving: attempts with equal evaluations, in ``stages`` of less total variation."""

    attempts: int
    evaluations: int
    stages: int = 1


def most_attempts(evaluations: int) -> int:
    """Return the most attempts that ``evaluations`` suffice to compare."""
    most = [n for n in range(1, _MOST + 1) if n * LEAST * (len(rungs(evaluations, n)) - 1) <= (1 - _LAST) * evaluations]
    return max(most, default=1)


def affordable(evaluations: float, beside: int) -> int:
    """Return the most evaluations of a victim whose rungs fit in ``evaluations``, with ``beside`` given attempts."""
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
    """Measure the seconds of one evaluation, by ever more of them."""
    each = 0.0
    for evaluations in _PILOTS:
        if evaluations * each > _PILOTED * seconds_left():
            break
        each = seconds_of_each(evaluations)
    return each


def seconds_of(work: Callable[[], object]) -> float:
    """Measure the seconds of ``work``."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def evaluations_in_time(work: Callable[[int], object], victims: int, *, cut: bool) -> int:
    """Return how many evaluations of each victim there is time for, and log it; ``work`` does a number of them."""
    each = time_of_one(lambda number: seconds_of(lambda: work(number)) / number)
    found = max(LEAST, int(seconds_left() / each))
    logger.info(how_to_repeat(found, victims, cut=cut))
    return found


def how_to_repeat(evaluations: int, victims: int, *, cut: bool) -> str:
    """Say how many evaluations repeat a budget in seconds; ``cut`` if the clock ended exact solutions."""
    but = ", which repeat the descents but not what they start from: the clock ended a search for exact answers"
    return f"The seconds came to attack.evaluations={evaluations} for {victims} victims{but * cut}."


def rungs(evaluations: int, attempts: int) -> list[Rung]:
    """Plan successive halving (Jamieson and Talwalkar 2016) from ``attempts`` to one, the last rung in stages.

    No attempt gets less than one iteration of L-BFGS.
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
