"""The process that answers a SuperNode's messages: ``python -m fl_privacy.cli.node_worker ADDRESS APP``."""

import importlib
import os
import sys
import threading
from typing import Any

from fl_privacy.cli.supernode import SECRET_BYTES
from fl_privacy.errors import UserError
from fl_privacy.flower.inside.supernode import SuperNodeAddress, answer_messages


def serve_node(address: str, app: str) -> None:
    """Answer messages until standard input, which begins with the SuperNode's secret, is closed by its end."""
    secret = b""
    while len(secret) < SECRET_BYTES and (piece := os.read(0, SECRET_BYTES - len(secret))):
        secret += piece
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answer_messages(SuperNodeAddress(address, secret), installed_app(app))


def installed_app(reference: str) -> Any:
    """The ClientApp ``package.module:attribute``.

    Raises:
        UserError: there is none.
    """
    module, _, attribute = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"--app is expected to be package.module:attribute, but {reference}: {error}.") from error


def _end_with_parent() -> None:
    while os.read(0, 1):  # unbuffered: the interpreter could not end while a thread waits in a buffer
        pass
    os._exit(0)


if __name__ == "__main__":
    serve_node(*sys.argv[1:])
