"""Restarts: who is attacked again, how the work is cut into chunks, and which attempt is taken."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fl_privacy.attacks.gradient_inversion.minimization import Descent, minimize
from fl_privacy.attacks.gradient_inversion.prepare import Member, Workload
from fl_privacy.types import Batch, Reconstruction

if TYPE_CHECKING:
    from fl_privacy.attacks.gradient_inversion.attack import GradientInversion


@dataclass(frozen=True, eq=False)
class _Attempt:
    restart: int
    loss: float
    accepted: bool
    images: Tensor
    labels: Tensor
    history: tuple[float, ...]


def attack_members(
    attack: "GradientInversion", workload: Workload, report: Callable[[float], None]
) -> dict[int, Reconstruction]:
    """Attack every member until an attempt is good enough or the restarts are used up.

    Only the first attempt below ``accept`` counts, however many ran beside it, so that the outcome does not depend
    on how the attempts were batched.
    """
    group = workload.attempts_together
    capacity = max(1, workload.capacity // group) * group
    attempts: dict[int, list[_Attempt]] = {member.position: [] for member in workload.members}
    pending, tried = workload.members, 0
    while pending and tried < workload.restarts:
        left = workload.restarts - tried
        wave = left if tried and len(pending) * left <= capacity else group
        jobs = [(member, tried + extra) for member in pending for extra in range(wave)]
        for begin in range(0, len(jobs), capacity):
            before, chunk = tried / workload.restarts, jobs[begin : begin + capacity]
            width = wave / workload.restarts / len(jobs)

            def meter(share: float, start: float = before + width * begin, size: float = width * len(chunk)) -> None:
                report(start + share * size)

            for member, attempt in _attempt(attack, workload, chunk, group, meter):
                attempts[member.position].append(attempt)
        tried += wave
        pending = [m for m in pending if not any(a.accepted for a in attempts[m.position])]
    return {m.position: _reconstruction(m, attempts[m.position], workload) for m in workload.members}


def _attempt(
    attack: "GradientInversion",
    workload: Workload,
    jobs: Sequence[tuple[Member, int]],
    group: int,
    report: Callable[[float], None],
) -> list[tuple[Member, _Attempt]]:
    members, restarts = zip(*jobs, strict=True)
    problem = workload.problem(members, restarts, group)
    variables, generators = workload.start(members, restarts)
    descent = Descent(
        optimizer=attack.optimizer,
        iterations=attack.iterations,
        projection=attack.projection,
        noise=attack.noise,
    )
    zero_loss = problem.zero_loss()
    found = minimize(
        problem,
        variables,
        generators=generators,
        enough=attack.enough * zero_loss,
        descent=descent,
        evaluate=workload.evaluate,
        report=report,
    )
    images = problem.images(found.variables).clamp(0, 1).float().cpu()
    labels = problem.guessed_labels(found.variables)
    labels = (labels if labels.dim() == 2 else labels.argmax(-1)).cpu()
    accepted = (found.loss < attack.accept * zero_loss).tolist()
    histories = [tuple(row[row.isfinite()].tolist()) for row in found.history.T.cpu()]
    return [
        (
            member,
            _Attempt(restarts[row], float(found.loss[row]), accepted[row], images[row], labels[row], histories[row]),
        )
        for row, member in enumerate(members)
    ]


def _reconstruction(member: Member, attempts: Sequence[_Attempt], workload: Workload) -> Reconstruction:
    in_order = sorted(attempts, key=lambda attempt: attempt.restart)
    chosen = next((a for a in in_order if a.accepted), min(in_order, key=lambda a: a.loss))
    if chosen.loss == float("inf"):
        return Reconstruction(
            id=member.observation.id, batch=None, failure="The objective is not finite at any start; check the update."
        )
    return Reconstruction(
        id=member.observation.id,
        batch=Batch(chosen.images, chosen.labels),
        loss=chosen.loss,
        history=chosen.history,
        label_source=member.label_source,
        countermeasures=workload.countermeasures,
    )
