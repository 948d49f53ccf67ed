"""A grid in this process that observes messages and clients' work without changing either."""

import contextlib
import copy
import importlib
import math
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from traceback import walk_stack
from typing import Any

import numpy as np
from flwr.app import Array, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fl_privacy.auditing.app.defended import ReplyDefense
from fl_privacy.auditing.app.environment import LoadedBy, configure, last_line_of
from fl_privacy.auditing.clear_text.findings import Leak, Loaded, findings_of, stated_privacy
from fl_privacy.auditing.clear_text.inventory import DOWN, UP, Inventory, Sent, key_of
from fl_privacy.auditing.fitted_uploads import FittedUploads
from fl_privacy.auditing.instrument.fitted import Fitted, FittedBy, leaks_of_nodes
from fl_privacy.auditing.instrument.matching import Matched, averaged, matched, memories_in
from fl_privacy.auditing.instrument.packed import unpacked
from fl_privacy.auditing.instrument.watch import MOST_EVALUATED, OnlyExamples, TrainingWatch, Watched, replaced
from fl_privacy.auditing.scenario_problem import WatchedReply
from fl_privacy.auditing.scenarios import AskedClient
from fl_privacy.auditing.vertical import SplitTraining
from fl_privacy.errors import in_one_line
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.flower.audit_protocol import asked_probe
from fl_privacy.flower.grids import LocalGrid, error_reply
from fl_privacy.flower.inside.legacy import ClientManager, SimpleClientManager
from fl_privacy.flower.records import PARTITIONS
from fl_privacy.measure.aggregate_leakage import ClassTrace, class_trace
from fl_privacy.report.audit_parts import CountedLeak
from fl_privacy.rng import Streams, streams_now

_NONE_ASKED = "the app's server asked no client to train"

LOOKS, WAITED = 3, 1.5
"""Polls for nodes, and seconds since the first, after which a server counts as waiting for more nodes."""

MOST_TRACES, MOST_JOINED, MOST_SHOWN = 200, 1000, 400
"""Largest numbers of clients with a class trace, of nodes after others joined a waiting server, and of characters of an
error."""


Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptReply(WatchedReply):
    """A client's reply, with what is needed to repeat the request: message, random ``streams``, arrays ``sent``."""

    message: Message
    context: Context
    streams: Streams
    sent: Arrays


