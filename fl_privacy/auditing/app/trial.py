"""Try a policy on an app in simulation: the same run without and with a gate at each client."""

import contextlib
import logging
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import ServerApp

from fl_privacy.auditing.app.bundle import App, Config, read_pairs
from fl_privacy.auditing.app.check import stops_of
from fl_privacy.auditing.app.environment import around, configure, figures_noted, last_line_of, seeded
from fl_privacy.auditing.app.lent import lent_in_words
from fl_privacy.federation.replies import Failure, attempt, printable
from fl_privacy.files import temporary_folder
from fl_privacy.flower.gate import Gate
from fl_privacy.flower.grids import LocalGrid
from fl_privacy.site.gate.policy import SitePolicy
from fl_privacy.site.gate.rules import REASONS

logger: logging.Logger = logging.getLogger(__name__)

MOST_DETAILS, MOST_FIGURES = 12, 12  # largest number of reported kinds of refusals, and of figures


@dataclass(frozen=True, kw_only=True)
class TrialSettings:
    """Settings of the two runs of an app in :func:`try_policy`, without and with a site's policy.

    ``nodes``: number of clients; each has a gate, which checks its messages, and a ledger of its privacy budget.
    ``run_config``, ``node_config``: key=value pairs. ``mirror``: folder with copies of Hugging Face's data sets.
    """

    nodes: int = 4
    rounds: int = 3
    run_config: tuple[str, ...] = ()
    node_config: tuple[str, ...] = ()
    mirror: Path | None = None
    seed: int = 0


@dataclass
class Course:
    """Replies, errors and reported figures of one run of an app."""

    replies: int = 0  # number of replies
    errors: Counter[str] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    figures: dict[str, float] = field(default_factory=dict)
    ended: str = ""


def try_policy(policy: SitePolicy, app: App, settings: TrialSettings) -> list[str]:
    """Run ``app`` without and with a site's ``policy`` on messages, and describe both runs in lines of text.

    The app's code is executed in this process. The policy's waiting time (``every_seconds``) is skipped. ``UserError``
    if the app can't be loaded, or lacks a key of ``settings.run_config``.
    """
    config = app.with_config(settings.run_config, settings.rounds)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(temporary_folder("fl-privacy-trial-"))
        (folder / "files").mkdir()
        there = stack.enter_context(around(app, folder / "files", settings.mirror))
        if there.missing:
            logger.warning("%s", there.missing)
        begun = app.load(stops_of)
        if there.lent:
            logger.warning("%s", lent_in_words(there.lent))
        plain = _run(begun.server, begun.client, config, settings)
        gates = []
        for place in (folder / f"node-{node}" for node in range(settings.nodes)):
            budget = policy.budget and replace(policy.budget, ledger=place / "ledger", anchor=place / "anchor")
            gates.append(Gate(replace(policy, budget=budget, every_seconds=0.0), name=app.name))

        def guarded(message: Message, context: Context) -> Message:
            return gates[int(context.node_config["partition-id"])](message, context, begun.client)

        gated = _run(begun.server, guarded, config, settings)
        for gate in gates:
            gated.refused.update(gate.refused)
            gated.left_out.update(gate.left_out)
        spent = [gate.policy.limits.spent(gate.ledger.account()) for gate in gates if gate.ledger is not None]
    lines = [
        _replies("Without the gate", plain),
        _replies("With it", gated),
        *(f"Left out of {n} replies: {what}" for what, n in gated.left_out.most_common(MOST_DETAILS)),
        *([] if gated.refused else ["Nothing was refused."]),
    ]
    for (reason, detail), times in gated.refused.most_common(MOST_DETAILS):
        lines.append(f"Refused {times} times, since {REASONS[reason]}: {detail}")
    names = [name for name in plain.figures if name in gated.figures]
    lines += [f"{n}: {plain.figures[n]:.4g} without, {gated.figures[n]:.4g} with" for n in names[:MOST_FIGURES]]
    if gone := [name for name in plain.figures if name not in gated.figures]:
        lines.append(f"No longer there with it: {', '.join(gone[:MOST_FIGURES])}.")
    if spent and policy.noising is not None:
        lines.append(f"Epsilon spent in this trial: {max(spent):.4g} at delta {policy.limits.delta:g}.")
    return lines


class CountingGrid(LocalGrid):
    """Flower grid in this process that counts replies and errors."""

    def __init__(self, clients: range, app: ClientAppCallable, course: Course) -> None:
        super().__init__(clients, app)  # type: ignore[arg-type]
        self._course = course

    def _answer(self, message: Message) -> Message:
        reply = super()._answer(message)
        if reply.has_error():
            self._course.errors[printable(last_line_of(reply))[:200]] += 1
        else:
            self._course.replies += 1
        return reply


def _run(server: ServerApp, app: ClientAppCallable, config: Config, settings: TrialSettings) -> Course:
    course = Course()
    grid = CountingGrid(range(settings.nodes), app, course)
    node_config = read_pairs("--node-config", settings.node_config)
    for partition, node in enumerate(grid.contexts.values()):
        configure(node, partition, config, node_config)
    seeded(settings.seed)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=dict(config))
    with contextlib.ExitStack() as stack:
        for noisy in (logging.getLogger(name) for name in ("flwr", "fl_privacy.flower.gate")):
            stack.callback(noisy.setLevel, noisy.level)
            noisy.setLevel(logging.ERROR)
        stack.enter_context(figures_noted(course.figures))
        ended = attempt(lambda: server(grid, context))
    course.ended = ended.reason if isinstance(ended, Failure) else ""
    return course


def _replies(what: str, course: Course) -> str:
    said = f"{what} {course.replies} replies left"
    if course.errors:
        errors = "; ".join(f"{n} times: {e}" for e, n in course.errors.most_common(3))
        said += f" and {course.errors.total()} were errors ({errors})"
    return f"{said}.{f' The server ended with an error: {course.ended}.' if course.ended else ''}"
