"""Isolated processes of apps, which have no network, key or ledger."""

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from flwr.app import Context, Message

from fl_privacy.errors import UserError
from fl_privacy.flower.gate import Gate, Origin
from fl_privacy.flower.inside.identity import others_turn
from fl_privacy.flower.inside.serialized import context_bytes, context_of, message_from_parts, message_parts
from fl_privacy.flower.inside.supernode import Brought
from fl_privacy.site.gate.apart import LARGEST_WORD, Apart
from fl_privacy.site.gate.bundles import Approvals, Bundle, install_packages, read_bundle, signers_of, unmet_packages
from fl_privacy.site.gate.isolation import Isolation, Wishes
from fl_privacy.site.gate.policy import LOAD_SECONDS, MOST_CELLS, AppLimits
from fl_privacy.site.gate.rules import RefusedError

logger: logging.Logger = logging.getLogger(__name__)
MORE = 64 << 20  # bytes allowed for a reply and the app's state in addition to twice the message

MOST_MESSAGES, MOST_QUEUED = 20, 100  # largest number of a run's messages that wait for the site, or for others
IDLE_SECONDS = 300.0  # seconds without a message after which a run's waiting process is ended


class Cell:
    """A ``ClientApp`` in an isolated process that is started on demand.

    ``app``: reference ``package.module:attribute``; empty only to test whether the system can isolate apps. ``bundle``:
    archive with the app's code; each message then gets a new process. ``None`` for an installed app. ``packages``:
    folder of the packages that the bundle needs.
    """

    def __init__(
        self, app: str, limits: AppLimits, *, bundle: bytes | None = None, packages: Path | None = None
    ) -> None:
        self.app, self.limits, self.bundle, self.packages = app, limits, bundle, packages
        self.held: Isolation | None = None
        self._apart: Apart | None = None
        self._is_loaded = False

    def start(self) -> Isolation:
        held = self.open()
        self._load()
        return held

    def open(self) -> Isolation:
        """Start the process, which then loads the app; return its isolation. ``UserError`` if this is too weak."""
        self.close()
        limits, bundled = self.limits, self.bundle is not None
        more = () if self.packages is None else (str(self.packages),)
        wishes = Wishes(
            temporary="",
            reads=(*map(str, limits.reads), *more),
            writes=tuple(map(str, limits.writes)),
            layered=tuple(str(place) for place in limits.reads if place.is_dir()) if bundled else (),
            most_bytes=limits.most_bytes,
            most_processes=limits.most_processes,
        )
        variables = {name: os.environ[name] for name in limits.environment if name in os.environ}
        with self._closed_on_error():
            apart = self._apart = Apart("fl_privacy.cli.isolated_app", wishes, variables)
            deadline = time.monotonic() + LOAD_SECONDS
            held = self.held = apart.begin({"app": self.app, "packages": more, "bundled": bundled}, deadline)
            if not bundled or not self.app:
                logger.warning("%s", held.in_words())
            if limits.required and not (held.is_all if bundled else held.is_enough):
                lax = "none" if bundled else "where_possible"
                raise UserError(
                    f"app.isolation is expected to be possible, but is not: {held.in_words()} Set isolation: {lax} to"
                    " run the app all the same."
                )
            if self.bundle:
                apart.send([self.bundle], deadline)
        return held

    def _load(self) -> None:
        with self._closed_on_error():
            assert self._apart is not None
            (reason,) = self._apart.receive(LARGEST_WORD, time.monotonic() + LOAD_SECONDS)
            if reason:
                raise UserError(reason.decode(errors="replace"))
            self._is_loaded = True

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except (OSError, UserError, ValueError, TypeError) as error:
            self.close()
            said = "said something else; repair it."  # the app's code wrote between the two answers
            if isinstance(error, OSError):
                raise UserError(
                    "--app is expected to have a process of its own, but the system can't start one"
                    f" ({error.strerror}); end other processes, or free memory."
                ) from error
            if isinstance(error, RefusedError):
                said = f"does not answer: {error}."
            elif isinstance(error, UserError):
                raise
            raise UserError(f"--app is expected to be loaded, but {self.app} {said}") from error

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the app's reply, and copy its state to ``context``; ``RefusedError`` if its process fails or hangs."""
        reason = "isolation"
        try:
            if self._apart is None or (self._is_loaded and not self._apart.is_quiet):
                self.open()
            reason = "app"
            if not self._is_loaded:
                self._load()
        except UserError as error:
            raise RefusedError(reason, str(error)) from error
        apart = self._apart
        assert apart is not None
        asked = [context_bytes(context), *message_parts(message)]
        deadline = time.monotonic() + self.limits.seconds
        try:
            apart.send(asked, deadline)
            failed, state, *reply = apart.receive(2 * sum(map(len, asked[1:])) + MORE, deadline)
            answer = None if failed else message_from_parts(reply)
            kept = context_of(state).state
        except Exception as error:  # any error that malformed bytes raise
            self.close()
            if isinstance(error, RefusedError):
                raise
            raise RefusedError(
                "app", f"its reply is no message: {type(error).__name__}: {error}; correct the app"
            ) from error
        context.state = kept
        if self.bundle is not None:
            self.close()
        if answer is None:
            raise RefusedError("app", f"{failed.decode(errors='replace')[:1000]}; correct the app")
        return answer

    @property
    def is_open(self) -> bool:
        return self._apart is not None

    def end(self) -> None:
        if (apart := self._apart) is not None:
            apart.end()

    def close(self) -> None:
        apart, self._apart, self._is_loaded = self._apart, None, False
        if apart is not None:
            apart.close()


