"""A gate that answers until it is ended, for ``site_policy.py``: each reply that left is a line of a file.

    python experiments/site_policy_gate.py FOLDER REPLIES [PLACE]

FOLDER holds site.yaml. With PLACE the ledger's folder is a file system of 64 KiB, filled up to PLACE bytes, in a
namespace of mounts of its own.
"""

import os
import sys
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict

from fl_privacy.flower.gate import Gate
from fl_privacy.flower.inside.identity import identify_process
from fl_privacy.flower.inside.serialized import message_bytes, message_of
from fl_privacy.site.gate import linux_calls as kernel

DISK = 64 << 10
WEIGHTS = 2000


def main(folder: Path, replies: Path, room: int | None) -> None:
    """Answer the same message without end."""
    if room is not None:
        kernel.unshare(kernel.NEWNS)
        kernel.mount("", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("tmpfs", str(folder / "ledger"), "tmpfs", 0, f"size={DISK},mode=0700")
    identify_process()
    gate = Gate(folder / "site.yaml")
    if room is not None:
        (folder / "ledger" / "filler").write_bytes(bytes(DISK - room))
    answer, message = gate.around(echo), question()
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    left = os.open(replies, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(left, b"up\n")
    for _ in range(10_000):
        reply = answer(message, context)
        if reply.has_error():
            os.write(left, f"refused: {reply.error.reason}\n".encode())
            break
        os.write(left, b"left\n")
    if room is not None:
        assert gate.ledger is not None
        (folder / "ledger" / "filler").unlink()
        sent = sum(entry.outcome == "sent" for entry in gate.ledger.entries())
        os.write(left, f"in the ledger: {sent}\n".encode())


def question() -> Message:
    """Return a message with weights."""
    content = RecordDict({"arrays": ArrayRecord({"w": Array.from_numpy_ndarray(np.zeros(WEIGHTS, np.float32))})})
    made = message_of(message_bytes(Message(content, 1, "train")))
    made.metadata.__dict__["_message_id"] = "1"
    return made


def echo(message: Message, context: Context) -> Message:
    """Reply what came."""
    return Message(RecordDict({"arrays": message.content.array_records["arrays"]}), reply_to=message)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
