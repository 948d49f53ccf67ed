"""``audit(strategy, ...)``: any Flower strategy, attacked while it trains, with a page at the end."""

import inspect
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from fl_privacy.auditing.server_step import server_plan_of
from fl_privacy.auditing.strategy_model import AuditedModel, expect_arrays_of, read_model
from fl_privacy.auditing.strategy_report import (
    AuditReport,
    NamingServer,
    StatedByReplies,
    audited_claims,
    expect_rounds,
    expect_strategy,
    partition_of,
)
from fl_privacy.checks import whole
from fl_privacy.errors import UserError, say
from fl_privacy.federation import Audit, Failure, audited_rounds
from fl_privacy.federation.interception import Interceptor
from fl_privacy.federation.replies import attempt, printable
from fl_privacy.flower.audit_protocol import ANSWERS, asked_probe, probing, stated_defense, stated_images
from fl_privacy.flower.curious import StrategyAround
from fl_privacy.flower.grids import pair
from fl_privacy.rng import streams_put_back
from fl_privacy.runs.folder.claims import write_claims
from fl_privacy.types import LocalPlan, VictimId

KEYS: Mapping[str, tuple[str, ...]] = {
    "lr": ("lr", "learning-rate", "local-lr", "client-lr", "eta"),
    "epochs": ("local-epochs", "epochs", "num-epochs", "local-epoch", "max-epochs"),
    "steps": ("local-steps", "num-local-steps", "steps"),
    "batch_size": ("batch-size", "local-batch-size", "train-batch-size", "batch"),
    "momentum": ("momentum",),
    "weight_decay": ("weight-decay",),
    "optimizer": ("optimizer",),
}
"""Field of the plan -> its names in apps, the likeliest first."""

STOCK: Mapping[str, Any] = {"shares": "weights", "epochs": 1, "batch_size": 32, "probe_batch_norm": "train"}
"""Plan of a client without given settings."""

GivenPlan = LocalPlan | Mapping[str, object] | Context | None


def read_plan(given: GivenPlan, config: Mapping[str, object]) -> tuple[LocalPlan, frozenset[str]]:
    """Return the settings of the clients' local training, and the names of those that were given.

    ``given``: a plan, a mapping of some of its fields, the server app's context (its run config is searched), or
    ``None``. ``config``: settings in the server's messages, searched with lower priority. ``UserError`` if a field does
    not exist, or its value is out of range.
    """
    if isinstance(given, LocalPlan):
        return given, frozenset(f.name for f in fields(LocalPlan))
    found = _found(config)
    if isinstance(given, Context):
        found |= _found(given.run_config)
    elif isinstance(given, Mapping):
        names = {f.name for f in fields(LocalPlan)}
        if unknown := [key for key in given if key not in names]:
            from fl_privacy.runs.config.parse import suggest  # noqa: PLC0415

            raise UserError(f"Unknown key plan.{unknown[0]}{suggest(str(unknown[0]), names)}")
        found |= {str(key): value for key, value in given.items()}
    elif given is not None:
        raise UserError(
            "plan is expected to be a LocalPlan, a mapping such as dict(lr=0.1, epochs=1, batch_size=32), or the server"
            f" app's context, but got {type(given).__name__}; give one of these."
        )
    settings = {**STOCK, **found}
    if found.get("steps") is not None or found.get("shares") == "gradient":
        settings["epochs"] = found.get("epochs")
    return LocalPlan(**settings), frozenset(found)


def _found(config: Mapping[str, object]) -> dict[str, Any]:
    spelled = {str(key).lower().replace("_", "-"): value for key, value in config.items()}
    found: dict[str, Any] = {}
    for name, keys in KEYS.items():
        value = next((spelled[key] for key in keys if key in spelled), None)
        value = str(value).lower() if name == "optimizer" else value
        usual = value in ("sgd", "adam", "adamw") if name == "optimizer" else type(value) in (int, float)
        with suppress(UserError):
            if usual:
                LocalPlan(**{"shares": "delta", name: value})  # type: ignore[arg-type]
                found[name] = value
    if "steps" in found:
        found.pop("epochs", None)
    return found


logger: logging.Logger = logging.getLogger(__name__)

PATIENCE, _POLL = 600.0, 0.5  # seconds to wait for the first client, and between two looks


