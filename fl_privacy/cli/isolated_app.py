"""Run third-party code in a process that first gives up network and files."""

import io
import json
import sys
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fl_privacy.site.gate.framing import own_pipes, read_parts, write_parts
from fl_privacy.site.gate.isolation import Wishes, keep_apart


def serve(inlet: int, outlet: int) -> None:
    """Report the isolation in force on the pipe ``outlet``, then do what the first message on ``inlet`` asks for.

    It asks to answer a policy gate's messages until the pipes close, or to audit an app, which needs full isolation.
    """
    (request,) = read_parts(inlet)
    asked = json.loads(request)
    wishes = Wishes(**asked["wishes"])
    held = keep_apart(wishes)
    write_parts(outlet, [json.dumps(asdict(held)).encode()])
    if "bundled" in asked:
        bundle = read_parts(inlet) if asked["bundled"] else []
        _answer(inlet, outlet, partial(_loaded, asked["app"], bundle, asked["packages"]))
    elif held.is_all:
        from fl_privacy.auditing.app.audit import audit_within  # noqa: PLC0415  (not before)

        settings = {**asked["asked"], "out": f"{wishes.temporary}/audit"}
        audit_within(asked["app"], settings, partial(write_parts, outlet))


def _loaded(reference: str, bundle: list[bytes], packages: list[str]) -> Any:
    if not bundle:
        from fl_privacy.cli.node_worker import installed_app  # noqa: PLC0415  (not to be imported earlier)

        return installed_app(reference)
    from fl_privacy.flower.inside.identity import loaded  # noqa: PLC0415

    folder = Path("app").absolute()
    with zipfile.ZipFile(io.BytesIO(bundle[0])) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if "__pycache__" not in name])  # unreviewed
    sys.path[:0] = packages
    return loaded(reference, folder)


def _answer(inlet: int, outlet: int, load: Callable[[], Any]) -> None:
    from fl_privacy.federation.replies import Failure, attempt  # noqa: PLC0415
    from fl_privacy.flower.inside import serialized  # noqa: PLC0415
    from fl_privacy.flower.inside.identity import identify_process  # noqa: PLC0415

    app = attempt(load)
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
    serve(*own_pipes())
