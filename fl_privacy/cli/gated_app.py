"""The process of an app behind a gate, which gives up network and files before it imports third-party code."""

import json
from dataclasses import asdict

from fl_privacy.site.gate.framing import own_pipes, read_parts, write_parts
from fl_privacy.site.gate.isolation import Wishes, keep_apart


def serve_gate(inlet: int, outlet: int) -> None:
    """Answer the gate's messages until it closes its end."""
    (told,) = read_parts(inlet)
    asked = json.loads(told)
    held = keep_apart(Wishes.of_plain(asked["wishes"]))
    write_parts(outlet, [json.dumps(asdict(held)).encode()])
    _answer(inlet, outlet, asked["app"])


def _answer(inlet: int, outlet: int, reference: str) -> None:
    from fl_privacy.cli.node_worker import installed_app  # noqa: PLC0415  (not to be imported earlier)
    from fl_privacy.federation.replies import Failure, attempt  # noqa: PLC0415
    from fl_privacy.flower.inside import serialized  # noqa: PLC0415
    from fl_privacy.flower.inside.identity import identify_process  # noqa: PLC0415

    app = attempt(lambda: installed_app(reference))
    write_parts(outlet, [app.reason.removeprefix("UserError: ").encode() if isinstance(app, Failure) else b""])
    identify_process()
    while not isinstance(app, Failure):
        context, *message = read_parts(inlet)
        given = serialized.context_of(context)
        reply = attempt(lambda: serialized.message_parts(app(serialized.message_from_parts(message), given)))  # noqa: B023
        state = serialized.context_bytes(given)
        if isinstance(reply, Failure):
            write_parts(outlet, [reply.reason.encode() or b"failed", state])
        else:
            write_parts(outlet, [b"", state, *reply])


if __name__ == "__main__":
    serve_gate(*own_pipes())