class TappedGrid(LocalGrid):
    """Flower grid in this process, whose nodes run ``client_app``; it records messages and keeps some replies.

    ``keeps``: number of clients whose first and latest replies are kept. ``tables`` is filled with the data tables that
    clients load, by name. ``node_config``: additional node config; ``{partition}`` in a text becomes the node's number.
    ``defense`` acts on each reply to training.
    """

    def __init__(
        self,
        clients: Sequence[int],
        client_app: ClientApp,
        config: dict[str, Any],
        keeps: int,
        *,
        tables: Arrays,
        node_config: Mapping[str, bool | int | float | str],
        defense: ReplyDefense | None = None,
    ) -> None:
        super().__init__(clients, client_app)
        self._defense = defense
        self.split = SplitTraining()
        self._config, self._node_config, self._made, self._tables = config, node_config, time.time(), tables
        for partition, context in enumerate(self.contexts.values()):
            configure(context, partition, config, self._node_config)
        self.inventory, self.fitted, self.found = Inventory(), FittedUploads(), Counter[tuple[str, Leak]]()
        self.replies, self.failures, self.models, self.problems = (Counter[str]() for _ in range(4))
        self.unsent = set[str]()  # those failures that are the server's
        self.stated: dict[str, set[float]] = defaultdict(set)
        self.evaluated = list[Any]()  # batches loaded without gradients
        self.answers, self.traces = dict[tuple[int, str], KeptReply](), dict[int, ClassTrace]()
        self.on_answer: Callable[[], None] | None = None
        self._keeps, self._rounds, self._lock = keeps, Counter[tuple[int, str]](), threading.RLock()
        self._named: dict[str, set[str]] = defaultdict(set)
        self._evaluated: dict[int, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        self.joined, self._looks, self._since, self.chose_none = 0, 0, 0.0, False
        self._covered = Counter[bool]()
        self.longest, self.hurried = lambda: math.inf, False  # seconds of a client at a message, and if one took longer

    def evaluation(self) -> dict[str, float]:
        last = self._evaluated.get(max(self._evaluated, default=0), {})
        sums = {key: (sum(v * n for v, n in pairs), sum(n for _, n in pairs)) for key, pairs in last.items()}
        return {f"{key} (clients' evaluation)": total / n for key, (total, n) in sums.items() if n > 0}

    @property
    def rounds(self) -> int:
        """Return the number of rounds: distinct round numbers in training messages, else such messages to a node."""
        own = ((kind, n) for (_, kind), n in self._rounds.items() if kind.partition(".")[0] == "train")
        return max((len(self._named[kind]) or n for kind, n in own), default=0)

    def silence(self, ended: str) -> str:
        """Return why no client trained, or ""; ``ended``: error by which the server ended, if any."""
        asked, first = self.inventory.messages, next(iter(self.failures), "")
        if first and not self.replies and first not in self.unsent:
            return f"no client answered: {first}"
        if self.models or any(kind.startswith("train") for kind in self.replies):
            return ""
        if self.chose_none and not asked:
            return f"the app's server chose none of {len(self.contexts)} clients: --nodes names more"
        if ended:
            return f"the app's server ended before {'a client trained' if asked else 'it asked a client'}: {ended}"
        if first:
            said = f"no client {'trained' if self.rounds else 'was asked to train'}"
            return f"{_NONE_ASKED if first in self.unsent else said}: {first}"
        none = asked and not self.rounds and self.on_answer is None  # and the server has ended
        return f"{_NONE_ASKED}; --rounds 5 runs more rounds" if none else ""

    def findings(self) -> list[CountedLeak]:
        order = {"data": 0, "facts": 1, "look": 2}
        first, counted = dict[tuple[str, ...], Leak](), Counter[tuple[str, ...]]()
        for (kind, leak), times in self.found.items():  # for clients with different numbers of examples
            first.setdefault(key := (kind, *_alike(leak)), leak)
            counted[key] += times
        of = self.replies
        every = [CountedLeak(**vars(leak), kind=k[0], times=counted[k], of=of[k[0]]) for k, leak in first.items()]
        return sorted(every, key=lambda one: (order[one.severity], one.where))

    def facts(self) -> list[tuple[str, str]]:
        if not self.answers:
            return []
        answer = next(iter(self.answers.values()))
        seen, found = answer.watched, answer.matched
        none = f"none of PyTorch's; {seen.backwards} losses were differentiated in a round"
        stepped = "; ".join(_steps(seen.optimizers)) or none
        frozen = sum(name in seen.before and name not in seen.gradients for name in found.withheld)
        entered = "; ".join(f"{what} ({n} times)" for what, n in seen.entered.most_common(3))
        known = {
            "value": "arrays have the parameters' values",
            "scale": "arrays are the parameters' values multiplied, negated, or in whole numbers that code them",
            "place": "arrays have names or places of arrays sent, whose values are the parameters'; values are changed",
        }
        uploaded = f"{found.shares} of {len(found.parameters)} parameters and buffers"
        nothing = "none of the network's parameters, by values, names and positions"
        withheld = f"{len(found.withheld)} parameters, {frozen} of them not trained"
        facts = {
            "Network": ", ".join(dict.fromkeys(type(module).__name__ for module in seen.modules)),
            "What enters it": entered,
            "Optimizer": stepped,
            "Examples of a client": str(sum(seen.passes.values()) or seen.loaded or "not seen"),
            "What is uploaded": uploaded if found.parameters else nothing,
            "How that is known": known[found.by] if found.parameters else None,
            "What does not leave": withheld if found.withheld else None,
            "Arrays that are no parameters": ", ".join(found.unknown[:10]) or None,
        }
        return [(name, value) for name, value in facts.items() if value is not None]

    def covers(self) -> str:
        if not self._covered[False]:
            return ""
        return f" on {self._covered[True]} of {self._covered.total()} replies"

    def asked_clients(self) -> list[AskedClient]:
        found = []
        for node in dict.fromkeys(node for node, _ in self.answers):
            first, latest = self.answers[node, "first"], self.answers.get((node, "latest"))
            ask, later = partial(self.ask_again, first), None if latest is None else partial(self.ask_again, latest)
            seen = WatchedReply(reply=first.reply, watched=first.watched, matched=first.matched)
            found.append(AskedClient(number=node, ask=ask, ask_later=later, latest=latest or first, **vars(seen)))
        return found

    def get_node_ids(self) -> list[int]:
        """List all nodes. Others join if a server that has sent no message waits for them or keeps asking."""
        if not self.inventory.messages:
            asker = sys._getframe(1)
            waited_for = asker.f_locals.get("min_available_nodes") if asker.f_code.co_name == "sample_nodes" else 0
            while isinstance(waited_for, int) and len(self.contexts) < min(waited_for, MOST_JOINED):
                self._join()
            self._looks += 1
            self._since = self._since or time.monotonic()
            waits = self._looks > LOOKS and time.monotonic() - self._since >= WAITED
            target = getattr(threading.current_thread(), "_target", None)
            if getattr(target, "__name__", "") == "_update_client_manager":  # Flower's own, which looks all the time
                stacks = chain.from_iterable(map(walk_stack, sys._current_frames().values()))
                waits = waits and any(isinstance(frame.f_locals.get("self"), ClientManager) for frame, _ in stacks)
            if waits and len(self.contexts) < MOST_JOINED:
                self._join()
        return super().get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        self.chose_none = self.chose_none or not sent
        return super().push_messages(sent)

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Let nodes join, within the block, if a server with a Flower ``ClientManager`` waits for more of them."""

        def around(original: Any, manager: Any, num_clients: int, *args: Any, **kwargs: Any) -> bool:
            while len(self.contexts) < min(num_clients, MOST_JOINED):
                self._join()
            return original(manager, num_clients, *args, **kwargs)

        def sampled(original: Any, manager: Any, num_clients: int, *args: Any, **kwargs: Any) -> Any:
            manager.wait_for(min(num_clients, MOST_JOINED))
            return original(manager, num_clients, *args, **kwargs)

        def asked(original: Any, *args: Any, **kwargs: Any) -> Any:
            results, failures = original(*args, **kwargs)
            for each in failures:  # before a message left; errors in replies are noted as such
                if isinstance(each, BaseException) and "contains an Error" not in str(each):
                    self.unsent.add(said := in_one_line(each)[:MOST_SHOWN])
                    self.failures[said] += 1
            return results, failures

        servers = importlib.import_module("flwr.server.server")
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(SimpleClientManager, "wait_for", around))
            stack.enter_context(replaced(SimpleClientManager, "sample", sampled))
            for name in ("fit_clients", "evaluate_clients"):
                stack.enter_context(replaced(servers, name, asked))
            yield

    def _join(self) -> None:
        partition = len(self.contexts)
        self.joined += 1
        configure(self.add_node(partition), partition, self._config, self._node_config)
        for each in self.contexts.values():
            each.node_config[PARTITIONS] = len(self.contexts)

    def _answer(self, message: Message) -> Message:
        with self._lock:
            return self._tapped(message)

    def _tapped(self, message: Message) -> Message:
        message = copy.deepcopy(message)  # as on the network, each node gets a copy, from which mods take entries
        node, kind = message.metadata.dst_node_id, str(message.metadata.message_type)
        self._rounds[node, kind] += 1
        number = self._rounds[node, kind]
        said = (pair for record in message.content.config_records.values() for pair in record.items())
        rounds = (str(value) for key, value in said if re.fullmatch(r"((server|current|global)[-_])?round", key))
        self._named[kind] |= {*filter(None, [message.metadata.group_id or next(rounds, "")])}
        down = _described(message.content, DOWN, kind, number, node)
        self.inventory.add(down)
        context = self.contexts[node]
        nodes = {one for one, _ in self.answers}
        kept = kind.partition(".")[0] != "evaluate" and (node in nodes or len(nodes) < self._keeps)
        kept = kept and attempt(lambda: asked_probe(message.content)) is None
        asked: dict[str, Any] = {}
        if kept:
            asked = {"message": copy.deepcopy(message), "context": _copied(context), "streams": streams_now()}
        began = time.perf_counter()
        watch = TrainingWatch(late=lambda: time.perf_counter() - began > self.longest())
        columns, fitted = LoadedBy(self._tables, self._made, self._rounds.total()), FittedBy()
        app = self.client_app
        assert app is not None
        with watch.looking() as seen, columns.looking(), fitted.looking(), self.split.looking(client=True):
            reply = attempt(lambda: app(message, context), placed=True)
        self.hurried |= seen.hurried
        reply = error_reply(message, reply) if isinstance(reply, Failure) else reply
        reply, known = self._defended(message, reply, down.arrays, seen, context)
        if self._defense is not None and kind.startswith("train") and not reply.has_error():
            self._covered[known is not None] += any(reply.content.array_records.values())
        noted = attempt(lambda: self._note(reply, down, seen, columns.of(seen, fitted.fits), asked, meant=known))
        self._count(kind, self._fits(message, reply, fitted.fits))
        if isinstance(noted, Failure):
            self.problems[f"A reply is not understood: {noted.reason}"] += 1
        shown = None if self.on_answer is None else attempt(self.on_answer)
        if isinstance(shown, Failure):
            self.problems[f"A page could not be written while the app trained: {shown.reason}"] += 1
        return reply

    def _defended(
        self, message: Message, reply: Message, sent: Arrays, seen: Watched, context: Context
    ) -> tuple[Message, Matched | None]:
        """Defend a reply; return it, or an error reply, and what its arrays held before (``None`` if unknown)."""
        if self._defense is None or reply.has_error():
            return reply, None
        if not (seen.modules and seen.steps):
            if str(message.metadata.message_type).startswith("train") and any(reply.content.array_records.values()):
                self.problems["A reply left without the defense, since no training was seen"] += 1
            return reply, None
        replied, defense = _described(reply.content, UP, "", 1, 0), self._defense
        uploaded = {**replied.arrays, **_unpacked(replied)}
        found = attempt(lambda: matched(uploaded, sent, seen.before, seen.values(), seen.gradients))
        if isinstance(found, Failure):
            return error_reply(message, found), None
        put = attempt(partial(defense, reply, seen, found, context))
        return (error_reply(message, put), None) if isinstance(put, Failure) else (reply, found)

    def _note(
        self, reply: Message, down: Sent, seen: Watched, loaded: Loaded, asked: dict[str, Any], *, meant: Matched | None
    ) -> None:
        if reply.has_error():
            self.inventory.add(Sent(direction=UP, kind=down.kind, round=down.round, node=down.node))
            last = last_line_of(reply, f"Flower's error {reply.error.code}").removeprefix("UserError: ")
            self.failures[last[:MOST_SHOWN]] += 1
            return
        up = _described(reply.content, UP, down.kind, down.round, down.node)
        self.inventory.add(up)
        self.replies[down.kind] += 1
        sent, uploaded, after = down.arrays, up.arrays, seen.values()
        if down.kind.partition(".")[0] == "evaluate":
            figures = {key_of(at): float(v) for at, v in up.values.items() if isinstance(v, int | float)}
            weights = [figures.pop(key) for key in ("num-examples", "num_examples") if key in figures]
            for key in (key for key, v in figures.items() if math.isfinite(v) and key != "code"):  # an earlier status
                self._evaluated[down.round][key].append((figures[key], (weights or [1.0])[0]))
        pairs, inner = Matched(), Arrays()
        if seen.modules and seen.steps:
            inner = _unpacked(up)
            uploaded = {**uploaded, **inner}
            pairs = meant or matched(uploaded, sent, seen.before, after, seen.gradients)
            pairs = replace(pairs, unknown=tuple(key for key in pairs.unknown if key not in inner))
            self.models[" + ".join(type(module).__name__ for module in seen.modules)] += 1
        same = [key for key, array in uploaded.items() if key in sent and sent[key].shape == array.shape]
        odd = [where for where in up.arrays if where not in {*pairs.parameters, *pairs.packed, *same}]
        if not pairs.parameters:
            attempt(lambda: self.split.note(down.node, sent, uploaded, own_loss=seen.program is not None))
        self._trace(down, uploaded, pairs, loaded.labels)
        trained = bool(pairs.parameters) or down.kind.partition(".")[0] == "query"  # whose answers are no parameters
        leaks = findings_of(up, loaded, odd, trained=trained)
        read = {key.partition(":")[0] for key in (*pairs.parameters, *pairs.packed) if key in inner}
        leaks = [leak for leak in leaks if leak.severity != "look" or leak.where not in read]
        moved = {*seen.gradients, *averaged(seen.modules, seen.names)}
        counts = {loaded.examples, seen.loaded}
        leaks += memories_in(pairs.parameters, seen.before, after, moved=moved, counts=counts, labels=loaded.labels)
        self._count(down.kind, leaks)
        for key, value in stated_privacy(up).items():
            self.stated[key].add(value)
        if len(self.evaluated) < MOST_EVALUATED:
            self.evaluated += seen.evaluated
        if asked and seen.steps and seen.modules:
            place = (down.node, "first" if (down.node, "first") not in self.answers else "latest")
            self.answers[place] = KeptReply(**asked, sent=sent, reply=uploaded, watched=seen, matched=pairs)

    def _count(self, kind: str, leaks: Sequence[Leak]) -> None:
        for leak in {_alike(leak): leak for leak in reversed(leaks)}.values():
            self.found[kind, leak] += 1

    def _fits(self, message: Message, reply: Message, fits: list[Fitted]) -> Sequence[Leak]:
        if reply.has_error():
            return ()
        sent, replied = (_described(one.content, way, "", 1, 0) for one, way in ((message, DOWN), (reply, UP)))
        found = attempt(
            lambda: [
                *self.fitted.note(message.metadata.dst_node_id, sent.arrays, replied.arrays, fits),
                *(leak for fit in fits[-1:] for leak in leaks_of_nodes(fit, replied.arrays, replied.values)),
            ]
        )
        if isinstance(found, Failure):
            self.problems[f"A reply of a fitted model is not understood: {found.reason}"] += 1
            return ()
        return found

    def _trace(self, down: Sent, uploaded: Arrays, pairs: Matched, labels: np.ndarray | None) -> None:
        if down.node in self.traces or len(self.traces) >= MOST_TRACES or down.kind.startswith("evaluate"):
            return
        sent, arrays = down.arrays, {**uploaded, **pairs.decoded}
        if pairs.parameters and pairs.shares != "weights":  # the array is the change
            sign = -1 if pairs.shares == "gradient" else 1
            arrays = {key: sign * arrays[key] for key in pairs.parameters if arrays[key].dtype.kind == "f"}
            sent = {key: np.zeros_like(array) for key, array in arrays.items()}
        if (trace := class_trace(sent, arrays, labels)) is not None:
            self.traces[down.node] = trace

    def ask_again(self, answer: KeptReply, only: OnlyExamples | None) -> WatchedReply | Failure:
        """Ask the client again with the same message and state; ``only`` limits the examples of its loaders."""
        only = only and replace(only, at_call=not answer.watched.loaded, anew=answer.watched.anew)
        watch = TrainingWatch(program=True, only=only)
        message, context = copy.deepcopy(answer.message), _copied(answer.context)
        app = self.client_app
        assert app is not None
        unchanged = getattr(app, "unchanged", contextlib.nullcontext)  # of clients that outlive a message
        with self._lock, unchanged(), answer.streams.used(), watch.looking() as seen:
            reply = attempt(lambda: app(message, context))
        if isinstance(reply, Failure):
            return reply
        reply, known = self._defended(message, reply, answer.sent, seen, context)
        if reply.has_error():
            return Failure(last_line_of(reply))
        replied = _described(reply.content, UP, "again", 1, 0)
        up = {**replied.arrays, **_unpacked(replied)}
        found = attempt(lambda: known or matched(up, answer.sent, seen.before, seen.values(), seen.gradients))
        return found if isinstance(found, Failure) else WatchedReply(reply=up, watched=seen, matched=found)


def _alike(leak: Leak) -> tuple[str, str, str]:
    return leak.severity, leak.where, re.sub(r" \(.*?\)|\d+", "", leak.what)


def _copied(context: Context) -> Context:
    copied = replace(context, state=copy.deepcopy(context.state))
    copied.node_config, copied.run_config = dict(context.node_config), dict(context.run_config)
    return copied


def _described(content: RecordDict, direction: str, kind: str, number: int, node: int) -> Sent:
    arrays, values = Arrays(), dict[str, Any]()
    for record, held in content.array_records.items():
        for key, array in held.items():
            made = attempt(lambda: _values(array))  # noqa: B023
            if isinstance(made, Failure):
                values[f"{record}/{key}"] = bytes(array.data)
            else:
                arrays[f"{record}/{key}"] = made
    for records in (content.metric_records, content.config_records):
        values |= {f"{record}/{key}": value for record, said in records.items() for key, value in said.items()}
    return Sent(direction=direction, kind=kind, round=number, node=node, arrays=arrays, values=values)


def _values(array: Array) -> np.ndarray:
    try:
        return array.numpy()
    except Exception:
        kind = np.dtype(array.dtype)
        if kind.hasobject or kind.itemsize * math.prod(array.shape) != len(array.data):
            raise
        return np.frombuffer(array.data, kind).reshape(array.shape)


def _unpacked(sent: Sent) -> Arrays:
    as_bytes = {at: a.tobytes() for at, a in sent.arrays.items() if a.dtype == np.uint8 and a.ndim == 1}
    found = attempt(lambda: unpacked({**sent.values, **as_bytes}))
    return {} if isinstance(found, Failure) else found


def _steps(optimizers: Mapping[tuple[str, tuple[tuple[str, Any], ...]], int]) -> Iterator[str]:
    for name in dict.fromkeys(name for name, _ in optimizers):
        same_kind = [(dict(settings), steps) for (one, settings), steps in optimizers.items() if one == name]
        (first, _), (last, _), said = same_kind[0], same_kind[-1], list[str]()
        for key, value in first.items():
            after = last.get(key)
            if value not in (None, False, 0, 0.0) or after not in (None, False, 0, 0.0):
                said.append(f"{key} {value}" if after == value else f"{key} {value} to {after}")
        steps = sum(steps for _, steps in same_kind)
        yield f"{name} ({', '.join(said)}), {steps} step{'s' * (steps != 1)} in a round"