@streams_put_back()
def audit(
    strategy: Strategy,
    *,
    model: nn.Module | Callable[[], nn.Module],
    data: object = None,
    input_shape: Sequence[int] | None = None,
    transform: object = None,
    plan: GivenPlan = None,
    out: str | Path = "audit",
    rounds: str | int | Sequence[int] = "ends",
    victims: int = 8,
    attack: Any = "auto",
) -> "AuditedStrategy":
    """Wrap ``strategy`` so that its clients' uploads are captured, attacked and shown on a page at the end.

    Use it as ``strategy = audit(FedAvg(...), model=Net, data="cifar10")``; clients need not change. Clients that use
    the mod ``probe_mod`` are asked, after each audited round, for uploads of single images, the worst
    case. Without it, training updates of few images and steps are attacked; if there are none, undefended uploads
    of one image that the server itself computes. Strategy, random streams and the training's result stay unchanged,
    even if the audit fails. ``UserError`` if an argument does not fit.

    Args:
        strategy: strategy of ``flwr.serverapp.strategy``, or a subclass.
        model: module whose ``state_dict`` is the app's arrays, or a class that takes no arguments.
        data: originals for comparison: the name of a data set, a folder of images, a PyTorch data set or loader, or a
            function from a client's partition to one. ``None`` shows reconstructions alone.
        input_shape: shape (C, H, W); by default that of ``data``, or the only usual one that the model accepts.
        transform: clients' normalization: their transform, or (mean, std); by default that of ``data``.
        plan: clients' training, such as ``dict(lr=0.1, epochs=1, batch_size=32)``, or the server app's ``context``; by
            default inferred from the messages' config and the updates.
        rounds: audited rounds: ``first``, ``last``, ``ends`` (both), ``all``, a number or a list.
        victims: largest number of single images that clients are asked for in a round.
        attack: name from ``fl-privacy list`` with settings ("idlg attack.iterations=50"), or an attack of
            ``fl_privacy.attacks``; ``none`` captures only.
    """
    expect_strategy(strategy)
    if isinstance(strategy, AuditedStrategy):
        raise UserError("A strategy is expected to be audited once, but got one that is audited; take one audit off.")
    expect_rounds(rounds)
    found = read_model(model, data, input_shape, transform)
    read_plan(plan, {})
    victims = whole("victims", victims, at_least=1, at_most=10_000, example=8)
    report = AuditReport(Path(out), attack, type(strategy).__name__, found, victims)
    return AuditedStrategy(strategy, found, report, plan, rounds)


