"""A headless Chromium by its debugging pipe, with the standard library alone."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 60.0

_WITH_PIPES = """
import fcntl, os, sys
high = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 100) for number in sys.argv[1:3]]
for k, number in enumerate(high):
    os.dup2(number, 3 + k)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Becomes a browser that listens on descriptor 3 and answers on 4."""


def find_chromium() -> str | None:
    """Find the program, where there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a browser; its profile goes into ``folder``."""

    def __init__(self, folder: Path) -> None:
        program = find_chromium()
        assert program is not None
        (in_read, in_write), (out_read, out_write) = os.pipe(), os.pipe()
        arguments = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-extensions", "--disable-background-networking", "--disable-component-update",
            "--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WITH_PIPES, str(in_read), str(out_write), program, *arguments],
            pass_fds=(in_read, out_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(in_read)
        os.close(out_write)
        self._to, self._from, self._rest, self._number = in_write, out_read, b"", 0
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, EOFError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask the browser and return its answer; raise ``RuntimeError`` where it refuses."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": params}
        message = asked | ({"sessionId": self._session} if self._session else {})
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(
        self, page: str | Path, *, width: int = 1280, height: int = 900, dark: bool = False, media: str = ""
    ) -> None:
        """Show ``page``, an address or a file, once it has loaded."""
        address = page if isinstance(page, str) else page.resolve().as_uri()
        self.resize(width)
        self.look(dark=dark, media=media)
        self._events.clear()
        self.call("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._next())

    def resize(self, width: int) -> None:
        """Set the width of the window in pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)

    def look(self, *, dark: bool = False, media: str = "", calm: bool = False) -> None:
        """By night or by day, on a screen or on paper (``media="print"``), with or without motion."""
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if calm else "no-preference"},
        ]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def evaluate(self, expression: str) -> Any:
        """Evaluate ``expression`` in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """All of the page as a PNG."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def pdf(self) -> bytes:
        """Print the page as PDF."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"])

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("the browser is silent")
            if not (read := os.read(self._from, 1 << 16)):
                raise EOFError("the browser has ended")
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
