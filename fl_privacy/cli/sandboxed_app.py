"""Audit an app in a process that gives up network and files before it imports other packages."""

import json
from dataclasses import asdict

from fl_privacy.site.gate.framing import own_pipes, read_parts, write_parts
from fl_privacy.site.gate.isolation import Wishes, keep_apart


def serve_audit(inlet: int, outlet: int) -> None:
    """Report the effective isolation on the pipe ``outlet``; if it is complete, audit the app that ``inlet`` names."""
    (request,) = read_parts(inlet)
    asked = json.loads(request)
    wishes = Wishes(**asked["wishes"])
    held = keep_apart(wishes)
    write_parts(outlet, [json.dumps(asdict(held)).encode()])
    if held.is_all:
        from fl_privacy.auditing.app.audit import audit_within  # noqa: PLC0415  (not before)

        audit_within(
            asked["app"],
            {**asked["asked"], "out": f"{wishes.temporary}/audit"},
            lambda parts: write_parts(outlet, parts),
        )


if __name__ == "__main__":
    serve_audit(*own_pipes())
