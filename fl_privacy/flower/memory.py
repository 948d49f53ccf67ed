"""What a client keeps between rounds, and where: in Flower's context, or in a file of its node."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import safetensors.torch
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from safetensors import SafetensorError

from fl_privacy.defenses import ClientState
from fl_privacy.errors import UserError
from fl_privacy.files import PRIVATE_FOLDER
from fl_privacy.flower.node_secrets import state_folder, state_key, whose
from fl_privacy.flower.records import load_state, save_state
from fl_privacy.flower.sealing import read_own, write_own

SERVED = "served"
"""Key of the file's metadata: by kind of message, the last round that was answered, as JSON."""


class Memory(Protocol):
    """Where a client's private layers and the like survive between rounds."""

    def load(self, device: torch.device | str = "cpu") -> ClientState:
        """What was saved last, on ``device``; empty before the first round."""
        ...

    def save(self, state: ClientState, *, after: tuple[str, int] | None = None) -> None:
        """Keep ``state``; ``after`` are the kind and the round of the message whose answer it belongs to."""
        ...

    def expect_new(self, kind: str, round: int, *, bounded: bool = False) -> None:
        """Refuse what was answered before, where that is remembered.

        Args:
            kind: of message.
            round: its number.
            bounded: whether the caller knows how many rounds the run has, and has looked; else a round that is far
                ahead is refused too.
        """
        ...


MOST_AHEAD = 1000
"""By so much a round may be after the last one that was answered where nobody says how many a run has: a client that
answers a round refuses all before, and one absurd number would shut it out of the rest of the run."""

ANSWERED = "fl-privacy.answered"
"""Record of ``context.state``: by kind of message, the last round that was answered."""


def expect_unanswered(records: RecordDict, kind: str, round: int) -> None:
    """Refuse a round that ``remember_answer`` noted down, or an earlier one.

    Raises:
        UserError: it was answered before.
    """
    if round <= (last := last_answered(records, kind)):
        raise UserError(answered_before(last, round))


def last_answered(records: RecordDict, kind: str) -> int:
    """The last round that ``remember_answer`` noted down; -1 before the first."""
    last = records.config_records[ANSWERED].get(kind) if ANSWERED in records.config_records else None
    return last if isinstance(last, int) else -1


def last_of_all(records: RecordDict) -> int:
    """The last round that ``remember_answer`` noted down for any kind of message; -1 before the first."""
    kept: Mapping[str, object] = records.config_records.get(ANSWERED, {})
    return max((last_answered(records, kind) for kind in kept), default=-1)


def expect_near(last: int, round: int) -> None:
    """Refuse a round that is negative, or more than ``MOST_AHEAD`` after the ``last`` one that was answered.

    Raises:
        UserError: it is.
    """
    most = max(last, 0) + MOST_AHEAD
    if not 0 <= round <= most:
        raise UserError(
            f"A round of 0 to {most} is expected, {MOST_AHEAD} after the last one that was answered, but got {round};"
            " the question is refused. Say how many rounds the run has (rounds=, last_round or num-server-rounds in its"
            " config) where it has more."
        )


def remember_answer(records: RecordDict, kind: str, round: int) -> None:
    """Note down in ``records`` that the message ``kind`` of ``round`` is answered."""
    kept = dict(records.config_records[ANSWERED]) if ANSWERED in records.config_records else {}
    kept[kind] = round
    records[ANSWERED] = ConfigRecord(kept)


def answered_before(last: int, round: int) -> str:
    """Say that a round was answered, or a later one."""
    return (
        f"A message of a round after {last} is expected, but got one of round {round}: it was answered before,"
        " and a second answer would tell more than one; start a new run."
    )


class ContextMemory:
    """``context.state`` of a node: gone when the node restarts.

    Args:
        records: of the node's context.
        once: whether a round is answered once, as a deployed client needs: each further answer would be another draw
            of the same noise, and their mean has none. A simulation, whose draws repeat, may ask twice.
    """

    def __init__(self, records: RecordDict, *, once: bool = False) -> None:
        self.records, self.once = records, once

    def load(self, device: torch.device | str = "cpu") -> ClientState:
        """See ``Memory``."""
        return load_state(self.records, device)

    def save(self, state: ClientState, *, after: tuple[str, int] | None = None) -> None:
        """See ``Memory``."""
        save_state(self.records, state)
        if self.once and after is not None:
            remember_answer(self.records, *after)

    def expect_new(self, kind: str, round: int, *, bounded: bool = False) -> None:
        """Refuse a round that was answered before or is far ahead, where rounds are answered once.

        Raises:
            UserError: it was, or a later one, or it is.
        """
        if self.once:
            expect_unanswered(self.records, kind, round)
            if not bounded:
                expect_near(last_of_all(self.records), round)


class NodeMemory:
    """A file of the node: it outlives the node's process, and what it holds is in no message, not even on loopback.

    It changes as a whole, after the work and before the reply: a node that is killed goes on from the last round that
    it finished.

    Args:
        path: of the file, for its owner alone; its folder is made with the first save.
        key: 32 bytes with which the file is encrypted; ``None`` leaves it in the clear.
    """

    def __init__(self, path: Path, key: bytes | None = None) -> None:
        self.path = path
        self._key = key

    def load(self, device: torch.device | str = "cpu") -> ClientState:
        """What was saved last, on ``device``.

        Raises:
            UserError: others can read the file, it was sealed with another key, or holds something else.
        """
        return ClientState({name: t.to(device) for name, t in self._read()[0].items()})

    def save(self, state: ClientState, *, after: tuple[str, int] | None = None) -> None:
        """Replace the file at once."""
        served = dict(self._read()[1])
        if after is not None:
            served[after[0]] = after[1]
        tensors = {name: t.detach().cpu().contiguous() for name, t in state.tensors.items()}
        content = safetensors.torch.save(tensors, {SERVED: json.dumps(served)})
        self.path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        write_own(self.path, content, self._key)

    def expect_new(self, kind: str, round: int, *, bounded: bool = False) -> None:
        """Refuse a round that was answered before or is far ahead.

        Raises:
            UserError: it was, or a later one, or it is.
        """
        served = self._read()[1]
        if round <= (last := served.get(kind, -1)):
            raise UserError(answered_before(last, round))
        if not bounded:
            expect_near(max(served.values(), default=-1), round)

    def _read(self) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        if not self.path.exists():
            return {}, {}
        content = read_own(self.path, self._key)
        try:
            tensors = safetensors.torch.load(content)
            size = int.from_bytes(content[:8], "little")
            served = json.loads(json.loads(content[8 : 8 + size])["__metadata__"][SERVED])
        except (SafetensorError, KeyError, ValueError) as error:
            raise UserError(
                f"{self.path} is expected to hold what a client keeps between rounds, but does not; delete it, and the"
                " client starts afresh."
            ) from error
        return tensors, {str(kind): int(round) for kind, round in served.items()}


def node_memory(context: Context) -> NodeMemory:
    """The file of the client of ``context``, one for each run and partition, beside the node's secret.

    Raises:
        UserError: the node's key can't be read.
    """
    run, client = f"run-{context.run_id}", "-".join(map(str, whose(context)))
    return NodeMemory(state_folder(context) / run / f"{client}.state", state_key(context))
