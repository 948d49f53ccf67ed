"""The audit of an app: run and observe it, ask clients again, attack, and write a page."""

import contextlib
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict

from fl_privacy.attacks.named import attack_named
from fl_privacy.auditing.app.bundle import App, read_pairs
from fl_privacy.auditing.app.loaded import LoadedBy
from fl_privacy.auditing.app.mirror import copied_files, in_one_process, mirrored
from fl_privacy.auditing.app.old_names import lent_in_words, moved_names_lent
from fl_privacy.auditing.app.remedies import with_remedies
from fl_privacy.auditing.app.tapped_grid import KeptReply, TappedGrid
from fl_privacy.auditing.instrument.matching import Matched
from fl_privacy.auditing.instrument.watch import OnlyExamples
from fl_privacy.auditing.scenarios import AskedClient, Scenarios
from fl_privacy.auditing.strategy import AuditedStrategy
from fl_privacy.checks import whole
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.files import make_private_folder
from fl_privacy.files.foreign import expanded
from fl_privacy.measure.answer import Answer
from fl_privacy.report.app_record import PAGE, Ran, folder_name, terminal_line, write_audit
from fl_privacy.report.untouched import AppPage
from fl_privacy.rng import streams_put_back

logger = logging.getLogger(__name__)

USUAL_NODES = 10
"""Default number of clients, as in Flower's simulation."""

_REFRESHED = 15.0
"""Seconds between two versions of the page while the app trains."""


@dataclass(frozen=True, kw_only=True)
class AppAuditRequest:
    """Settings of an audit.

    Attributes:
        nodes: number of clients; ``None`` takes the app's own, or ten.
        run_config: overrides, as in ``flwr run --run-config``.
        node_config: config of every node, as in ``flower-supernode --node-config``; ``{partition}`` becomes its own.
        mirror: folder of data sets by hub name; ``None`` lets the app load anything.
        seconds: time after which no further attack begins.
        seed: seed of attacks and of the app's random streams; ``None`` leaves the streams alone.
        sandboxed: ``True`` if this process is isolated.
    """

    nodes: int | None = None
    rounds: int | None = 1
    run_config: tuple[str, ...] = ()
    node_config: tuple[str, ...] = ()
    mirror: Path | None = None
    out: Path = Path("audit")
    clients: int = 4
    victims: int = 8
    budget: str = "quick"
    seconds: float = 600.0
    seed: int | None = 0
    sandboxed: bool = False


@dataclass(frozen=True, kw_only=True)
class Audited:
    """Result of an audit: the page's path, the content of ``audit.json``, and a line for a terminal."""

    page: Path
    record: Mapping[str, Any]
    line: str


def audit_app(
    app: App,
    asked: AppAuditRequest,
    tell: Callable[[str], None] | None = None,
    show: Callable[[AppPage, Ran], None] | None = None,
) -> Audited:
    """Run ``app`` in this process and write a page on the leakage of its clients.

    The app's code is executed, with all its side effects. ``tell`` gets the progress, ``show`` the pages instead of
    files.

    Raises:
        UserError: the app can't be loaded, or the folder can't be written.
    """
    nodes = whole("--nodes", asked.nodes or app.nodes or USUAL_NODES, at_least=1, at_most=10_000, example=10)
    config = app.with_config(asked.run_config, asked.rounds)
    node_config = read_pairs("--node-config", asked.node_config)
    folder = _folder(asked.out, app.name)
    run = _Run(app, asked, folder, nodes)
    run.tell, run.show = tell or run.tell, show
    with contextlib.ExitStack() as stack:
        stack.callback(run.leave)
        asked_data = stack.enter_context(mirrored(asked.mirror))
        stack.enter_context(in_one_process())
        stack.enter_context(working_in(folder / "files"))
        if missing := copied_files(app.folder, folder / "files"):
            run.problems.append(missing)
        left_out = stack.enter_context(own_audits_left_out())
        lent = stack.enter_context(moved_names_lent())
        tables: dict[str, np.ndarray] = {}
        with LoadedBy(tables).looking():  # some apps load their data on import
            server, client = app.load()
        if asked.seed is not None:
            seeded(asked.seed)
        grid = TappedGrid(range(nodes), client, config, asked.clients, tables=tables, node_config=node_config)
        run.grid, run.asked_data = grid, asked_data
        grid.on_answer = run.refresh
        context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=dict(config))
        run.tell(f"Training {nodes} client{'s' * (nodes != 1)}")
        ended = attempt(lambda: server(grid, context))
        grid.on_answer = None
        if isinstance(ended, Failure):
            run.problems.append(f"The app's server ended with an error: {ended.reason}")
        if left_out:
            run.notes.append("The app's own audit(...) was left out of this run; its training was not.")
        if lent:
            run.notes.append(lent_in_words(lent))
        run.trained = time.perf_counter() - run.started
        run.write("The training is done; single examples are attacked now.")
        with streams_put_back():
            attacked = attempt(run.attack_all)
        if isinstance(attacked, Failure):
            run.problems.append(f"Attacks ended before all were made: {attacked.reason}")
        return run.finish()


