"""The process of ``audit --sandbox``: ``python -m fl_privacy.cli.sandboxed_app``, started by the command alone.

It gives up network, files and all else before it imports anything that is not the standard library's.
"""

import json
from dataclasses import asdict

from fl_privacy.site.gate.framing import own_pipes, read_parts, write_parts
from fl_privacy.site.gate.isolation import Wishes, keep_apart


def serve_audit(inlet: int, outlet: int) -> None:
    """Say what holds; where all does, audit the app that is asked for.

    Args:
        inlet: file descriptor of what the command says.
        outlet: of what it hears.
    """
    (told,) = read_parts(inlet)
    asked = json.loads(told)
    wishes = Wishes.of_plain(asked["wishes"])
    held = keep_apart(wishes)
    write_parts(outlet, [json.dumps(asdict(held)).encode()])
    if held.is_all:
        from fl_privacy.auditing.app.sandboxed import audit_within  # noqa: PLC0415  (not before)

        audit_within(
            asked["app"],
            {**asked["asked"], "out": f"{wishes.temporary}/audit"},
            lambda parts: write_parts(outlet, parts),
        )


if __name__ == "__main__":
    serve_audit(*own_pipes())
