"""An audit within a sandbox, and its messages to the process outside."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_privacy.auditing.app.audit import AppAuditRequest, audit_app
from fl_privacy.auditing.app.bundle import read_app
from fl_privacy.auditing.app.remedies import remedies
from fl_privacy.errors import UserError, in_one_line
from fl_privacy.report.app_record import page_to_json
from fl_privacy.site.gate.framing import Said

Say = Callable[[Sequence[bytes]], None]


def audit_within(app: str, asked: Mapping[str, Any], say: Say) -> None:
    """Audit the app in folder or bundle ``app``, and send name, progress and pages by ``say``.

    ``asked`` has the fields of ``AppAuditRequest`` as plain values, with an ``out`` inside the sandbox.
    """
    logging.getLogger("flwr").propagate = False  # it writes its own lines
    try:
        found = read_app(app)
        say([Said.NAME, found.name.encode(errors="replace")])
        told: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in asked.items()}
        told |= {name: Path(told[name]) for name in ("out", "mirror") if told.get(name)}
        last = b""

        def show(page: Any, ran: Any) -> None:
            nonlocal last
            last = page_to_json(page, ran).encode(errors="backslashreplace")
            say([Said.PAGE, last])

        audit_app(
            found,
            AppAuditRequest(**told, sandboxed=True),
            lambda text: say([Said.TOLD, text.encode(errors="replace")]),
            show,
        )
        say([Said.DONE, last])
    except (Exception, SystemExit) as error:  # noqa: BLE001  (third-party code can raise anything)
        said = str(error) if isinstance(error, UserError) else f"The app raised {in_one_line(error)}."
        say([Said.FAILED, " ".join([said, *remedies([said, repr(error.__cause__)])]).encode(errors="replace")])
