"""Serve the pages of runs in progress on loopback, at a secret address (``fl-privacy watch``)."""

import hmac
import secrets
import sys
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import unquote

import typer

from fl_privacy.cli.faults import FAULTS, Interrupted, in_a_line
from fl_privacy.errors import UserError, say
from fl_privacy.files import UNENCODABLE

if TYPE_CHECKING:
    from fl_privacy.report.live import WatchedFolder

LOOPBACK = "127.0.0.1"

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Type": "text/html; charset=utf-8",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
}

FURTHER: Mapping[HTTPStatus, dict[str, str]] = {
    HTTPStatus.METHOD_NOT_ALLOWED: {"Allow": "GET, HEAD"},
    HTTPStatus.SERVICE_UNAVAILABLE: {"Refresh": "5"},
}


class WatchServer(ThreadingHTTPServer):
    """Local read-only web server of the ``watched`` runs' progress pages; its address holds a secret token."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, watched: "WatchedFolder", port: int = 0) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.watched = watched
        self.secret = secrets.token_urlsafe(16)

    def handle_error(self, request: object, client_address: object) -> None:
        error = sys.exception()
        if error is not None and not isinstance(error, ConnectionError):
            say(f"error: {in_a_line(error)}", aside=True)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/{self.secret}/"


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    timeout = 10
    server_version, sys_version = "fl-privacy", ""

    def do_GET(self) -> None:
        self._answer(*self._found())

    def do_HEAD(self) -> None:
        self.do_GET()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return lambda: self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "This page is for reading.")
        raise AttributeError(name)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the address holds the secret."""

    def _found(self) -> tuple[HTTPStatus, str]:
        names = {f"{name}:{self.server.server_port}" for name in (LOOPBACK, "localhost")}
        if self.headers.get_all("Host", []) not in [[name] for name in names]:
            return HTTPStatus.FORBIDDEN, "This page goes by another name."
        _, _, rest = self.path.partition("?")[0].partition("/")
        secret, _, address = rest.partition("/")
        if not hmac.compare_digest(secret.encode(), self.server.secret.encode()):
            return HTTPStatus.NOT_FOUND, "There is no such page; open the address that `fl-privacy watch` printed."
        try:
            page = self.server.watched.page(unquote(address))
        except FAULTS as error:  # a damaged record, or a folder that was moved
            return HTTPStatus.SERVICE_UNAVAILABLE, in_a_line(error)
        return (HTTPStatus.NOT_FOUND, "There is no such page.") if page is None else (HTTPStatus.OK, page)

    def _answer(self, status: HTTPStatus, text: str) -> None:
        body = text.encode(errors=UNENCODABLE)
        self.send_response(status)
        plain = {"Content-Type": "text/plain; charset=utf-8"} if status is not HTTPStatus.OK else {}
        length = {"Content-Length": str(len(body))}
        for name, value in (HEADERS | plain | FURTHER.get(status, {}) | length).items():
            self.send_header(name, value)
        with suppress(ConnectionError):  # the browser left before the page came
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)


def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, or of many: out=FOLDER.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on loopback; 0: a free one.")] = 0,
) -> None:
    """Serve the page of a run, sweep or trade-off in progress: progress, time left, latest images.

    On this machine alone, read-only, at an address with a secret. The page refreshes by itself; Ctrl-C ends it.
    """
    from fl_privacy.report.live import WatchedFolder  # noqa: PLC0415

    watched = WatchedFolder(folder)
    try:
        server = WatchServer(watched, port)
    except OSError as error:
        reason = f"{port} is not ({error.strerror})"
        raise UserError(f"--port is expected to be free, but {reason}; leave it out.") from error
    with server:
        say(f"Watching {watched.folder}; Ctrl-C ends it.\n{server.address}")
        try:
            server.serve_forever(poll_interval=0.2)
        except (Interrupted, KeyboardInterrupt):
            say("No longer watching; the run continues.")
