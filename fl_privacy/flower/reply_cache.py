"""Cache of a node's answers, so that each message gets one draw of noise."""

import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod

from fl_privacy.errors import UserError
from fl_privacy.federation.replies import WITHHELD, Failure, UnansweredError, UnfitMessageError, attempt, hide_reason
from fl_privacy.files import PRIVATE_FILE, make_missing_private
from fl_privacy.flower import _node_memory as memory
from fl_privacy.flower.audit_protocol import PROBED, asked_probe, is_evaluation, is_training, merged_config
from fl_privacy.flower.inside.serialized import bytes_of, records_of
from fl_privacy.flower.records import CLIENT_RAISED, ROUND, UNFIT

logger: logging.Logger = logging.getLogger(__name__)
ROUNDS_OF_RUN = "num-server-rounds"  # key of a run's config in Flower's own apps

MOST_KEPT = 1 << 30
"""Most bytes of answers that a client keeps over all runs; the oldest are removed, and a larger one is not kept."""

MOST_KINDS = 64
"""Most kinds of messages, such as ``train.default``, that a client answers in a run; each has its own files."""

MOST_WAITED = 60.0  # seconds to wait for another process of the node that stores its answer

COUNTED, KEPT, FORM = ".answered", ".answer", ".form"
"""Suffixes of a client's files: last answered round by kind and an answer (in the node's folder of a run), and form of
answers of a kind (in the node's own folder, for all runs)."""

REFUSED = " refused"  # suffix of a message's digest if the kept answer is ``WITHHELD``

Instead = Callable[[RecordDict], RecordDict | None]
"""(form of an earlier answer) -> answer made without the client's examples; ``None`` if that is impossible."""


