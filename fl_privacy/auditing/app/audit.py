"""The audit of an app: run and observe it, ask clients again, attack, and write a page."""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict

from fl_privacy.attacks.named import attack_named
from fl_privacy.auditing.app.bundle import MOST_NODES, App, Config, modules_in, read_app, read_pairs
from fl_privacy.auditing.app.check import check_app, preparing, stops_of
from fl_privacy.auditing.app.defended import ReplyDefense, defense_called
from fl_privacy.auditing.app.environment import (
    Around,
    LoadedBy,
    around,
    figures_noted,
    remedies,
    rounds_held,
    seeded,
    settled,
    with_causes,
    with_remedies,
)
from fl_privacy.auditing.app.hub_models import fit
from fl_privacy.auditing.app.lent import lent_in_words, pickles_loaded
from fl_privacy.auditing.app.network_alone import LAST_ALONE, NODES, ClientsAlone, NetworkAlone
from fl_privacy.auditing.app.network_found import BuiltNetworks
from fl_privacy.auditing.app.odd_files import Score
from fl_privacy.auditing.app.scripts import Scripts, named
from fl_privacy.auditing.app.stand_in import Drawing
from fl_privacy.auditing.app.started import USUAL_CLIENTS, ScriptRunner
from fl_privacy.auditing.app.stood_in import drawn_for
from fl_privacy.auditing.app.tapped_grid import TappedGrid
from fl_privacy.auditing.app_claims import claims_in_words
from fl_privacy.auditing.instrument.keras_layers import backend_blamed
from fl_privacy.auditing.instrument.watch import LATE_BATCH
from fl_privacy.auditing.scenarios import Scenarios
from fl_privacy.auditing.server_step import server_plan_of
from fl_privacy.auditing.session import AuditSession, Show
from fl_privacy.checks import whole
from fl_privacy.defenses import Defense
from fl_privacy.effects import settings_in_words
from fl_privacy.errors import UserError, in_one_line
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.files import make_out_folder
from fl_privacy.files.foreign import expanded, files_digest
from fl_privacy.flower.opacus_watch import watched_opacus
from fl_privacy.measure.answer import Answer
from fl_privacy.models.gradients.memory import resolve_device
from fl_privacy.progress import within_seconds
from fl_privacy.report.audit_file import APP_DIGEST, folder_name, record_to_json, terminal_line
from fl_privacy.report.audit_page import AuditRecord
from fl_privacy.site.gate.framing import Said

_UNSEEN = "its clients took no training step of PyTorch, Keras on PyTorch, scikit-learn or trees"
USUAL_NODES, MOST_TRIED, LONGEST_PREPARED, _REFRESHED = 10, 3, 60.0, 15.0
"""Default number of clients, as in Flower's simulation, most scripts that are tried, and seconds for a script that
makes data and between two pages while the app trains."""

LEAST_TRAINED, LONGEST_STARTED = 5.0, 120.0
"""Seconds that a client trains at least on drawn data, and that a script takes at most to start Flower; ``seconds``
gives more."""


@dataclass(frozen=True, kw_only=True)
class AppAuditRequest:
    """Settings of an app's audit."""

    nodes: int | None = None  # number of clients; ``None`` takes the app's own, or ten
    rounds: int | None = 1  # largest number of rounds; ``None`` takes the app's own
    run_config: tuple[str, ...] = ()  # overrides, as in ``flwr run --run-config``
    node_config: tuple[str, ...] = ()  # config of every node; ``{partition}`` becomes the node's number
    mirror: Path | None = None  # folder of data sets by hub name; ``None`` lets the app load anything
    stand_in: bool = False  # ``True`` makes up random examples if the app's data are missing
    network: str = ""  # network that is trained alone, as ``FILE:NAME``, in place of the app
    not_run: str = ""  # reason why no script can be run; a network is then trained alone
    defense: tuple[str, ...] = ()  # name and settings of a defense for a second run, see ``defense_called``
    out: Path = Path("audit")
    clients: int = 4
    victims: int = 8
    budget: str = "quick"
    seconds: float = 600.0  # time after which no further attack begins
    seed: int | None = 0  # seed of attacks and of the app's random streams; ``None`` leaves the app's streams alone
    device: str = "cpu"
    sandboxed: bool = False  # ``True`` if this process is isolated


