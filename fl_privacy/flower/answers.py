"""What a node has answered in a run: a question is answered by one draw of noise, however often it is asked."""

import hashlib
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Array, ConfigRecord, Context, Message, RecordDict

from fl_privacy.errors import UserError
from fl_privacy.files import PRIVATE_FOLDER
from fl_privacy.flower.memory import ANSWERED, answered_before, expect_unanswered, remember_answer
from fl_privacy.flower.node_secrets import SimulatedContext, is_simulation, state_folder, state_key, whose
from fl_privacy.flower.sealing import read_own, write_own

logger = logging.getLogger(__name__)

KEPT = "fl-privacy.answer/"
"""Begins the names of records of ``context.state`` that are the last answer to a kind of question."""

DIGESTS = "fl-privacy.questions"
"""Record of ``context.state``: by kind, the digest of the question that was answered last."""

ROUNDS_OF_RUN = "num-server-rounds"
"""Key of a run's config, as Flower's own apps have it."""

MOST_ROUNDS = 1_000_000
"""Of a run that does not say how many it has: a number beyond would shut a node out of all that come before."""


@dataclass(frozen=True)
class Answers:
    """The questions that the client of ``context`` has answered, by kind and round.

    They are counted in the node's context and, unless it is simulated, in a file of the node beside its secret: a
    restart forgets none. A deployed node also keeps its last answer to each kind, to give the same bytes again.

    Attributes:
        context: of the node.
        rounds: that the node answers in a run at most; ``None`` takes the run's own number.
    """

    context: Context
    rounds: int | None = None

    def again(self, kind: str, round: int, question: str) -> RecordDict | None:
        """Return the answer to the same question of the same round, or ``None`` where it is new.

        Args:
            kind: of question.
            round: its number.
            question: its digest, see ``digest_of``.

        Raises:
            UserError: another question of this round or of a later one was answered, the answer is gone with a
                restart, or the run has no such round.
        """
        self._expect_of_run(round)
        records = self.context.state
        digests = records.config_records.get(DIGESTS, {})
        counted = records.config_records.get(ANSWERED, {})
        if counted.get(kind) == round and digests.get(kind) == question and (kept := self._kept(kind)) is not None:
            return kept
        expect_unanswered(records, kind, round)
        last = self._in_file().get(kind)
        if last is not None and round <= last:
            raise UserError(answered_before(last, round))
        return None

    def expect_new(self, kind: str, round: int) -> None:
        """Raise ``UserError`` unless the question is new, where its answer can't be given again."""
        if self.again(kind, round, "") is not None:
            raise UserError(answered_before(round, round))

    def note(self, kind: str, round: int) -> None:
        """Count the question before its answer leaves, in the node's file first."""
        if not self._forgets():
            path = self._path()
            path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            counted = {**self._in_file(), kind: round}
            write_own(path, json.dumps(counted).encode(), state_key(self.context))
        remember_answer(self.context.state, kind, round)

    def keep(self, kind: str, question: str, answer: RecordDict) -> None:
        """Keep ``answer`` for the same question, in place of the one before; a simulated node keeps none."""
        if self._forgets():
            return
        records = self.context.state
        for name in [name for name in records if name.startswith(f"{KEPT}{kind}/")]:
            del records[name]
        for name, record in answer.items():
            records[f"{KEPT}{kind}/{name}"] = record
        digests = dict(records.config_records[DIGESTS]) if DIGESTS in records.config_records else {}
        records[DIGESTS] = ConfigRecord({**digests, kind: question})

    def _kept(self, kind: str) -> RecordDict | None:
        begin = f"{KEPT}{kind}/"
        found = {n.removeprefix(begin): r for n, r in self.context.state.items() if n.startswith(begin)}
        return RecordDict(found) if found else None

    def _expect_of_run(self, round: int) -> None:
        told = self.context.run_config.get(ROUNDS_OF_RUN)
        own = told if isinstance(told, int) and not isinstance(told, bool) else MOST_ROUNDS
        last = own if self.rounds is None else self.rounds
        if not 0 <= round <= last:
            raise UserError(
                f"A round of 0 to {last} is expected of this run, but got {round}; the question is refused."
            )

    def _in_file(self) -> Mapping[str, int]:
        if self._forgets() or not (path := self._path()).exists():
            return {}
        try:
            return {str(kind): int(last) for kind, last in json.loads(read_own(path, state_key(self.context))).items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path.name} in the node's state folder is expected to say which rounds were answered, but does not;"
                " nothing more of this run is answered."
            ) from error

    def _path(self) -> Path:
        client = "-".join(map(str, whose(self.context)))
        return state_folder(self.context) / f"run-{self.context.run_id}" / f"{client}.answered"

    def _forgets(self) -> bool:
        """Whether the node is simulated: by its operator's word, in this process, or in an actor of Ray."""
        return isinstance(self.context, SimulatedContext) or is_simulation() or _in_actor()


def digest_of(message: Message) -> str:
    """Tell questions apart: a hash of all that ``message`` says, its arrays and settings, in order."""
    found = hashlib.sha256(message.metadata.message_type.encode())
    for name, record in message.content.items():
        found.update(f"\n{name!r}".encode())
        for key, value in record.items():
            if isinstance(value, Array):
                found.update(f"\n{key!r} {value.dtype} {tuple(value.shape)} {value.stype} {len(value.data)} ".encode())
                found.update(value.data)
            else:
                found.update(f"\n{key!r} {value!r}".encode())
    return found.hexdigest()


def _in_actor() -> bool:
    """Whether this process is one of Flower's simulation on Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
