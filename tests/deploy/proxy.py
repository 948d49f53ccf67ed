"""A TCP proxy on loopback that keeps what passes."""

import socket
import threading
from dataclasses import dataclass, field
from typing import Self


@dataclass
class Connection:
    """What one connection has carried, as (who spoke, bytes) in order."""

    pieces: list[tuple[str, bytes]] = field(default_factory=list)

    def said(self, who: str) -> bytes:
        return b"".join(piece for speaker, piece in self.pieces if speaker == who)


class RecordingProxy:
    """Listens on a port of its own and passes all on to ``target``, a port of loopback."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.connections: list[Connection] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def wire(self) -> bytes:
        """All that has passed, connection by connection and each direction in one piece."""
        connections = list(self.connections)
        return b"".join(connection.said(who) for connection in connections for who in ("node", "server"))

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.target))
            self.connections.append(connection := Connection())
            for who, source, sink in (("node", near, far), ("server", far, near)):
                threading.Thread(target=self._pass_on, args=(who, source, sink, connection), daemon=True).start()

    def _pass_on(self, who: str, source: socket.socket, sink: socket.socket, connection: Connection) -> None:
        try:
            while piece := source.recv(1 << 16):
                connection.pieces.append((who, piece))
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            sink.close()


def requests(content: bytes, path: bytes) -> list[bytes]:
    """Find the HTTP requests to ``path`` in what a connection has carried."""
    found, start = [], content.find(b"POST " + path + b" ")
    while start >= 0:
        end = content.index(b"\r\n\r\n", start) + 4
        head = content[start:end].lower()
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        found.append(content[start : end + length])
        start = content.find(b"POST " + path + b" ", end + length)
    return found


def resend(port: int, content: bytes) -> tuple[int, bytes]:
    """Send ``content`` on a new connection; returns its own port and what comes back within two seconds."""
    with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
        mine, answer = int(connection.getsockname()[1]), b""
        try:
            connection.sendall(content)
            while piece := connection.recv(1 << 16):
                answer += piece
        except OSError:
            pass
        return mine, answer
