"""Audit an app in an isolated process: ``audit --sandbox``."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fl_privacy.checks import number, whole
from fl_privacy.errors import UserError, visible
from fl_privacy.files import make_missing_private, make_out_folder
from fl_privacy.files.foreign import expanded
from fl_privacy.site.gate.apart import Apart
from fl_privacy.site.gate.framing import Said
from fl_privacy.site.gate.isolation import Wishes
from fl_privacy.site.gate.rules import RefusedError

MODULE = "fl_privacy.cli.isolated_app"
BEGUN_SECONDS = 120.0  # seconds within which a process must be isolated
LARGEST_PAGE = 64 << 20
MOST_MESSAGES = 100_000
LONGEST_NAME = 200
REFRESHED = 5.0  # seconds between two written pages while the app runs
MOST_LOOKED_AT = 5_000_000  # largest number of entries of a folder, recursively, that are checked for sockets

CACHES = {
    "HF_DATASETS_CACHE": ("HF_HOME", "~/.cache/huggingface", "datasets"),
    "HF_HUB_CACHE": ("HF_HOME", "~/.cache/huggingface", "hub"),
    "TORCH_HOME": ("XDG_CACHE_HOME", "~/.cache", "torch"),
    "SCIKIT_LEARN_DATA": ("", "~", "scikit_learn_data"),
    "FL_PRIVACY_DATA": ("", "", ""),
}
"""Variable of a data cache -> variable of its parent, default parent, and name in it."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits of an app in a sandbox; memory is of all processes together, temporary files included."""

    memory_mib: int = 8192
    processes: int = 128
    seconds: float = 14_400.0


def bounds_of(text: str) -> Bounds:
    """Parse ``--limits``, such as ``memory_mib=8192 processes=128``; ``UserError`` if it has another form."""
    limits: dict[str, Any] = {}
    for pair in text.split():
        name, _, value = pair.partition("=")
        if name not in Bounds.__dataclass_fields__ or not value.isascii() or not value.isdigit():
            raise UserError(f"--limits is expected as 'memory_mib=8192 seconds=14400', but got {pair!r}; correct it.")
        limits[name] = int(value[:20])
    from fl_privacy.site.gate.policy import LEAST_MEMORY  # noqa: PLC0415  (with NumPy, which other commands need not load)

    found = Bounds(**limits)
    whole("--limits memory_mib", found.memory_mib, at_least=LEAST_MEMORY, at_most=1 << 24, example=8192)
    whole("--limits processes", found.processes, at_least=1, at_most=100_000, example=128)
    number("--limits seconds", found.seconds, above=0, at_most=1e7, example=14_400)
    return found


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """Permissions of an app in a sandbox; ``reads`` are additional readable folders and files."""

    reads: Sequence[Path] = ()
    environment: Sequence[str] = ()
    bounds: Bounds = Bounds()


OFFLINE: Mapping[str, str] = {
    **{"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"},
    **{"WANDB_MODE": "disabled", "NEPTUNE_MODE": "debug", "CLEARML_OFFLINE_MODE": "1"},
}
"""Environment variables by which libraries do without a network."""


