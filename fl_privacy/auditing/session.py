"""The course of an audit: observe a training, attack its uploads, write ``audit.json`` and the page."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.report.audit_file import PAGE, write_audit
from fl_privacy.report.audit_page import AuditRecord
from fl_privacy.rng import streams_put_back

Show = Callable[[AuditRecord], None]
"""Receiver of the records of an audit."""


class AuditSession:
    """An audit that writes its record and page: of a strategy, of an app that is run, or of saved updates.

    ``show``: function that gets each record in a sandbox, where no file is written. ``line``: summary printed last.
    """

    def __init__(self, folder: Path, show: Show | None = None) -> None:
        self.folder, self.show, self.notes = folder, show, list[str]()
        self.content: Mapping[str, Any] = {}
        self.line, self.started = "", time.perf_counter()

    @property
    def page(self) -> Path:
        return (self.folder / PAGE).absolute()

    def record(self, going_on: str = "") -> AuditRecord:
        raise NotImplementedError

    def attack_all(self) -> None:
        raise NotImplementedError

    def write(self, going_on: str = "") -> AuditRecord:
        return self.put(self.record(going_on))

    def put(self, record: AuditRecord) -> AuditRecord:
        if self.show is None:
            self.content = write_audit(self.folder, record)
        else:
            self.show(record)
        return record

    def end(self) -> Failure | None:
        with streams_put_back():
            return attempt(self.attack_all)
