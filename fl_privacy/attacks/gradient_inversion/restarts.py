"""Restarts: who is attacked again, how the work is cut into chunks, and which attempt is taken."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fl_privacy.attacks.attack import Report
from fl_privacy.attacks.gradient_inversion.filming import filmed_rows
from fl_privacy.attacks.gradient_inversion.grouping import failed
from fl_privacy.attacks.gradient_inversion.preparation import Prepared, PreparedVictim
from fl_privacy.attacks.gradient_inversion.stages import minimize_in_stages
from fl_privacy.attacks.gradient_inversion.threads import fitting_threads, multiplications_of_a_layer
from fl_privacy.film import Snapshot, shortened
from fl_privacy.rng import cpu_threads
from fl_privacy.types import Batch, Reconstruction


@dataclass(frozen=True, eq=False)
class _Restarted:
    restart: int
    loss: float
    accepted: bool
    images: Tensor
    labels: Tensor
    history: tuple[float, ...]
    film: tuple[Snapshot, ...] = ()


def attack_victims(prepared: Prepared, report: Report) -> dict[int, Reconstruction]:
    """Attack every victim until an attempt is good enough or the restarts are used up.

    Only the first attempt below ``accept`` counts, however many ran beside it, so that the outcome does not depend
    on how the attempts were batched.
    """
    together = prepared.attempts_together
    capacity = max(1, prepared.capacity // together) * together
    attempts: dict[int, list[_Restarted]] = {victim.position: [] for victim in prepared.victims}
    pending, tried = list(prepared.victims), 0
    while pending and tried < prepared.restarts:
        left = prepared.restarts - tried
        at_once = left if tried and len(pending) * left <= capacity else together
        jobs = [(victim, tried + extra) for victim in pending for extra in range(at_once)]
        for begin in range(0, len(jobs), capacity):
            before, chunk = tried / prepared.restarts, jobs[begin : begin + capacity]
            width = at_once / prepared.restarts / len(jobs)

            def meter(share: float, start: float = before + width * begin, size: float = width * len(chunk)) -> None:
                report(start + share * size)

            for victim, attempt in _attack_chunk(prepared, chunk, together, meter):
                attempts[victim.position].append(attempt)
        tried += at_once
        pending = [m for m in pending if not any(a.accepted for a in attempts[m.position])]
    return {m.position: _reconstruction(m, attempts[m.position], prepared) for m in prepared.victims}


def _attack_chunk(
    prepared: Prepared,
    jobs: Sequence[tuple[PreparedVictim, int]],
    together: int,
    report: Report,
) -> list[tuple[PreparedVictim, _Restarted]]:
    settings = prepared.settings
    victims, restarts = zip(*jobs, strict=True)
    with cpu_threads(1):
        problem = prepared.problem(victims, restarts, together)
        variables, generators = prepared.start(victims, restarts)
        size = multiplications_of_a_layer(prepared.observer, problem.images(variables))
    filmed = filmed_rows(victim.observation for victim in victims)
    with fitting_threads(size):
        found = minimize_in_stages(prepared, problem, variables, generators, report, filmed=filmed)
        images, labels = prepared.read(found.images), found.labels
        accepted = (found.loss < settings.accept * problem.zero_loss()).tolist()
    labels = prepared.rounds[0].victim_model.loss.answers(labels).cpu()
    histories = [tuple(row[row.isfinite()].tolist()) for row in found.history.T.cpu()]
    return [
        (
            victim,
            _Restarted(
                restart=restarts[row],
                loss=float(found.loss[row]),
                accepted=accepted[row],
                images=images[row],
                labels=labels[row],
                history=histories[row],
                film=found.films.get(row, ()),
            ),
        )
        for row, victim in enumerate(victims)
    ]


def _reconstruction(victim: PreparedVictim, attempts: Sequence[_Restarted], prepared: Prepared) -> Reconstruction:
    in_order = sorted(attempts, key=lambda attempt: attempt.restart)
    chosen = next((a for a in in_order if a.accepted), min(in_order, key=lambda a: a.loss))
    if chosen.loss == float("inf"):
        return failed(victim.observation, "The objective is not finite at any start; check the update.")
    return Reconstruction(
        id=victim.observation.id,
        batch=Batch(chosen.images, chosen.labels),
        loss=chosen.loss,
        history=chosen.history,
        label_source=victim.label_source,
        countermeasures=prepared.countermeasures,
        film=shortened(chosen.film),
    )