class Sandbox:
    """Audit of an app in a sandboxed child process; the app can't see ``out``, the folder of audits."""

    def __init__(self, app: Path, asked: Mapping[str, Any], out: Path, given: Allowed) -> None:
        self.app, self.asked, self.out, self.given = expanded(app).absolute(), asked, expanded(out).absolute(), given
        self.held, self.name, self._written = "", "", 0.0
        self.folder: Path | None = None
        self._last: bytes | None = None

    def audit(self, tell: Any) -> tuple[str, Path]:
        """Audit the app; return a summary line and the HTML page's path. ``tell`` is called with each line of progress.

        ``UserError`` if the app can't be isolated here, or its audit did not end.
        """
        named = {name: os.environ[name] for name in self.given.environment if name in os.environ}
        variables = {**OFFLINE, **caches(), **named}
        try:
            apart = Apart(MODULE, self._wishes(), variables)
        except OSError as error:
            raise UserError(
                f"--sandbox is expected to have a process, but the system has none to give ({error.strerror}); end"
                " others, or make room."
            ) from error
        try:
            self._begin(apart)
            return self._write(self._hear(apart, tell))
        except (RefusedError, ValueError) as error:
            raise UserError(self._ended(str(error))) from error
        except UserError as error:
            if self._last is not None:
                self._ended(str(error))
            raise
        finally:
            apart.close()

    def _wishes(self) -> Wishes:
        reads = [self.app, *([Path(self.asked["mirror"])] if self.asked.get("mirror") else []), *self.given.reads]
        for place in self.given.reads:
            if not expanded(place).exists():
                raise UserError(f"--reads is expected to be a folder or a file, but there is no {place}; correct it.")
        places = [str(expanded(place).absolute()) for place in reads]
        if any(self.out.resolve().is_relative_to(Path(place).resolve()) for place in places):
            make_missing_private(self.out)  # only an existing folder can be covered
        return Wishes(
            temporary="",
            reads=tuple(places),
            layered=(*([str(self.app)] if self.app.is_dir() else []), *caches().values()),
            hidden=(str(self.out), *(found for place in places for found in openings(place))),
            most_bytes=self.given.bounds.memory_mib << 20,
            most_processes=self.given.bounds.processes,
            internet=True,
        )

    def _begin(self, apart: Apart) -> None:
        held = apart.begin({"app": str(self.app), "asked": dict(self.asked)}, time.monotonic() + BEGUN_SECONDS)
        if not held.is_all:
            raise UserError(
                "--sandbox is expected to find the means to isolate an app, but this system lacks some."
                f" {held.in_words()} Run the audit in a virtual machine, or in a container without network."
            )
        means = ", ".join(dict.fromkeys((*held.files, *held.processes)))
        self.held = f"no network, terminal or files but the app, Python and data (read-only); {means}"

    def _hear(self, apart: Apart, tell: Any) -> bytes:
        from fl_privacy.report.audit_file import folder_name  # noqa: PLC0415  (takes seconds)

        deadline = time.monotonic() + self.given.bounds.seconds
        for _ in range(MOST_MESSAGES):
            kind, *rest = apart.receive(LARGEST_PAGE, deadline)
            if len(rest) != 1:
                raise ValueError("what it said is no page")
            (content,) = rest
            if kind == Said.NAME and self.folder is None:
                self.name = content.decode(errors="replace")[:LONGEST_NAME]
                self.folder = self.out / folder_name(self.name)
                make_out_folder(self.folder, self.folder, self.out)
            elif kind == Said.TEXT:
                tell(visible(content[: 4 * LONGEST_NAME].decode(errors="replace"))[:LONGEST_NAME])
            elif kind == Said.FAILED:
                raise UserError(visible(content[:8000].decode(errors="replace"))[:2000])
            elif kind == Said.DONE and self.folder is not None:
                return content
            elif kind == Said.PAGE and self.folder is not None and time.monotonic() - self._written > REFRESHED:
                self._write(content)
        raise RefusedError("size", f"it said more than {MOST_MESSAGES} things")

    def _write(self, content: bytes, broken: str = "") -> tuple[str, Path]:
        from jinja2 import TemplateError  # noqa: PLC0415

        from fl_privacy.report.audit_file import PAGE, record_of_json, terminal_line, write_audit  # noqa: PLC0415

        assert self.folder is not None
        record = record_of_json(content)
        record = replace(record, app=self.name, environment=[*record.environment, ("Sandbox", self.held)])
        if broken:
            record = replace(record, broken=broken, going_on="")
        try:
            write_audit(self.folder, record)
        except (ArithmeticError, AssertionError, TypeError, LookupError, TemplateError) as error:
            raise ValueError(f"what it said is no page: {type(error).__name__}") from error  # it can't be shown
        self._last, self._written = content, time.monotonic()
        return terminal_line(record, self.folder / PAGE), self.folder / PAGE

    def _ended(self, why: str) -> str:
        said = f"The app is expected to let its audit end, but {visible(why)[:1000]}"
        if self._last is None:
            return f"{said}; nothing was written, audit again."
        self._write(self._last, broken=said)
        return f"{said}; {self.folder} has what was known before, which says nothing of the rest."


def caches() -> dict[str, str]:
    """Return the existing folders of downloaded data, by the environment variable that names each."""
    found = {}
    for variable, (above, parent, name) in CACHES.items():
        place = os.environ.get(variable) or (parent and str(Path(os.environ.get(above) or parent) / name))
        if place and (folder := expanded(place).absolute()).is_dir():
            found[variable] = str(folder)
    return found


def openings(place: str) -> Iterator[str]:
    """Yield sockets, pipes and devices in a folder, by which an app could escape; ``UserError`` for a huge folder."""
    seen, folders = 0, [place]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                seen += 1
                if seen > MOST_LOOKED_AT:
                    raise UserError(
                        f"--sandbox is expected to look at all that the app may read, but {place} has more than"
                        f" {MOST_LOOKED_AT} files and folders; name a smaller one."
                    )
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not entry.is_symlink() and not entry.is_file(follow_symlinks=False):
                    yield entry.path