@dataclass(frozen=True)
class Answers:
    """Record of the messages that a client has answered, so that no kind of message is answered twice a round.

    The last answered round of each kind of message is stored in ``context`` and in a file next to the node's secret,
    which survives a restart. A simulated node keeps nothing. ``rounds``: number of the last possible round; ``None``
    takes it from the run config. If that states none, a round is at most ``memory.MOST_AHEAD`` after the last answered
    one.
    """

    context: Context
    rounds: int | None = None

    def again(self, kind: str, round: int, question: str) -> RecordDict | None:
        """Return the stored answer to this same message, known by its digest ``question``; ``None`` for a new message.

        ``UnansweredError`` if it was refused before. ``UserError`` if another message of this round or a later one was
        answered, the answer was deleted, or the run has no such round.
        """
        counted = self._in_file().get(kind) == round
        if counted and not self.forgets and (path := self._path_of_answer(kind)).exists():
            with _written_down():
                asked, _, content = memory.read_own(path, memory.state_key(self.context)).partition(b"\n")
                kept = records_of(content) if asked.decode() == question else None
            if asked.decode() == question + REFUSED:
                raise UnansweredError(WITHHELD)
            if kept is not None:
                return kept
        self.expect_new(kind, round)
        return None

    def once(
        self,
        kinds: Sequence[str],
        round: int,
        question: str,
        work: Callable[[], RecordDict],
        *,
        instead: Instead | None = None,
    ) -> RecordDict:
        """Answer a message once, also after a restart: return the stored answer, else that of ``work``, and store it.

        The round is marked as answered before ``work`` starts. ``UnansweredError`` if ``work`` failed now or before.
        ``UnfitMessageError`` if the message does not fit the model; the mark is then removed. ``UserError`` if another
        message of this round or a later one was answered, the run has no such round, or the record can't be written.

        Args:
            kinds: kinds of the message, such as training; the answer is kept under the first.
            question: digest of the message, see ``digest_of_records``.
            work: the client's computation; if it fails, the answer is ``instead`` or ``WITHHELD``, also kept.
            instead: maker of a substitute if ``work`` fails, for a client that promises differential privacy, which
                errors would break. The substitute has the form of an earlier answer, and takes as long. Without an
                earlier answer, the client gets no more such messages until its operator allows it.
        """
        first, *others = kinds
        if (kept := self.again(first, round, question)) is not None:
            return kept
        for other in others:
            self.expect_new(other, round)
        counted, served = self._in_file(), memory.answered(self.context.state)
        before = {kind: max(counted.get(kind, -1), served.get(kind, -1)) for kind in kinds}
        self.note(round, *kinds)
        form = None if instead is None else self._form(first)
        started = time.monotonic()
        try:
            if form is not None and not len(form):
                raise UnansweredError(WITHHELD)
            answer = hide_reason(work)
            if instead is not None:
                self._keep_form(first, form_of(answer, time.monotonic() - started))
        except UnfitMessageError:
            self._take_back(round, before)
            raise
        except UnansweredError:
            made = None if instead is None or form is None or not len(form) else instead(form)
            if form is None or made is None:
                if instead is not None:
                    until = "the run ends" if self.forgets else f"its operator removes {self._path_of_form(first)}"
                    logger.error("The app failed before it ever replied, so it is not asked again until %s.", until)
                    self._keep_form(first, RecordDict())
                self.keep(first, question, None)
                raise
            answer, took = made, float(form.config_records[_TOOK]["seconds"])  # type: ignore[arg-type]
            self._keep_form(first, form)
            time.sleep(max(0.0, took - (time.monotonic() - started)))
        self.keep(first, question, answer)
        return answer

    def expect_new(self, kind: str, round: int) -> None:
        """Raise ``UserError`` if this round or a later one was answered, or the run has no such round."""
        counted, served, most = self._in_file(), memory.answered(self.context.state), self.rounds
        if most is None:
            stated = self.context.run_config.get(ROUNDS_OF_RUN)
            most = stated if isinstance(stated, int) and not isinstance(stated, bool) else None
        if most is None:
            memory.expect_near([*served.values(), *counted.values()], round)
        elif not 0 <= round <= most:
            raise UserError(
                f"A round of 0 to {most} is expected of this run, but got {round}; set a larger number of rounds."
            )
        memory.expect_later(served, kind, round)
        memory.expect_later(counted, kind, round)

    def note(self, round: int, *kinds: str) -> None:
        """Record ``round`` as answered for each kind of message; ``UserError`` if it already was, or writing fails."""
        if not self.forgets:
            with self._locked():
                counted = self._in_file()
                memory.expect_later(counted, max(kinds, key=lambda kind: counted.get(kind, -1)), round)
                if len(noted := {**counted, **dict.fromkeys(kinds, round)}) > MOST_KINDS:
                    raise UserError(f"At most {MOST_KINDS} kinds of messages are expected, but got more; send fewer.")
                content = json.dumps(noted).encode()
                with _written_down():
                    memory.write_own(self._path(COUNTED), content, memory.state_key(self.context))
        for kind in kinds:
            memory.remember_answer(self.context.state, kind, round)

    def _take_back(self, round: int, before: Mapping[str, int]) -> None:
        if not self.forgets:
            with self._locked(), _written_down():
                counted = self._in_file()
                kept = {kind: before.get(kind, last) if last == round else last for kind, last in counted.items()}
                memory.write_own(self._path(COUNTED), json.dumps(kept).encode(), memory.state_key(self.context))
        for kind, last in before.items():
            if memory.answered(self.context.state).get(kind) == round:
                memory.remember_answer(self.context.state, kind, last)

    def keep(self, kind: str, question: str, answer: RecordDict | None) -> None:
        """Store ``answer`` to the message with digest ``question``; ``None``: refused. Simulations store nothing."""
        if self.forgets:
            return
        path, content = self._path_of_answer(kind), b"" if answer is None else bytes_of(answer)
        asked = question + (REFUSED if answer is None else "")
        with _written_down():
            path.unlink(missing_ok=True)
            if len(content) <= MOST_KEPT:
                found = []
                for older in memory.state_folder(self.context).glob(f"run-*/{self._client()}.*{KEPT}"):
                    with suppress(FileNotFoundError):
                        status = older.stat()
                        found.append((status.st_mtime, status.st_size, older))
                left = sum(held for _, held, _ in found) + len(content)
                for _, held, older in sorted(found):
                    if left > MOST_KEPT:
                        older.unlink(missing_ok=True)
                        left -= held
                memory.write_own(path, f"{asked}\n".encode() + content, memory.state_key(self.context))

    @property
    def forgets(self) -> bool:
        return isinstance(self.context, memory.SimulatedContext) or memory.is_simulation() or in_actor()

    def _form(self, kind: str) -> RecordDict | None:
        if self.forgets:
            records = self.context.state.config_records
            held = records[FORMS].get(kind) if FORMS in records else None
            return records_of(held) if isinstance(held, bytes) else None
        if not (path := self._path_of_form(kind)).exists():
            return None
        with _written_down():
            return records_of(memory.read_own(path, memory.state_key(self.context)))

    def _keep_form(self, kind: str, form: RecordDict) -> None:
        if self.forgets:
            records = self.context.state.config_records
            self.context.state[FORMS] = ConfigRecord({**records.get(FORMS, {}), kind: bytes_of(form)})
            return
        with _written_down():
            path = self._path_of_form(kind)
            make_missing_private(path.parent)
            memory.write_own(path, bytes_of(form), memory.state_key(self.context))

    def _in_file(self) -> Mapping[str, int]:
        if self.forgets or not (path := self._path(COUNTED)).exists():
            return {}
        with _written_down():
            held = json.loads(memory.read_own(path, memory.state_key(self.context)))
            return {str(kind): int(last) for kind, last in held.items()}

    def _client(self) -> str:
        return "-".join(map(str, memory.whose(self.context)))

    def _path(self, end: str) -> Path:
        return memory.state_folder(self.context) / f"run-{self.context.run_id}" / f"{self._client()}{end}"

    def _path_of_answer(self, kind: str) -> Path:
        return self._path(f".{hashlib.sha256(kind.encode()).hexdigest()[:16]}{KEPT}")

    def _path_of_form(self, kind: str) -> Path:
        return memory.state_folder(self.context) / self._path_of_answer(kind).with_suffix(FORM).name

    @contextmanager
    def _locked(self) -> Iterator[None]:
        path = self._path(f"{COUNTED}.lock")
        with _written_down():
            make_missing_private(path.parent)
            lock = FileLock(path, mode=PRIVATE_FILE, timeout=MOST_WAITED)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()


