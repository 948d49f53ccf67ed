"""Run Flower's SuperNode with one process that answers all its messages: ``fl-privacy supernode``."""

import argparse
import contextlib
import importlib.util
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from fl_privacy.errors import UserError
from fl_privacy.files import temporary_folder, write_private
from fl_privacy.site.gate.linux_calls import hide_memory

logger: logging.Logger = logging.getLogger(__name__)

AGAIN_SECONDS = 5.0  # seconds before a dead worker, or a node that is not admitted, is started again
PAUSE_VARIABLE = "FL_PRIVACY_NODE_PAUSE"  # environment variable with the seconds that a restarted command waits first

POLL_SECONDS = 0.1
SECRET_BYTES = 32
FOLDER = "fl-privacy-node-"
OWN_APP = "fl_privacy.cli.flower_app:client_app"

_OURS = ("--isolation", "--superexec-auth-secret-file", "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile")


def run_node(arguments: Sequence[str], *, app: str, patience: float, policy: str = "") -> int:
    """Run ``flower-supernode ARGUMENTS`` with a worker process in which ``app`` answers; return its exit status.

    ``patience``: seconds to keep trying if the SuperLink fails or still counts a lost node as connected; 0 exits at
    once. ``policy``: the worker's policy, a file or name. ``UserError`` if ``arguments`` set what this command sets
    itself, or app, policy, ledger or isolation are not available.
    """
    given = [name for argument in arguments if len(name := argument.partition("=")[0]) > len("--i")]
    if taken := [ours for ours in _OURS if any(ours.startswith(name) for name in given)]:
        raise UserError(
            f"fl-privacy supernode sets {taken[0]} itself and is expected without it; use flower-supernode for another"
            " way to run apps."
        )
    _expect_app(app, here=not policy)
    parser = argparse.ArgumentParser(add_help=False)  # abbreviations too, as Flower takes them
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="9094")
    parser.add_argument("--auth-supernode-private-key", type=Path)
    of_node = parser.parse_known_args(arguments)[0]
    holds = bool(policy) and _expect_policy(policy, of_node.auth_supernode_private_key, app)
    from fl_privacy.flower.inside.supernode import run_supernode  # noqa: PLC0415

    time.sleep(float(os.environ.pop(PAUSE_VARIABLE, "0")))
    hide_memory()
    started, secret = time.monotonic(), secrets.token_bytes(SECRET_BYTES)
    with temporary_folder(FOLDER) as folder:
        report = folder / "app"
        own = ["-m", "fl_privacy.cli.node_worker", f"{of_node.host}:{of_node.port}", app, str(report), policy]
        worker = _started(command := [sys.executable, *own], secret)
        _expect_loaded(app, worker, report)
        threading.Thread(target=_keep_alive, args=(worker, command, secret), daemon=True).start()
        write_private(folder / "secret", secret)
        own = ["--isolation", "process", "--superexec-auth-secret-file", str(folder / "secret")]
        ended = run_supernode([*arguments, *own], holds=holds)
    left = patience if ended.lost else patience - (time.monotonic() - started) - AGAIN_SECONDS
    reason = "The SuperLink takes this node for connected still, does not know its key, or failed"
    if ended.lost:
        reason = f"The SuperLink failed, and this node gets no more messages ({ended.lost})"
    if (ended.not_admitted or ended.lost) and left > 0:
        logger.warning("%s: trying again", reason)
        # the same command replaces this process at once, before Flower ends it
        again = [sys.executable, "-m", "fl_privacy", "supernode", "--app", app, "--patience", f"{left:.1f}"]
        again += ["--policy", policy] if policy else []
        os.execve(sys.executable, [*again, *arguments], {**os.environ, PAUSE_VARIABLE: str(AGAIN_SECONDS)})
    if ended.lost:
        raise UserError(f"{reason}; look at the SuperLink's log and start the node again.")
    return ended.status


def _expect_policy(policy: str, key: Path | None, app: str) -> bool:
    """Check a site's policy and log its risks; return ``True`` if each run sends its own app instead of ``app``.

    ``UserError`` if ``app`` is this package's own, or may read the privacy ledger, the policy or the node's ``key``.
    """
    from fl_privacy.site.gate import READY  # noqa: PLC0415
    from fl_privacy.site.gate.isolation import Wishes, readable  # noqa: PLC0415
    from fl_privacy.site.gate.policy import holder_of, read_policy  # noqa: PLC0415
    from fl_privacy.site.gate.sentences import warnings_of  # noqa: PLC0415

    found = read_policy(policy)
    own = [] if policy in READY else [Path(policy)]
    own += [found.budget.ledger, found.budget.anchor] if found.budget else []
    own += [found.runs.folder] if found.runs else []
    own += [key] if key is not None else []
    given = [*map(Path, readable(Wishes(temporary=""))), *found.app.reads, *found.app.writes]
    for place in own:
        if within := holder_of(place, given):
            raise UserError(f"{place} is expected to be away from what the app reads, but is in {within}; move it.")
    if not hasattr(tempfile, "_resetperms"):
        logger.warning(
            "This Python follows links when it removes temporary folders (CVE-2023-6597): take 3.11.8, 3.12.1 or newer."
        )
    if found.runs is not None and app != OWN_APP:
        raise UserError(
            f"--app is expected to be left out, since {policy} says which runs bring their own, but got {app}; take"
            " runs out of the policy to answer by an installed app."
        )
    if found.runs is None and app == OWN_APP:
        raise UserError(
            "--policy is expected with an app of yours, but got none; add --app package.client_app:app, or runs to the"
            " policy, for apps that runs bring. This package's own clients take their settings from the run and keep"
            " state on the node, which no policy gives them."
        )
    for warning in warnings_of(found):
        logger.warning("%s", warning)
    return found.runs is not None


def _expect_app(app: str, *, here: bool) -> None:
    module, _, attribute = app.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise UserError(f"--app is expected to be package.module:attribute, but got {app!r}; try app.client_app:app.")
    sys.path[:] = [*[""] * here, *filter(None, sys.path)]  # as for the worker, which python -m starts
    found = None
    with contextlib.suppress(ImportError, ValueError):
        found = importlib.util.find_spec(module)
    if found is None:
        raise UserError(f"--app is expected to name an installed module, but there is no {module}; install the app.")


def _started(command: list[str], secret: bytes) -> "subprocess.Popen[bytes]":
    worker = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        worker.stdin.write(secret)
        worker.stdin.flush()
    return worker


def _expect_loaded(app: str, worker: "subprocess.Popen[bytes]", report: Path) -> None:
    while not report.exists():
        if worker.poll() is not None and not report.exists():
            raise UserError(f"--app is expected to be a ClientApp, but {app} ended its process; look at its output.")
        time.sleep(POLL_SECONDS)
    if reason := report.read_text(encoding="utf-8"):
        worker.wait()
        raise UserError(reason)


def _keep_alive(worker: "subprocess.Popen[bytes]", command: list[str], secret: bytes) -> None:
    while True:
        status = worker.wait()
        logger.warning("The process that answers messages ended with status %d and is started again", status)
        time.sleep(AGAIN_SECONDS)
        worker = _started(command, secret)
