"""Answer a SuperNode's messages in a process: ``python -m fl_privacy.cli.node_worker ADDRESS APP ...``."""

import importlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from fl_privacy.cli.supernode import FOLDER, SECRET_BYTES
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.files import remove_untrusted, write_private
from fl_privacy.site.gate.apart import close_all
from fl_privacy.site.gate.linux_calls import hide_memory


def serve_node(address: str, app: str, report: str, policy: str = "") -> None:
    """Answer the messages of the SuperNode at ``address`` with the app MODULE:NAME until standard input ends.

    ``report``: file for an error in loading the app, empty if it loads. ``policy``: file of the site's policy, if any.
    """
    from fl_privacy.cli.faults import ENDING  # noqa: PLC0415  (an app's process needs none of it)

    hide_memory()
    secret = b""
    while len(secret) < SECRET_BYTES and (piece := os.read(0, SECRET_BYTES - len(secret))):
        secret += piece

    def end() -> None:
        attempt(close_all)
        os._exit(0)

    def end_with_parent() -> None:
        while os.read(0, 1):  # unbuffered, since a thread in a buffer would block the end
            pass
        if (folder := Path(report).parent).name.startswith(FOLDER) and folder.exists():  # the parent was killed
            remove_untrusted(folder)
        end()

    threading.Thread(target=end_with_parent, daemon=True).start()
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # in a thread, since this one may hold locks
            signal.signal(number, lambda *_: threading.Thread(target=end).start())
    loaded = attempt(lambda: answerer(app, policy))
    if isinstance(loaded, Failure):
        write_private(Path(report), loaded.reason.removeprefix("UserError: "))
        sys.exit(2)
    write_private(Path(report), "")
    from fl_privacy.flower.inside.supernode import SuperNodeAddress, answer_messages  # noqa: PLC0415  (takes seconds)

    answer_messages(SuperNodeAddress(address, secret), *loaded)


def answerer(app: str, policy: str) -> tuple[Any, ...]:
    """Return arguments for ``answer_messages``: to serve the installed ``app`` or, if ``policy`` allows, runs' apps."""
    from fl_privacy.site.gate.policy import read_policy  # noqa: PLC0415

    if not policy or (found := read_policy(policy)).runs is None:
        loaded = gated_app(app, policy) if policy else installed_app(app)
        return (lambda message, context, _: loaded(message, context),)
    from fl_privacy.flower.app_process import MOST_CELLS, Bundles  # noqa: PLC0415
    from fl_privacy.flower.gate import Gate  # noqa: PLC0415

    bundles = Bundles(Gate(found))
    return bundles.answer, bundles.rest, MOST_CELLS + 1  # which refuses, while all others work


def gated_app(reference: str, policy: str) -> Any:
    """Start the app ``reference`` (MODULE:NAME) in isolation; return an app that applies a policy file to messages."""
    from fl_privacy.flower.app_process import Cell  # noqa: PLC0415
    from fl_privacy.flower.gate import Gate  # noqa: PLC0415
    from fl_privacy.flower.inside.identity import identify_process  # noqa: PLC0415

    identify_process()
    gate = Gate(policy, name=reference)
    cell = Cell(reference, gate.policy.app)
    cell.start()
    return gate.around(cell)


def installed_app(reference: str) -> Any:
    """Import the ClientApp ``package.module:attribute``; ``UserError`` if there is none."""
    module, _, attribute = reference.partition(":")
    found = attempt(lambda: getattr(importlib.import_module(module), attribute))
    if isinstance(found, Failure):
        raise UserError(f"--app is expected as package.module:attribute, but got {reference}: {found.reason}.")
    if not callable(found):
        raise UserError(f"--app is expected to be a ClientApp, but {reference} is a {type(found).__name__}; name one.")
    return found


if __name__ == "__main__":
    serve_node(*sys.argv[1:])