class Bundles:
    """Runs apps that are sent as bundles, archives of their code.

    Each run has an isolated process, and all messages pass one :class:`Gate`. The site's policy has to approve a run.
    ``UserError`` if this system can't isolate apps as the policy requires.
    """

    def __init__(self, gate: Gate) -> None:
        runs = gate.policy.runs
        assert runs is not None
        self.gate, self.runs, self.approvals = gate, runs, Approvals(runs)
        self._cells: OrderedDict[int, tuple[Cell, float]] = OrderedDict()
        self._held: dict[str, tuple[str, Bundle, list[str], float]] = {}
        self._working, self._answered = set[int](), set[int]()
        probe = Cell("", gate.policy.app, bundle=b"")
        probe.open()
        probe.close()

    def answer(self, message: Message, context: Context, brought: Brought) -> Message | None:
        """Let the run's own app (sent as ``brought``) answer; ``None`` if the message has to wait, as for approval."""
        number, run, origin = message.metadata.message_id, str(context.run_id), Origin()
        try:
            if (held := self._held.pop(number, None)) is None:
                bundle = read_bundle(brought.content)
                signers = signers_of(bundle, brought.signatures, self.runs.keys)
                held = run, bundle, signers, time.monotonic()
            _, bundle, signers, since = held
            origin = Origin(f"{bundle.name} {bundle.version}", bundle.digest)
            by = self.approvals.admit(bundle, run, dict(context.run_config), signers)
            if by is None and time.monotonic() - since >= self.runs.wait_seconds:
                self.approvals.forget(run)
                late = f"was not approved within {self.runs.wait_seconds:g} s; approve it, or raise runs.wait_seconds"
                raise RefusedError("run", f"run {run} of {bundle.in_words()} {late}")
            if by is None or context.run_id in self._working or len(self._working) >= MOST_CELLS:
                most, event = (MOST_MESSAGES, "approval") if by is None else (MOST_QUEUED, "their turn")
                if sum(other == run for other, *_ in self._held.values()) >= most:
                    raise RefusedError("waiting", f"{most} others of run {run} wait for {event}; send fewer at once")
                self._held[number] = held
                return None
            self._working.add(context.run_id)
            try:
                reply = self._replied(message, context, bundle, replace(origin, approved_by=by))
            finally:
                self._working.remove(context.run_id)
                self._answered.add(context.run_id)
            self.approvals.decision(run)
            return reply
        except Exception as error:  # noqa: BLE001  (its text may name places of the site: it does not leave)
            return self.gate.refused_run(message, context, error, origin)

    def _replied(self, message: Message, context: Context, bundle: Bundle, origin: Origin) -> Message:
        cell = self._cell(context.run_id, bundle)

        def app(asked: Message, given: Context) -> Message:
            reply = cell(asked, given)
            self.approvals.decision(str(context.run_id))  # the site may have revoked the run meanwhile
            return reply

        return self.gate(message, context, app, origin)

    def _cell(self, run: int, bundle: Bundle) -> Cell:
        cell, _ = self._cells.pop(run, (None, 0.0))
        if cell is None or cell.bundle != bundle.content:
            if cell is not None:
                cell.close()
            packages = None
            if unmet := unmet_packages(bundle, any_version=self.runs.versions == "any"):
                if self.runs.install == "never":
                    listed = ", ".join(f"{text}: {instead}" for text, instead in unmet.items())
                    raise RefusedError("packages", f"{listed}; install them here, or set runs.install: from-index")
                with others_turn():
                    packages = install_packages(unmet, self.runs.folder / "packages")
            cell = Cell(bundle.client, self.gate.policy.app, bundle=bundle.content, packages=packages)
        self._cells[run] = cell, time.monotonic()
        while len(self._cells) > MOST_CELLS:
            self._cells.pop(next(other for other in self._cells if other not in self._working))[0].close()
        return cell

    def rest(self) -> None:
        """Between messages, replace processes that have answered; end those long unused or no longer allowed."""
        for run in self._answered & self._cells.keys() - self._working:
            cell, _ = self._cells[run]
            self._cells[run] = cell, time.monotonic()
            if not cell.is_open:
                with suppress(UserError):  # the next message meets it too, and is refused with it
                    cell.open()
        self._answered.clear()
        for run, (cell, since) in list(self._cells.items()):
            with suppress(UserError):  # revoked
                self.approvals.decision(str(run))
                if run in self._working or time.monotonic() - since <= IDLE_SECONDS:
                    continue
            cell.end()
            if run not in self._working:
                cell.close()
                del self._cells[run]