def audit_app(
    app: App, asked: AppAuditRequest, tell: Callable[[str], None] | None = None, show: Show | None = None
) -> "AppAudit":
    """Run ``app`` in this process and write a page on the leakage of its clients.

    The app's code is executed. ``show``, if given, gets each record of the audit, which is then not written to files.
    ``UserError`` if the app can't be loaded, or the folder can't be written.
    """
    config = app.with_config(asked.run_config, asked.rounds)
    node_config = read_pairs("--node-config", asked.node_config)
    defense = defense_called(asked.defense) if asked.defense else None
    folder, tell = expanded(asked.out).absolute() / folder_name(app.name), tell or (lambda text: None)
    session = AppAudit(app, asked, folder, tell, show)
    given: dict[str, Any] = {"reason": asked.not_run, "seconds": asked.seconds, "seed": asked.seed or 0}
    if asked.network:
        app = NetworkAlone.of(app, chosen=asked.network, **given)
        session = _of_network(session, app)
    else:
        given |= {"server": "", "client": "", "by_fedavg": True, "tried": None}
        app = ClientsAlone.of(app, **given) if asked.not_run else app
        session, app = _trained(session, app, config, node_config)
    if defense is None or not session.understood:
        return session
    _forget(app.folder)
    tell(f"Running the app again, with {defense.name}")
    data, last = session.data_made, session.last
    after = AppAudit(app, session.asked, folder, tell, show, defense=defense, before=last, data_made=data)
    make_out_folder(folder / "files-defended", folder, asked.out)
    after.absent = session.absent
    own = app.scripts is None and session.alone is None
    after.run(app, config if own else {}, node_config, folder / "files-defended")
    return after


def _trained(session: "AppAudit", app: App, config: Config, node_config: Config) -> tuple["AppAudit", App]:
    """Run the app, else its other scripts, else only its network; return the audit and app where a client trained."""
    first, begun, asked, failed = session, app, session.asked, dict[int, UserError]()
    said, vain, built = list[str](), list[str](), BuiltNetworks(app.folder)
    for number in range(MOST_TRIED):
        checked = check_app(app)
        files = session.folder / f"files{f'-{number}' if number else ''}"
        make_out_folder(files, session.folder, asked.out)
        session.absent, session.versions, session.problems = tuple(checked.missing), checked.versions, list(said)
        session.built = built
        if (why := checked.stops_with(stand_in=asked.stand_in)) and not number:
            failed[0] = UserError(why)
            break
        try:
            with built.looking() if asked.stand_in else contextlib.nullcontext():
                session.run(app, config, node_config, files)
        except UserError as error:
            failed[len(vain)], error.args = error, (session.on_drawn(str(error)),)
        why = str(failed.get(len(vain), "")) or session.silence
        if not why:
            return session, app
        run = app.name if app.scripts is None else named(app.scripts.server, app.folder)
        vain.append(f"{run}{', asked by FedAvg' * app.by_fedavg}: {why.rstrip('.')}")
        more = session.own_nodes if (session.asked.nodes or 0) < session.own_nodes < USUAL_NODES else USUAL_NODES
        few = session.chose_none and session.asked.nodes is not None and session.asked.nodes < more
        data = session.data_made if few else session.refined(app, why)
        again = number + 1 < MOST_TRIED and (few or data != session.data_made)
        if (other := app if again else app.another("the app's server" in why)) is None:
            break
        if few and again:
            said.append(f"Of {asked.nodes} clients the server chose none, so that {more} joined.")
            asked = replace(asked, nodes=more)
        elif not again:
            done = "In place of the server, FedAvg asked its clients" if other.by_fedavg else "Other scripts were run"
            said.append(f"No client trained by {vain[-1]}. {done}{': --script chooses' * (not other.by_fedavg)}.")
        _forget(app.folder)
        app, config = other, config if again or other.by_fedavg else {}
        session = AppAudit(app, asked, first.folder, first.tell, first.show, data_made=data if again else ({}, None))
        if again:  # the same code, whose first end does not count
            vain.pop()
            failed.pop(len(vain), None)
            first = first if vain else session
    others = [f"Other scripts were run, too. {'. '.join(vain[1:])}."] if vain[1:] else []
    clear = any(leak.severity != "look" for leak in first.last.findings)  # its page says more
    if asked.stand_in and not clear:
        why = str(failed[0]) if 0 in failed else first.last.silence
        why = " ".join([f"{why.rstrip('.')}.", *others]) if others else why
        own = NetworkAlone.of(begun, reason=why, built=built, seconds=asked.seconds, seed=asked.seed or 0)
        alone = attempt(lambda: _of_network(first, own))
        if not isinstance(alone, Failure):
            return alone, own
    if 0 in failed:
        raise UserError(" ".join([str(failed[0]), *others])) from failed[0].__cause__
    first.put(replace(first.last, problems=[*first.last.problems, *others]))
    return first, begun