@contextmanager
def _written_down() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, AttributeError, UserError) as error:
        logger.error("The node's record of its answers can't be read or written: %s", error)
        raise UserError("This node is expected to store its answers, but can't; its own log says why.") from None


def digest_of_records(kind: str, content: RecordDict) -> str:
    """Return the SHA-256 in hex of a message's kind and whole content, arrays and settings in order."""
    found = hashlib.sha256(kind.encode())
    for name, record in content.items():
        found.update(f"\n{name!r} {type(record).__name__}".encode())
        for key, value in record.items():
            if isinstance(value, Array):
                shape = tuple(value.shape)
                found.update(f"\n{key!r} {value.dtype!r} {shape} {value.stype!r} {len(value.data)} ".encode())
                found.update(value.data)
            else:
                found.update(f"\n{key!r} {value!r}".encode())
    return found.hexdigest()


def in_actor() -> bool:
    """Return ``True`` in a process of Flower's simulation on Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def answer_once_mod(*, rounds: int | None = None) -> Mod:
    """Build a mod that makes an app answer a round of training or evaluation once, also after a restart.

    A repeated message gets the same bytes; another message of the same round is refused; after an exception, the round
    is not answered at all. Use it as ``ClientApp(mods=[answer_once_mod()])`` for an app whose training draws noise,
    such as by ``train_step`` or ``private_loader``; ``defense_mod`` contains it. ``rounds``: see :class:`Answers`.
    """

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if not (is_training(message) or is_evaluation(message)):
            return call_next(message, context)
        return answered_once(message, context, call_next, rounds=rounds)

    return refusing(mod)


def answered_once(
    message: Message,
    context: Context,
    call_next: ClientAppCallable,
    *,
    rounds: int | None = None,
    instead: Instead | None = None,
) -> Message:
    """Return the stored answer to a message; if there is none, call ``call_next`` and store its answer.

    Training, evaluation and each probe (request for the upload of one batch) are counted separately. ``rounds``: number
    of the last possible round. ``instead``: maker of a substitute if the app fails, but not for probes; see
    ``Answers.once``. ``UserError`` if another message of this round was answered, the run has no such round, or the
    message states none. ``UnansweredError`` if the app failed, or trains instead of answering a probe.
    """
    kind, round = asked_of(context, message)
    probe = asked_probe(message.content)
    question = digest_of_records(message.metadata.message_type, message.content)

    def work() -> RecordDict:
        content = content_of(call_next(message, context))
        if probe is not None and PROBED not in content:
            raise UserError("A probe is expected by clients with probe_mod alone, but this one has none; add the mod.")
        return content

    other = None if probe is not None else instead
    return Message(Answers(context, rounds).once([kind], round, question, work, instead=other), reply_to=message)


def content_of(reply: Message) -> RecordDict:
    """Return the content of an app's reply, or raise its error: ``UnfitMessageError`` if a mod refused the message."""
    if reply.has_error():
        unfit = reply.error.code == UNFIT
        raise (UnfitMessageError if unfit else UserError)(reply.error.reason)
    return reply.content