@dataclass(eq=False)
class AuditedStrategy(StrategyAround):
    """A strategy under audit, made by ``audit``. ``failure``: why the training ended without an audit page."""

    model: AuditedModel
    report: AuditReport
    plan: GivenPlan
    rounds: str | int | Sequence[int]
    patience: float = PATIENCE
    failure: str | None = field(default=None, init=False)
    _curious: NamingServer | None = field(default=None, init=False, repr=False)
    _sent: list[Message] = field(default_factory=list, init=False, repr=False)
    _grid: Grid | None = field(default=None, init=False, repr=False)
    _timeout: float = field(default=3600.0, init=False, repr=False)
    _seen: Counter[str] = field(default_factory=Counter, init=False, repr=False)
    _replies: StatedByReplies = field(default_factory=StatedByReplies, init=False, repr=False)
    _rounds: int = field(default=1, init=False, repr=False)

    def start(self, *args: Any, **kwargs: Any) -> Result:
        """Run the strategy's own ``start``, then attack the captured uploads and print where the page is.

        Errors of the audit during or after the training do not stop it; ``failure`` holds them. Before the training,
        ``UserError`` if there is no client, arrays are not the model's, or a round or folder is not possible.
        """
        given = inspect.signature(type(self.strategy).start).bind(self.strategy, *args, **kwargs)
        given.apply_defaults()
        passed = {**given.arguments, **given.kwargs}
        grid, arrays = passed["grid"], passed["initial_arrays"]
        rounds = whole("num_rounds", passed.get("num_rounds", 3), at_least=1, example=3)
        self._timeout = float(passed.get("timeout", 3600))
        expect_arrays_of(self.model, arrays)
        plan, given_fields = read_plan(self.plan, dict(passed.get("train_config") or {}))
        chosen = audited_rounds(self.rounds, rounds, name="rounds", most="num_rounds")
        self._wait_for_clients(grid)
        interceptor = Interceptor(
            model=self.model.network,
            plan=plan,
            input_shape=self.model.input_shape,
            num_classes=self.model.num_classes,
            sink=self.report.captured,
        )
        self.report.open(plan, given_fields, sorted(chosen), rounds)
        self._seen.clear()
        self._replies, self._rounds = StatedByReplies(), rounds
        self._curious = NamingServer(self.strategy, interceptor, Audit(rounds=chosen, uploads="both"))
        try:
            # with redirected hooks, on an object that shares the strategy's attributes
            kind, names = type(self.strategy), ("configure_train", "aggregate_train")
            hooks = {name: staticmethod(getattr(self, name)) for name in names}
            driver: Any = object.__new__(type(kind.__name__, (kind,), hooks))
            driver.__dict__ = self.strategy.__dict__
            result: Result = driver.start(*given.args[1:], **given.kwargs)
            self._finish(result)
        finally:
            self._curious = None
            attempt(self.report.close)
        return result

    def _finish(self, result: Result) -> None:
        assert self._curious is not None
        report = self.report
        report.result, report.seen = result, self._seen + self._curious.problems
        report.partitions, report.server = self._curious.partitions, server_plan_of(self.strategy)

        def claim() -> None:
            if claims := audited_claims(self.strategy, self._replies, self._rounds):
                write_claims(report.folder, claims)

        with streams_put_back():
            if isinstance(untested := attempt(claim), Failure):
                logger.warning("The claim of differential privacy was not tested: %s", untested.reason)
        failed = report.end()
        self.failure = None if failed is None else failed.reason.removeprefix(f"{UserError.__name__}: ")
        say(report.line if failed is None else f"audit: no page. {self.failure}", aside=failed is not None)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if self._curious is None:
            raise UserError(
                "audit(...) is expected outermost, where its start is called, but another strategy is around it; write"
                " audit(Other(FedAvg(...)), ...) instead of Other(audit(...))."
            )
        self._grid = grid
        self._sent = list(self._curious.configure_train(server_round, arrays, config, grid))
        self.report.nodes = max(self.report.nodes or 0, self._curious.connected)
        return self._sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        assert self._curious is not None
        received = list(replies)
        attempt(lambda: self._replies.see(received))
        if server_round in self._curious.audit.rounds:
            with streams_put_back():
                for work in (self._identify, self._probe):
                    failed = attempt(lambda: work(server_round, received))  # noqa: B023
                    if isinstance(failed, Failure):
                        logger.warning("The audit of round %d is not complete: %s", server_round, failed.reason)
                        self._seen[failed.reason[:200]] += 1
        return self._curious.aggregate_train(server_round, received)

    def _identify(self, round: int, received: Sequence[Message]) -> None:
        assert self._curious is not None
        replied = [(m, r) for m, r in pair(self._sent, received) if not isinstance(r, Failure)]
        # nodes that claim a partition get their number first
        for message, reply in sorted(replied, key=lambda p: (partition_of(p[1]) is None, p[0].metadata.dst_node_id)):
            self._curious.client_of(message, reply)
        self.report.identified.update(self._curious.partitions)
        self._note(self._sent, received)

    def _probe(self, round: int, received: Sequence[Message]) -> None:
        assert self._curious is not None and self._grid is not None
        replied = [(m, r) for m, r in pair(self._sent, received) if not isinstance(r, Failure)]
        answering = [message for message, reply in replied if ANSWERS in reply.content.config_records]
        answering = sorted(answering, key=lambda message: message.metadata.dst_node_id)[: self.report.victims]
        if not answering:
            return
        share, more = divmod(self.report.victims, len(answering))
        asked = []
        for rank, message in enumerate(answering):
            to = {name: getattr(message.metadata, name) for name in ("dst_node_id", "message_type", "group_id")}
            asked += [Message(probing(message, number, 1), **to) for number in range(share + (rank < more))]
        replies = list(self._grid.send_and_receive(asked, timeout=self._timeout))
        self._note(asked, replies)
        for message, reply in pair(asked, replies):
            if not isinstance(reply, Failure):
                self._attempt(lambda: self._note_images(round, message, reply))  # noqa: B023
        self._curious.read(round, asked, replies)

    def _note_images(self, round: int, message: Message, reply: Message) -> None:
        assert self._curious is not None
        if (images := stated_images(reply.content)) is not None:
            number, _ = asked_probe(message.content) or (0, 0)
            self.report.probed(VictimId(round, self._curious.client_of(message, reply), number), images)

    def _note(self, sent: Sequence[Message], replies: Sequence[Message]) -> None:
        assert self._curious is not None
        for each in replies:
            if each.has_error():
                said = (each.error.reason or "").strip().splitlines() or [f"Flower's error {each.error.code}"]
                self._seen[printable(said[-1])[:200]] += 1
        for message, reply in pair(sent, replies):
            if not isinstance(reply, Failure):
                defended, client_of = self.report.defended, self._curious.client_of
                self._attempt(lambda: defended(client_of(message, reply), stated_defense(reply.content)))  # noqa: B023

    def _attempt(self, work: Callable[[], None]) -> None:
        failed = attempt(work)
        if isinstance(failed, Failure):
            logger.warning("A reply is not understood: %s", failed.reason)
            self._seen[(failed.reason.partition(": ")[2] or failed.reason)[:200]] += 1

    def _wait_for_clients(self, grid: Grid) -> None:
        deadline = time.monotonic() + self.patience
        while not list(grid.get_node_ids()):
            if time.monotonic() > deadline:
                raise UserError(
                    f"At least one client is expected, but none is connected after {self.patience:g} s; start"
                    " SuperNodes, or set num-supernodes of the simulation."
                )
            time.sleep(min(_POLL, self.patience / 2))