def _of_network(first: "AppAudit", app: NetworkAlone) -> "AppAudit":
    _forget(app.folder)
    first.tell("Looking for a network to audit alone")
    session = AppAudit(app, replace(first.asked, nodes=NODES), first.folder, first.tell, first.show)
    session.absent = first.absent
    make_out_folder(session.folder / "files-network", session.folder, first.asked.out)
    session.run(app, {}, {}, session.folder / "files-network")
    return session


def _forget(folder: Path) -> None:
    for name in modules_in(folder):
        del sys.modules[name]  # it may hold a trained network


def audit_within(app: str, asked: Mapping[str, Any], say: Callable[[Sequence[bytes]], None]) -> None:
    """Audit the app in folder or bundle ``app`` within a sandbox, and send all results using ``say``.

    ``asked`` has the fields of ``AppAuditRequest`` as plain values, with an ``out`` inside the sandbox. ``say`` gets
    messages of two parts, kind (``Said``) and content: the app's name, progress, records, and the end or failure.
    """
    logging.getLogger("flwr").propagate = False  # it writes its own lines
    last = b""

    def show(record: AuditRecord) -> None:
        nonlocal last
        last = record_to_json(record).encode(errors="backslashreplace")
        say([Said.PAGE, last])

    try:
        asked = dict(asked)
        found = read_app(app, asked.pop("chosen", None))
        say([Said.NAME, found.name.encode(errors="replace")])
        settings: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in asked.items()}
        settings |= {name: Path(settings[name]) for name in ("out", "mirror") if settings.get(name)}
        request = AppAuditRequest(**settings, sandboxed=True)
        audit_app(found, request, lambda text: say([Said.TEXT, text.encode(errors="replace")]), show)
        say([Said.DONE, last])
    except (Exception, SystemExit) as error:  # noqa: BLE001  (third-party code can raise anything)
        said = str(error) if isinstance(error, UserError) else f"The app raised {in_one_line(error)}."
        say([Said.FAILED, " ".join([said, *remedies([said, repr(error.__cause__)])]).encode(errors="replace")])


