"""Gate between an app and the network, which applies the site's policy."""

import json
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from numpy.lib.format import MAGIC_LEN, read_array_header_1_0

from fl_privacy.defenses import ClientState
from fl_privacy.defenses.guard import ModelGuard
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import Failure, attempt, printable
from fl_privacy.flower.inside.identity import others_turn
from fl_privacy.flower.inside.serialized import message_with
from fl_privacy.flower.records import CLIENT_RAISED
from fl_privacy.flower.upload_defense import DefendedUpload
from fl_privacy.rng import Secret, SecretGenerator
from fl_privacy.site.gate.entries import ASKED, REFUSED_RUN, ExhaustedError
from fl_privacy.site.gate.filtering import RawArray, Records, admit, array_values, noise_alone, raw_array, release
from fl_privacy.site.gate.ledger import Ledger, LedgerError
from fl_privacy.site.gate.policy import SitePolicy, plain_kind, read_policy
from fl_privacy.site.gate.rules import REASONS, RefusedError
from fl_privacy.types import ModelState, Tensors

logger: logging.Logger = logging.getLogger(__name__)
MOST_RUNS, MOST_KEPT = 100, 1 << 30  # largest number of runs whose state a gate keeps, and of bytes of all states
MOST_REFUSED = 1000  # largest number of refusals that a gate keeps; its log has all
LONGEST_HEADER = 1024  # bytes that state dtype and shape of an array
LATE_SECONDS = 0.2  # after a multiple of ``every_seconds``; a later reply waits for the next one

OF_RUNS = ("bundle", "run", "waiting", "packages", "size")
UNCOUNTED = ("ledger", "day", "budget")
"""Reasons for refusals after which not even noise is replied, since the ledger has no entry for it."""


@dataclass(frozen=True)
class Origin:
    """The app of a run: its name, the SHA-256 of its bundle, and the user or rule that admitted it."""

    app: str = ""
    fab: str = ""
    approved_by: str = ""


Defend = Callable[[Records, Records], Records]
"""(received, released) -> records to send instead, changed by a defense of this package."""