class _Run:
    def __init__(self, app: App, asked: AppAuditRequest, folder: Path, nodes: int) -> None:
        self.app, self.asked, self.folder, self.nodes = app, asked, folder, nodes
        self.tell: Callable[[str], None] = lambda text: None
        self.show: Callable[[AppPage, Ran], None] | None = None
        self.grid: TappedGrid | None = None
        self.asked_data: set[str] = set()
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.answers: list[Answer] = []
        self.started, self.trained = time.perf_counter(), 0.0
        self.record: Mapping[str, Any] = {}
        self._refreshed = 0.0
        self.broken = ""

    def refresh(self) -> None:
        if time.perf_counter() - self._refreshed >= _REFRESHED:
            self._refreshed = time.perf_counter()
            self.write("The app trains; what leaves in clear is shown as it is seen.")

    def attack_all(self) -> None:
        assert self.grid is not None
        scenarios = Scenarios(
            clients=_clients(self.grid),
            attack=attack_named("auto")(budget=self.asked.budget),
            attack_within=lambda number: attack_named("auto")(evaluations=number),
            victims=self.asked.victims,
            seed=self.asked.seed or 0,
            seconds=self.asked.seconds,
            tell=self.tell,
        )
        for answer in scenarios.attack_all():
            self._add(answer, "Further scenarios are attacked.")
        self.tell("Attacking what is not trained by steps")
        fitted = self.grid.fitted.attack_all(
            clients=self.asked.clients, seed=self.asked.seed or 0, seconds=self.asked.seconds
        )
        for answer in fitted:
            self._add(answer, "Further scenarios are attacked.")
        for answer in scenarios.aggregate(list(self.grid.traces.values())):
            self._add(answer, "Further questions are asked of the training's own uploads.")

    def _add(self, answer: Answer, going_on: str) -> None:
        self.answers.append(answer)
        self.write(going_on)

    def write(self, going_on: str) -> AppPage:
        page, ran = self._page(going_on), self._ran()
        if self.show is not None:
            self.show(page, ran)
        else:
            self.record = write_audit(self.folder, page, ran)
        return page

    def leave(self) -> None:
        if self.record.get("going_on"):
            self.broken = "It was interrupted; the same command begins anew"
            attempt(lambda: self.write(""))

    def finish(self) -> Audited:
        page = self.write("")
        path = (self.folder / PAGE).absolute()
        return Audited(page=path, record=self.record, line=terminal_line(page, path))

    def _page(self, going_on: str) -> AppPage:
        grid = self.grid
        assert grid is not None
        problems = [*self.problems]
        if grid.joined:
            problems.append(f"The app waits for more than {self.nodes} clients; {grid.joined} joined.")
        problems += [f"{why} ({n} repl{'y' if n == 1 else 'ies'})" for why, n in grid.failures.most_common(5)]
        problems += [f"{why} ({n} time{'s' * (n != 1)})" for why, n in grid.problems.most_common(5)]
        if self.asked.sandboxed:
            problems = with_remedies(problems)
        return AppPage(
            app=self.app.name,
            lede=self._lede(),
            findings=[
                {
                    "severity": one.leak.severity,
                    "what": one.leak.what,
                    "where": one.leak.where,
                    "why": one.leak.why,
                    "kind": one.kind,
                    "times": one.times,
                    "of": one.of,
                }
                for one in grid.findings()
            ],
            answers=self.answers,
            lines=[_line(line) for line in grid.inventory.lines()],
            volumes=[
                {"direction": way[0], "kind": way[1], "messages": n, "bytes": grid.inventory.bytes[way]}
                for way, n in grid.inventory.messages.items()
            ],
            facts=_facts(grid),
            stated={name: sorted(values) for name, values in grid.stated.items()},
            problems=problems,
            notes=self.notes,
            going_on=f"{going_on} Written {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC." if going_on else "",
            broken=self.broken,
            environment=self._environment(),
        )

    def _lede(self) -> str:
        assert self.grid is not None
        rounds = self.grid.rounds
        nodes = len(self.grid.contexts)
        said = f"{self.app.name}, not a line of it edited, with {nodes} client{'s' * (nodes != 1)} in one process"
        said += f" over {rounds} round{'s' * (rounds != 1)}." if rounds else "."
        attacked = len({node for node, _ in self.grid.answers})
        if attacked and self.answers:
            asked = "1 client was" if attacked == 1 else f"{attacked} clients were"
            said += f" The server is honest but curious; {asked} asked again for uploads of few examples."
        return said

    def _environment(self) -> list[tuple[str, str]]:
        data = ", ".join(sorted(self.asked_data))
        found = [
            ("fl-privacy", metadata.version("fl-privacy")),
            ("flwr", metadata.version("flwr")),
            ("torch", torch.__version__),
            ("Attack", f"auto, budget {self.asked.budget}, seed {self.asked.seed or 0}"),
            ("Training took", f"{self.trained:.0f} s" if self.trained else "not done yet"),
        ]
        return found + ([("Data from the mirror", data)] if data else [])

    def _ran(self) -> Ran:
        assert self.grid is not None
        return Ran(
            nodes=self.nodes,
            rounds=self.grid.rounds or self.asked.rounds,
            models=dict(self.grid.models),
            seconds={"training": round(self.trained, 1), "all": round(time.perf_counter() - self.started, 1)},
        )