def refusing(mod: Mod) -> Mod:
    """Wrap ``mod`` so that errors become replies of one line; only a ``UserError`` without a path keeps its text."""

    def answering(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        def called() -> Message:
            try:
                if not message.has_content():  # nor a round by which it could be counted
                    raise UserError("A message with content is expected, but got an error; send content.")
                return mod(message, context, call_next)
            except UnansweredError as error:
                return _error(message, CLIENT_RAISED, str(error))
            except UserError as error:
                line = " ".join(str(error).split())
                if "/" not in line or Answers(context).forgets:
                    return _error(message, UNFIT, line)
                logger.error("The question is refused: %s", error)
                return _error(message, UNFIT, "The client can't do what it is asked for; its own log says why.")

        reply = attempt(called)
        if not isinstance(reply, Failure):
            return reply
        logger.error("The client's app failed: %s", reply.reason)
        return _error(message, CLIENT_RAISED, WITHHELD)

    return answering


def _error(message: Message, code: int, reason: str) -> Message:
    return Message(Error(code, reason), reply_to=message)


def asked_of(context: Context, message: Message) -> tuple[str, int]:
    """Return a message's kind and round; ``UserError`` without a round, by which repeated requests are recognized."""
    number, probe = merged_config(context, message.content).get(ROUND), asked_probe(message.content)
    if number is None and (group := message.metadata.group_id).isdecimal():  # the place in Flower's own workflows
        number = int(group)
    if isinstance(number, int) and not isinstance(number, bool):
        kind = str(message.metadata.message_type).removesuffix(".default")  # the same to Flower
        return (kind if probe is None else f"{kind}.probe-{probe[0]}"), number
    raise UserError(
        f"A defended client expects the number of the round as {ROUND!r} in the server's config, but it is missing:"
        " without it the same round could be asked for until the noise is averaged away; send it."
    )


FORMS = "fl-privacy.forms"  # record of ``context.state`` with the form of answers by kind, if there are no files
_TOOK = "fl-privacy.took"  # record of a form with the seconds of work behind the answer


def form_of(answer: RecordDict, seconds: float) -> RecordDict:
    """Return a reply's structure: its records with empty arrays, and the ``seconds`` that computing it took."""
    form = RecordDict({**answer, _TOOK: ConfigRecord({"seconds": seconds})})
    for name, record in answer.array_records.items():
        form[name] = ArrayRecord({k: Array.from_numpy_ndarray(np.empty(0, a.dtype)) for k, a in record.items()})
    return form


def like_form(form: RecordDict, arrays: Sequence[np.ndarray]) -> RecordDict | None:
    """Return a reply of the structure ``form`` with the values ``arrays``; ``None`` if it has more or fewer arrays."""
    if sum(map(len, form.array_records.values())) != len(arrays):
        return None
    left = iter(arrays)
    answer = RecordDict({name: record for name, record in form.items() if name != _TOOK})
    for name, record in form.array_records.items():
        filled = {k: Array.from_numpy_ndarray(np.asarray(next(left), dtype=a.dtype)) for k, a in record.items()}
        answer[name] = ArrayRecord(filled)
    return answer