class Gate:
    """A site's policy as a mod around any ``ClientApp``: ``app = Gate("site.yaml").around(client_app)``.

    The app is never trusted: only arrays and metrics that the policy lists are copied into a new reply, clipped and
    noised, in the policy's order. ``fl-privacy supernode --policy`` runs the app in an isolated process, a
    :class:`Cell`: ``Gate(policy).around(Cell("package.module:app", policy.app))``.

    ``policy``: a policy, its file, or the name of a packaged one. ``name``: name of the app in the ledger, the file
    that records each message and its privacy cost. ``UserError`` if either file is unusable. ``refused``: last refusals
    as pairs of reason (see ``site.gate.rules.REASONS``) and detail. ``left_out``: counts of dropped parts of replies.
    """

    def __init__(self, policy: SitePolicy | str | Path, *, name: str = "") -> None:
        self.policy = policy if isinstance(policy, SitePolicy) else read_policy(policy)
        self.name = name
        self.refused: list[tuple[str, str]] = []
        self.left_out: Counter[str] = Counter()
        self.ledger: Ledger | None = None
        self._runs = set[str]()
        if (budget := self.policy.budget) is not None:
            self.ledger = Ledger(budget.ledger, budget.anchor)
            self._runs = {entry.run for entry in self.ledger.entries() if entry.kind == REFUSED_RUN}
        self._states: OrderedDict[int, RecordDict] = OrderedDict()
        self._models: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._warned: set[int] = set()
        self._took: dict[str, float] = {}
        self._defend: Defend | None = None
        if (protect := self.policy.protect) is not None and protect.defense is not None:
            self._defend = defend_records(protect.defense, protect.options)

    def around(self, app: ClientAppCallable) -> ClientAppCallable:
        return lambda message, context: self(message, context, app)

    def __call__(
        self, message: Message, context: Context, call_next: ClientAppCallable, origin: Origin | None = None
    ) -> Message:
        started, asked, kind = time.monotonic(), list[bool](), plain_kind(str(message.metadata.message_type))

        def app(message: Message, context: Context) -> Message:
            asked.append(True)
            with others_turn():
                return call_next(message, context)

        until = 0.0
        try:
            said: RecordDict | Error = self._answer(message, context, app, origin or Origin(self.name))
            self._took[kind] = time.monotonic() - started
        except Exception as error:  # noqa: BLE001  (one answer, whatever the error)
            said = self._instead(message, error, asked=bool(asked))
            if not isinstance(said, Error):  # noise, which leaves no earlier than an answer would
                until = self._took.get(kind, 0.0)
        every, late = self.policy.every_seconds, math.inf
        while late > LATE_SECONDS:  # other messages' turns say what their apps do
            until = max(until, passed := time.monotonic() - started)
            until = math.ceil(until / every) * every if every else until
            with others_turn():
                time.sleep(until - passed)
            late = time.monotonic() - started - until if every else 0.0
        # made last: a reply states when it was made
        return Message(said, reply_to=message)

    def refused_run(self, message: Message, context: Context, error: Exception, origin: Origin) -> Message:
        run = str(context.run_id)
        try:
            if run not in self._runs:
                self._noted(REFUSED_RUN, "refused", context, origin, rho=0.0)
                self._runs.add(run)
        except LedgerError as failed:
            logger.error("The refusal of run %s is not in the ledger: %s", run, failed)
        return Message(self._refusal(error, brought=True), reply_to=message)

    def _answer(self, message: Message, context: Context, call_next: ClientAppCallable, origin: Origin) -> RecordDict:
        kind = str(message.metadata.message_type)
        if not message.has_content():
            raise RefusedError("kind", f"a message of kind {kind!r:.400} is expected to have content; send it")
        received = admit(self.policy, kind, plain_records(message.content))
        kept = self._guarded(received, context.run_id)
        rho = self.policy.rho(kind)
        limits, outcome, left = self.policy.limits, "failed", ""
        number = self._noted(plain_kind(kind), ASKED, context, origin, rho=rho, limits=limits)
        try:
            replied = self._asked(message, context, received, call_next)
            outcome = "refused"
            released = release(self.policy, kind, received, replied)
            if self._defend is not None and released.arrays:
                released = self._defend(received, released)
            outcome, left = "sent", released.in_words() if origin.fab else ""
        finally:  # in every case, the app has been asked
            if self.ledger is not None:
                self.ledger.settle(number, outcome, rho if outcome == "sent" else rho or 0.0, left)
        self._note_left_out(kind, replied, released)
        if kept and kind.partition(".")[0] == "train":
            _remember(self._models, context.run_id, kept, lambda model: sum(each.nbytes for each in model.values()))
        return flower_records(released)

    def _instead(self, message: Message, error: Exception, *, asked: bool) -> RecordDict | Error:
        """Return an error of one line or, if the app has run (``asked``), noise by which the refusal stays hidden."""
        said, kind = self._refusal(error), str(message.metadata.message_type)
        if not asked or _reason(error) in UNCOUNTED:
            return said
        made = attempt(lambda: noise_alone(self.policy, kind, admit(self.policy, kind, plain_records(message.content))))
        return said if made is None or isinstance(made, Failure) else flower_records(made)

    def _asked(self, message: Message, context: Context, received: Records, call_next: ClientAppCallable) -> Records:
        given = self._context(context)
        try:
            reply = call_next(message_with(message, flower_records(received)), given)
            _remember(self._states, context.run_id, given.state, lambda state: plain_records(state).size)
            if reply.has_content():
                return plain_records(reply.content)
            failed = f"it replied an error: {reply.error.reason}"
        except RefusedError as error:
            if error.reason not in UNCOUNTED:  # an app in this process may raise these
                raise
            failed = str(error)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  (third-party code can raise anything)
            failed = f"{type(error).__name__}: {error}"
        raise RefusedError("app", f"{failed}; correct the app")

    def _context(self, context: Context) -> Context:
        allowed = self.policy.receives.run_config
        config = {key: value for key, value in context.run_config.items() if allowed is None or key in allowed}
        if context.run_id not in self._warned and (kept := sorted(context.run_config.keys() - config.keys())):
            logger.warning("The app is not given %s of the run's configuration", printable(", ".join(kept)))
        self._warned.add(context.run_id)
        state = self._states.get(context.run_id, RecordDict())
        return Context(context.run_id, context.node_id, context.node_config, state, config)

    def _note_left_out(self, kind: str, replied: Records, released: Records) -> None:
        for replies, left in ((replied.metrics, released.metrics), (replied.config, released.config)):
            for name, record in replies.items():
                for key in record.keys() - left.get(name, {}).keys():
                    what = printable(f"{kind}: {name:.80}/{key:.80}")
                    if len(self.left_out) < MOST_REFUSED or what in self.left_out:
                        if not self.left_out[what]:
                            logger.warning("Left out of replies: %s", what)
                        self.left_out[what] += 1

    def _guarded(self, received: Records, run: int) -> dict[str, Any]:
        if not self.policy.receives.guard or not any(received.arrays.values()):
            return {}
        tensors = {name: values for name, values in _tensors(received).items() if values.is_floating_point()}
        sent, guard = ModelState(tensors, {}), ModelGuard()
        if reason := guard.refusal_of_weights(sent, self._models.get(run, {})):
            raise RefusedError("guard", reason)
        return guard.remembered(sent)

    def _noted(self, kind: str, outcome: str, context: Context, origin: Origin, **counted: Any) -> int:
        if self.ledger is None:
            return 0
        entry: dict[str, Any] = {"kind": kind, "outcome": outcome, "policy": self.policy.digest}
        return self.ledger.append(**entry, run=str(context.run_id), **counted, **vars(origin)).entries

    def _refusal(self, error: Exception, *, brought: bool = False) -> Error:
        detail, reason = printable(str(error)), _reason(error)
        if reason == "gate":
            logger.error("The gate failed", exc_info=error)
            detail = printable(f"{type(error).__name__}: {error}")
        self.refused.append((reason, detail))
        del self.refused[:-MOST_REFUSED]
        logger.warning("Refused, since %s: %s", REASONS[reason], detail)
        more = f" ({detail})" if brought and reason in OF_RUNS else ""
        why = "" if self.policy.bare else f": {REASONS[reason]}{more}"
        return Error(CLIENT_RAISED, f"The site's policy lets no reply leave{why}.")