@contextlib.contextmanager
def own_audits_left_out() -> Iterator[list[bool]]:
    """Train the app's strategies under ``audit`` without it until the block ends; list one entry for each."""
    original, found = AuditedStrategy.start, list[bool]()

    def start(self: AuditedStrategy, *args: Any, **kwargs: Any) -> Any:
        found.append(True)
        return self.strategy.start(*args, **kwargs)

    AuditedStrategy.start = start  # type: ignore[method-assign]
    try:
        yield found
    finally:
        AuditedStrategy.start = original  # type: ignore[method-assign]


def _clients(grid: TappedGrid) -> list[AskedClient]:
    found = []
    for node in dict.fromkeys(node for node, _ in grid.answers):
        first, latest = grid.answers[node, "first"], grid.answers.get((node, "latest"))

        def ask(only: OnlyExamples | None, answer: KeptReply = first) -> Any:
            return grid.ask_again(answer, only, program=True)

        def later(only: OnlyExamples | None, answer: KeptReply | None = latest) -> Any:
            assert answer is not None
            return grid.ask_again(answer, only, program=True)

        found.append(
            AskedClient(
                number=node,
                ask=ask,
                ask_later=None if latest is None else later,
                watched=first.watched,
                matched=first.matched,
                reply=first.reply,
            )
        )
    return found


def _line(line: Any) -> dict[str, Any]:
    return {
        "direction": line.direction,
        "kind": line.kind,
        "record": line.record,
        "key": line.key,
        "what": line.what,
        "size": line.size,
        "messages": line.messages,
        "rounds": list(line.rounds),
        "example": line.example,
    }


def _facts(grid: TappedGrid) -> list[tuple[str, str]]:
    if not grid.answers:
        return []
    answer = next(iter(grid.answers.values()))
    seen, found = answer.watched, answer.matched
    stepped = f"none of PyTorch's; {seen.backwards} losses were differentiated in a round"
    if seen.optimizers:
        stepped = "; ".join(_steps(seen.optimizers))
    frozen = sum(name in seen.before and name not in seen.gradients for name in found.withheld)
    entered = "; ".join(f"{what} ({n} times)" for what, n in seen.entered.most_common(3))
    facts = [
        ("Network", ", ".join(dict.fromkeys(type(module).__name__ for module in seen.modules))),
        ("What enters it", entered),
        ("Optimizer", stepped),
        ("Examples of a client", str(seen.loaded) if seen.loaded else "not seen"),
        *_uploaded(found),
    ]
    if found.withheld:
        facts.append(("What does not leave", f"{len(found.withheld)} parameters, {frozen} of them not trained"))
    if found.unknown:
        facts.append(("Arrays that are no parameters", ", ".join(found.unknown[:10])))
    return facts


def _steps(optimizers: Mapping[tuple[str, tuple[tuple[str, Any], ...]], int]) -> Iterator[str]:
    for name in dict.fromkeys(name for name, _ in optimizers):
        told = [(dict(settings), steps) for (one, settings), steps in optimizers.items() if one == name]
        (first, _), (last, _), said = told[0], told[-1], list[str]()
        for key, value in first.items():
            after = last.get(key)
            if value not in (None, False, 0, 0.0) or after not in (None, False, 0, 0.0):
                said.append(f"{key} {value}" if after == value else f"{key} {value} to {after}")
        steps = sum(steps for _, steps in told)
        yield f"{name} ({', '.join(said)}), {steps} step{'s' * (steps != 1)} in a round"


def _uploaded(found: Matched) -> list[tuple[str, str]]:
    if not found.parameters:
        return [("What is uploaded", "none of the parameters of the network, as far as values, names and places tell")]
    known = {
        "value": "arrays have the parameters' values",
        "scale": "arrays are the parameters' values multiplied, with another sign, or in whole numbers that code them",
    }
    placed = "arrays have the names or places of arrays sent, whose values are the parameters'; values are changed"
    return [
        ("What is uploaded", f"{found.shares} of {len(found.parameters)} parameters and buffers"),
        ("How that is known", known.get(found.by, placed)),
    ]


def _folder(out: Path, name: str) -> Path:
    folder = expanded(out).absolute() / folder_name(name)
    try:
        make_private_folder(folder / "files", folder)
    except OSError as error:
        raise UserError(
            f"--out is expected to be a folder that can be written, but {out} can't: {error.strerror}."
        ) from error
    return folder


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Set the app's working folder to ``folder``."""
    before, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path


def seeded(seed: int) -> None:
    """Seed all random streams that apps use."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
