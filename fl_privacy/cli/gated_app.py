"""The process of an app behind a gate: ``python -m fl_privacy.cli.gated_app``, started by the gate alone.

It gives up network and files before it imports anything that is not the standard library's.
"""

import json
import os
import struct
from dataclasses import asdict

from fl_privacy.gate.framing import framed
from fl_privacy.gate.isolation import Wishes, keep_apart


def serve_gate(inlet: int, outlet: int) -> None:
    """Answer the gate's messages until it closes its end.

    Args:
        inlet: file descriptor of what the gate says.
        outlet: of what it hears.
    """
    (told,) = _read(inlet)
    asked = json.loads(told)
    wishes = asked["wishes"]
    held = keep_apart(Wishes(**{**wishes, "reads": tuple(wishes["reads"]), "writes": tuple(wishes["writes"])}))
    _write(outlet, [json.dumps(asdict(held)).encode()])
    _answer(inlet, outlet, asked["app"])


def _answer(inlet: int, outlet: int, reference: str) -> None:
    """Load the app in its own process, and answer messages by it."""
    from fl_privacy.cli.node_worker import installed_app  # noqa: PLC0415  (what follows may not be imported before)
    from fl_privacy.federation.replies import Failure, attempt  # noqa: PLC0415
    from fl_privacy.flower.inside.identity import identify_process  # noqa: PLC0415
    from fl_privacy.flower.inside.serialized import (  # noqa: PLC0415
        context_bytes,
        context_of,
        message_from_parts,
        message_parts,
    )

    app = attempt(lambda: installed_app(reference))
    _write(outlet, [app.reason.removeprefix("UserError: ").encode() if isinstance(app, Failure) else b""])
    identify_process()
    while not isinstance(app, Failure):
        context, *message = _read(inlet)
        given = context_of(context)
        reply = attempt(lambda: message_parts(app(message_from_parts(message), given)))  # noqa: B023
        state = context_bytes(given)
        if isinstance(reply, Failure):
            _write(outlet, [reply.reason.encode() or b"failed", state])
        else:
            _write(outlet, [b"", state, *reply])


def _read(descriptor: int) -> list[bytes]:
    (number,) = struct.unpack(">Q", _bytes(descriptor, 8))
    sizes = struct.unpack(f">{number}Q", _bytes(descriptor, 8 * number))
    return [_bytes(descriptor, size) for size in sizes]


def _bytes(descriptor: int, size: int) -> bytes:
    os.set_blocking(descriptor, True)  # an app can have changed it
    found = bytearray(size)
    rest = memoryview(found)
    while rest:
        if not (length := os.readv(descriptor, [rest])):
            os._exit(0)  # the gate has ended
        rest = rest[length:]
    return bytes(found)


def _write(descriptor: int, parts: list[bytes]) -> None:
    os.set_blocking(descriptor, True)
    for part in framed(parts):
        content = memoryview(part)
        while content:
            content = content[os.write(descriptor, content) :]


def own_pipes() -> tuple[int, int]:
    """Take standard input and output, which the gate holds, and return them; what an app prints goes to the log."""
    inlet, outlet = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return inlet, outlet


if __name__ == "__main__":
    serve_gate(*own_pipes())