class AppAudit(AuditSession):
    """An audit that runs an app, observes its uploads, and attacks them.

    ``before``: results of an earlier run. ``data_made``: sizes of made-up data, and the app's script that makes data.
    """

    def __init__(
        self,
        app: App,
        asked: AppAuditRequest,
        folder: Path,
        tell: Callable[[str], None],
        show: Show | None,
        *,
        defense: Defense | None = None,
        before: AuditRecord | None = None,
        data_made: tuple[Mapping[str, int], Scripts | None] = ({}, None),
    ) -> None:
        super().__init__(folder, show)
        self.own_nodes = USUAL_NODES
        self.data_made = data_made  # shape of drawn data, and the project's script that makes its data
        shape = ", ".join(f"{name} {number}" for name, number in data_made[0].items())
        self.notes += [f"Random data have the shape that its network takes ({shape})."] if shape else []
        self.defense, self.before, self.figures = defense, before, dict[str, float]()
        self.name, self.asked, self.tell = app.name, asked, tell
        self.grid: TappedGrid | None = None
        self.alone = app if isinstance(app, NetworkAlone) else None
        self.data, self.answers = set[str](), list[Answer]()
        self.problems = [self.alone.reason] if self.alone is not None and self.alone.reason else list[str]()
        self.drawing: Drawing | None = None
        none: Sequence[str] = ()
        self.absent = self.versions = self.failed = none
        try:
            self.digest = files_digest(app.folder)
        except OSError as error:
            raise UserError(
                f"The app's file {error.filename or app.folder} can't be read: {error.strerror}. Let your user read it,"
                " or take it out of the folder."
            ) from error
        self.trained, self.broken, self.ended, self.unmade, self._refreshed = 0.0, "", "", "", 0.0
        self.last, self.silence = AuditRecord(app=app.name), ""
        self.understood = self.chose_none = False
        self.built: BuiltNetworks | None = None

    def refined(self, app: App, why: str) -> tuple[Mapping[str, int], Scripts | None]:
        """Return sizes of made-up data, and the script that makes data, for the next run after the error ``why``."""
        (shape, script), drawing = self.data_made, self.drawing
        if drawing is None:
            return shape, script
        fitted = {**shape, **fit(drawing, why)}
        return fitted, preparing(app, why, drawing.asked) if script is None and fitted == shape else script

    def _draw(self, app: App, files: Path, stack: contextlib.ExitStack) -> None:
        """Make up data missing in the copy ``files`` until ``stack`` closes; run the script that makes data, if any."""
        mirror, seed, (shape, script) = self.asked.mirror, self.asked.seed or 0, self.data_made
        also = [] if script is None else [script.server]
        self.drawing = stack.enter_context(drawn_for(app, files, mirror, seed, shape, also=also))
        if script is None:
            return
        name, nodes = named(script.server, app.folder), self.asked.nodes or USUAL_CLIENTS
        self.tell(f"Running {name}, which makes data of the project")
        seeded(self.asked.seed or 0)
        with contextlib.chdir(files), within_seconds(LONGEST_PREPARED):
            runner = ScriptRunner(app.folder)
            made = attempt(lambda: runner.prepare(script.server, script.client_arguments, nodes))
        if isinstance(made, Failure):
            self.unmade = f" {name}, which makes its data, failed: {made.reason.removeprefix('UserError: ')[:200]}"
        self.notes.append(f"The project's own {name} was run first, since it makes data that are not here.")

    def run(self, app: App, config: Config, node_config: Config, files: Path) -> None:
        asked, inner = self.asked, None if app.scripts is None else app.scripts.works_in(app.folder)
        with contextlib.ExitStack() as stack:
            stack.callback(self.leave)
            Score.asked.clear()
            there = stack.enter_context(around(app, files, asked.mirror, inner, self.absent))
            if asked.sandboxed:
                stack.enter_context(pickles_loaded(there.lent))
            if self.absent:
                self.notes.append(f"Not installed here, and left out until it is called: {', '.join(self.absent)}.")
            self.problems += [there.missing] if there.missing else []
            if asked.stand_in:
                self._draw(app, files, stack)
            tables: dict[str, np.ndarray] = {}
            if app.scripts is not None:
                app = replace(app, scripts=replace(app.scripts, longest=max(LONGEST_STARTED, asked.seconds)))
            with LoadedBy(tables).looking():  # some apps load their data on import
                started = app.load(stops_of, self.drawing)
            self.own_nodes = min(started.nodes or USUAL_NODES, MOST_NODES)
            nodes = whole("--nodes", asked.nodes or self.own_nodes, at_least=1, at_most=10_000, example=10)
            self.asked = asked = replace(asked, nodes=nodes, device=str(resolve_device(asked.device)))
            self.notes += app.notes
            self.failed = started.failed
            if app.scripts is None and self.alone is None:
                config, node_config, unset = settled(app, config, node_config, nodes)
                self.failed = [*started.failed, *unset]
            if asked.seed is not None:
                seeded(asked.seed)
            defense = None if self.defense is None else ReplyDefense(self.defense, asked.seed or 0)
            grid = TappedGrid(
                range(nodes), started.client, config, asked.clients,
                tables=tables, node_config=node_config, defense=defense,
            )  # fmt: skip
            grid.on_answer, self.grid, self.data = self.refresh, grid, there.data
            drawn, share = self.drawing, lambda: max(LEAST_TRAINED, asked.seconds / len(grid.contexts))
            grid.longest = lambda: share() if drawn is not None and drawn.asked else math.inf
            context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=dict(config))
            self.tell(f"Training {nodes} client{'s' * (nodes != 1)}")
            held, joined = rounds_held(asked.rounds), grid.joining()
            with held as taken, joined, grid.split.looking(), figures_noted(self.figures), watched_opacus() as opacus:
                ended = attempt(lambda: started.server(grid, context), placed=True)
            self.chose_none = grid.chose_none and not grid.inventory.messages
            grid.on_answer, self.figures = None, grid.evaluation() | self.figures
            self.ended = ended.reason.removeprefix("UserError: ") if isinstance(ended, Failure) else ""
            self.note(there, grid.rounds)
            self.notes += [] if self.alone else claims_in_words(app.folder, started.client, taken, opacus, self.defense)
            self.server_plan = server_plan_of(taken.get("self"))
            self.trained = time.perf_counter() - self.started
            self._attack(grid)

    def _attack(self, grid: TappedGrid) -> None:
        self.write("The training is done; single examples are attacked now.")
        if (cut := self.end()) is not None:
            self.problems.append(f"Attacks ended before all were made: {cut.reason}")
        self.understood = any(kept.matched.parameters for kept in grid.answers.values())
        if self.asked.defense and not self.understood:
            self.problems.append("The defense was not tried: no reply is known to hold trained parameters.")
        self.last, self.silence = self.write(), grid.silence(self.ended)
        self.line = terminal_line(self.last, self.page)
        self.grid = None  # and with it the app's code

    def note(self, there: Around, rounds: int) -> None:
        """Add notes to the page on the defense, the changed environment ``there``, and ``rounds`` above the limit."""
        limit, name = self.asked.rounds, "" if self.defense is None else self.defense.name
        beyond = f"The app trained for {rounds} rounds, which its own loop counts; --rounds {limit} does not reach it."
        acts = (
            f"{name} acts on the parameters that clients train, and the attacker knows it. Other arrays and figures"
            " leave as they are."
        )
        backend = "Keras ran on PyTorch, whose steps can be attacked; KERAS_BACKEND=tensorflow keeps it on TensorFlow."
        metrics = ", ".join(sorted(Score.asked))
        assert self.grid is not None
        hurried = "Clients trained longer than --seconds allows: from then on, a pass over drawn data had one batch"
        said = {
            f"{hurried} (in PyTorch, of at most {LATE_BATCH} examples).": self.grid.hurried,
            f"Accuracy, precision, recall and F1 (macro averages) stand for the hub's {metrics}.": metrics,
            beyond: limit is not None and rounds > limit,
            acts: name,
            "The app's own audit(...) was skipped in this run; its training was not.": there.audits,
            f"It reports by {', '.join(there.silent)}, which was left out.": there.silent,
            lent_in_words(there.lent): there.lent,
            backend: there.keras,
            f"It names {', '.join(there.devices)}, which is not here: it ran on the CPU.": there.devices,
        }
        self.notes += [text for text, applies in said.items() if applies]
        self.problems += backend_blamed((*self.grid.failures, *self.grid.problems, self.ended))

    def refresh(self) -> None:
        if self.built is not None and self.grid is not None and self.grid.models:
            self.built.end()
        if self.alone is None and time.perf_counter() - self._refreshed >= _REFRESHED:
            self._refreshed = time.perf_counter()
            self.write("The app trains; data sent in the clear appear as they are found.")

    def attack_all(self) -> None:
        assert self.grid is not None
        asked, seed, further = self.asked, self.asked.seed or 0, "Further scenarios are attacked."
        scenarios = Scenarios(
            clients=self.grid.asked_clients(),
            attack=attack_named("auto")(budget=asked.budget, device=asked.device),
            attack_within=lambda number: attack_named("auto")(evaluations=number, device=asked.device),
            defense=None if self.defense is None else self.defense.parts,
            victims=asked.victims,
            seed=seed,
            seconds=asked.seconds,
            sites=1 if self.alone is not None else len(self.grid.contexts),
            server=self.server_plan,
            evaluated=self.grid.evaluated,
            tell=self.tell,
        )
        self._add(scenarios.attack_all(), further)
        if self.alone is not None:
            return
        self.tell("Attacking what is not trained by steps")
        self._add(self.grid.fitted.attack_all(clients=asked.clients, seed=seed, seconds=asked.seconds), further)
        questions, going_on = scenarios.aggregate(list(self.grid.traces.values())), "Further questions are asked."
        self._add((*self.grid.split.answers(), *questions), going_on)

    def _add(self, answers: Iterable[Answer], going_on: str) -> None:
        for answer in answers:
            self.answers.append(answer)
            self.write(going_on)
            if self.alone is not None and answer.scenario.name == LAST_ALONE:
                return

    def on_drawn(self, why: str) -> str:
        drawn = [] if self.drawing is None else self.drawing.of_clients()
        return with_causes(why, drawn, self.versions) + self.unmade * bool(why)

    def leave(self) -> None:
        if self.content.get("going_on"):
            self.broken = "It was interrupted; the same command begins anew"
            attempt(self.write)

    def record(self, going_on: str = "") -> AuditRecord:
        grid, asked = self.grid, self.asked
        assert grid is not None
        problems, silence = [*self.problems, *dict.fromkeys(self.failed)], self.on_drawn(grid.silence(self.ended))
        trained = any(kind.startswith("train") for kind in grid.replies) and not any(vars(grid.fitted).values())
        errors = "".join(f", and errors came {n} times: {why}" for why, n in grid.failures.most_common(1))
        unseen = _UNSEEN + errors if trained and not grid.models else ""
        if self.ended and not (silence or any(why in self.ended for why in grid.failures)):
            problems.append(f"The app's server ended with an error: {self.ended}")
        if grid.joined:
            problems.append(f"The app waits for more than {asked.nodes} clients; {grid.joined} joined.")
        problems += [f"{why} ({n} repl{'y' if n == 1 else 'ies'})" for why, n in grid.failures.most_common(5)]
        problems += [f"{why} ({n} time{'s' * (n != 1)})" for why, n in grid.problems.most_common(5)]
        nodes, rounds = len(grid.contexts), grid.rounds
        lede = f"{self.name} ran with its files unchanged, with {nodes} client{'s' * (nodes != 1)}"
        lede += f" over {rounds} round{'s' * (rounds != 1)}." if rounds else "."
        if self.answers and (attacked := len({node for node, _ in grid.answers})):
            lede += f" Then {attacked} client{'s' * (attacked != 1)} trained and uploaded on few examples each."
        if self.defense is not None:
            covers = grid.covers() or " on every reply"
            lede += f" It ran twice: without a defense, and with {settings_in_words(self.defense.parts)}{covers}."
        lede += " Training was cut short, as it took too long." * grid.hurried
        if self.drawing is not None and (drawn := self.drawing.in_words()):
            lede = f"{drawn} {lede}"
        environment = [
            ("fl-privacy", metadata.version("fl-privacy")),
            ("flwr", metadata.version("flwr")),
            ("torch", torch.__version__),
            ("Date", f"{datetime.now(UTC):%Y-%m-%d}"),
            (APP_DIGEST, self.digest),
            ("Attack", f"auto, budget {asked.budget}, seed {asked.seed or 0}, {asked.device}"),
            ("Training took", f"{self.trained:.0f} s" if self.trained else "not done yet"),
            *([] if self.defense is None else [("Defense", settings_in_words(self.defense.parts))]),
            *([("Data from the mirror", ", ".join(sorted(self.data)))] if self.data else []),
        ]
        return AuditRecord(
            app=self.name,
            lede=lede,
            findings=grid.findings(),
            answers=self.answers,
            lines=grid.inventory.lines(),
            volumes=grid.inventory.volumes(),
            facts=grid.facts(),
            stated={name: sorted(values) for name, values in grid.stated.items()},
            problems=with_remedies(problems) if asked.sandboxed else problems,
            notes=self.notes,
            going_on=f"{going_on} Written {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC." if going_on else "",
            broken=self.broken,
            silence=" ".join(with_remedies([silence])) if silence and asked.sandboxed else silence or unseen,
            environment=environment,
            nodes=asked.nodes,
            rounds=rounds or asked.rounds,
            models=dict(grid.models),
            figures=self.figures,
            drawn=self.drawing is not None and bool(self.drawing.asked),
            defense="" if self.defense is None else self.defense.name,
            covers=grid.covers(),
            before=self.before,
            seconds={"training": round(self.trained, 1), "all": round(time.perf_counter() - self.started, 1)},
        )

    def put(self, record: AuditRecord) -> AuditRecord:
        return super().put(record if self.alone is None else self.alone.on_page(record))