def _reason(error: Exception) -> str:
    if isinstance(error, ExhaustedError):
        return "day" if "this day" in str(error) else "budget"
    if isinstance(error, RefusedError):
        return error.reason if error.reason in REASONS else "app"  # an app in this process may raise anything
    return "ledger" if isinstance(error, LedgerError) else "gate"


def _remember(held: "OrderedDict[int, Any]", run: int, value: Any, size: Callable[[Any], int]) -> None:
    held[run] = value
    held.move_to_end(run)
    while len(held) > 1 and (len(held) > MOST_RUNS or sum(map(size, held.values())) > MOST_KEPT):
        logger.warning("What the node keeps of run %d is dropped, since other runs need its memory", next(iter(held)))
        held.popitem(last=False)


def plain_records(content: RecordDict) -> Records:
    """Convert Flower records to the gate's own type, without Flower's classes."""
    arrays: dict[str, dict[str, RawArray]] = {}
    for name, record in content.array_records.items():
        arrays[name] = {key: RawArray(a.dtype, tuple(a.shape), a.stype, a.data) for key, a in record.items()}
        for key, array in arrays[name].items():
            header = BytesIO(array.data[MAGIC_LEN:LONGEST_HEADER])
            if array.dtype or isinstance(stated := attempt(partial(read_array_header_1_0, header)), Failure):
                continue
            arrays[name][key] = replace(array, dtype=str(stated[2]), shape=stated[0], older=True)
    return Records(
        arrays=arrays,
        metrics={name: dict(record) for name, record in content.metric_records.items()},
        config={name: dict(record) for name, record in content.config_records.items()},
    )


def flower_records(records: Records) -> RecordDict:
    """Return Flower's records: the inverse of ``plain_records``."""
    made: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {}
    for name, arrays in records.arrays.items():
        named = {key: replace(a, dtype="", shape=()) if a.older else a for key, a in arrays.items()}
        own = {k: Array(dtype=a.dtype, shape=a.shape, stype=a.stype, data=a.data) for k, a in named.items()}
        made[name] = ArrayRecord(own)
    made |= {name: MetricRecord(dict(metrics)) for name, metrics in records.metrics.items()}
    made |= {name: ConfigRecord(dict(config)) for name, config in records.config.items()}
    return RecordDict(made)


def defend_records(name: str, options: Mapping[str, Any]) -> Defend:
    """Return a function (received, released records) -> records to send, which applies a defense's upload hooks.

    The hooks get the change from received to released floating-point arrays, including statistics, and use the
    operating system's randomness. ``UserError`` if there is no such defense or option, if it changes the training
    instead of the upload, or if it promises differential privacy, for which a policy has ``protect.noise``.
    """
    from fl_privacy.runs.build import build_defense  # noqa: PLC0415  (brings Hydra)
    from fl_privacy.runs.config import compose_file  # noqa: PLC0415

    overrides = [f"defense={name}", *(f"defense.{key}={json.dumps(value)}" for key, value in options.items())]
    defense = build_defense(compose_file("config", overrides)["defense"])
    if not defense.upload:
        raise UserError(f"protect.defense is expected to act on an upload, but {name} does not; try pruning.")
    try:
        guard = DefendedUpload(defense=defense)
    except UserError as error:
        raise UserError(
            f"protect.defense can't be {name}: {error} For noise that a budget counts, say protect.noise."
        ) from error
    state = ClientState()

    def defended(received: Records, released: Records) -> Records:
        before = _tensors(received)
        # a policy may rename the only record, and keeps the order
        after = dict(zip(before, _tensors(released).values(), strict=True))
        made = iter(guard(before, after, state, SecretGenerator(Secret.draw())).values())
        arrays = {
            name: {k: replace(raw_array(next(made).numpy().astype(a.dtype)), older=a.older) for k, a in record.items()}
            for name, record in released.arrays.items()
        }
        return replace(released, arrays=arrays)

    return defended


def _tensors(records: Records) -> Tensors:
    places = [(name, key, array) for name, record in records.arrays.items() for key, array in record.items()]
    return {f"{name}/{key}": torch.from_numpy(np.array(array_values(key, array))) for name, key, array in places}
