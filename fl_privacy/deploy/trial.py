"""``fl-privacy deploy OUT --check``: what is in the folder, tried on loopback."""

import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fl_privacy.deploy.certificates import expect_valid, make_authority, make_node_key
from fl_privacy.deploy.loopback import LoopbackFederation, Secured, loopback_federation
from fl_privacy.deploy.writing import Deployment
from fl_privacy.errors import UserError

MOST_NODES = 4
"""So many of the nodes are tried."""

ROUNDS = 2
RUN_SECONDS = 300.0
REFUSAL_SECONDS = 60.0
ONCE = ("--max-retries", "1", "--patience", "0")
UNREGISTERED, UNKNOWN_AUTHORITY = "unregistered node", "another authority"
"""What is expected to be refused."""


def check_deployment(folder: Path, say: Callable[[str], None]) -> int:
    """Try what ``write_deployment`` wrote: a line for each thing that works or does not.

    Returns:
        0 if all of it works, else 1.

    Raises:
        UserError: the folder holds no deployment.
    """
    deployment = Deployment.read(folder)
    trial = _Trial(deployment, say)
    trial.step("private keys are their owner's alone", lambda: _expect_private(deployment))
    trial.step("the SuperLink's certificate", lambda: _certificate(deployment))
    with tempfile.TemporaryDirectory(prefix="fl-privacy-deploy-") as work:
        server = deployment.superlink
        secured = Secured(server / "ca.crt", server / "superlink.crt", server / "superlink.key")
        with loopback_federation(LoopbackFederation(Path(work).resolve(), secured)) as federation:
            if trial.step("the SuperLink starts with TLS", federation.start_superlink):
                _try_nodes(trial, deployment, federation)
    return int(trial.failed)


@dataclass
class _Trial:
    deployment: Deployment
    say: Callable[[str], None]
    failed: bool = field(default=False, init=False)

    def step(self, what: str, work: Callable[[], str | None]) -> bool:
        """Do ``work`` and say how it went."""
        started = time.monotonic()
        try:
            detail = work()
        except (UserError, OSError) as error:
            self.failed = True
            self.say(f"FAILED  {what}: {error}")
            return False
        self.say(f"ok      {what}{f': {detail}' if detail else ''} ({time.monotonic() - started:.1f} s)")
        return True


def _try_nodes(trial: _Trial, deployment: Deployment, federation: LoopbackFederation) -> None:
    numbers = range(min(deployment.nodes, MOST_NODES))
    stranger = federation.folder / "stranger"
    make_node_key(stranger, stranger.with_suffix(".pub"))
    make_authority(federation.folder / "other.crt", federation.folder / "other.key")

    def register() -> None:
        for number in numbers:
            federation.register(deployment.node(number) / "node.pub")

    def run() -> str:
        for number in numbers:
            node = deployment.node(number)
            config = {
                "partition-id": number,
                "num-partitions": len(numbers),
                "fl-privacy-state": str(federation.folder / f"state-{number}"),
                "fl-privacy-key": str(node / "state.key"),
            }
            federation.start_node(f"node-{number}", config, key=node / "node.key")
        for number in numbers:
            federation.wait_for_node(f"node-{number}")
        return small_run(federation, deployment.app, len(numbers))

    def start_stranger() -> None:
        federation.start_node(UNREGISTERED, {}, key=stranger, extra=ONCE)

    def start_misled() -> None:
        key, other = deployment.node(0) / "node.key", federation.folder / "other.crt"
        federation.start_node(UNKNOWN_AUTHORITY, {}, key=key, authority=other, extra=ONCE)

    if not trial.step(f"{len(numbers)} node keys are registered", register):
        return
    trial.step(
        "a node whose key is not registered is refused", lambda: _refused(federation, UNREGISTERED, start_stranger)
    )
    trial.step(
        "a SuperLink of another authority is refused", lambda: _refused(federation, UNKNOWN_AUTHORITY, start_misled)
    )
    if trial.step(f"{ROUNDS} rounds with {len(numbers)} nodes", run):
        trial.step(
            "what nodes keep is encrypted and their own", lambda: _expect_sealed(federation.folder, len(numbers))
        )


def small_run(federation: LoopbackFederation, app: Path, nodes: int) -> str:
    """Train for two rounds with private layers on the embedded digits; returns what came of it."""
    overrides = (
        f"federation.clients={nodes} federation.rounds={ROUNDS} federation.plan.batch_size=16 defense=spn attack=none"
        f" baseline=false device=cpu out={federation.folder / 'runs'}"
    )
    federation.run("run", app, {"overrides": overrides, "round-timeout": 120})
    federation.wait("run", RUN_SECONDS)
    done = list((federation.folder / "runs").rglob("summary.json"))
    if len(done) != 1:
        raise UserError(
            f"The run is expected to finish, but did not; the end of its log: {federation.said('run')[-300:]}"
        )
    return "finished"


def _refused(federation: LoopbackFederation, name: str, start: Callable[[], None]) -> str:
    start()
    status = federation.wait(name, REFUSAL_SECONDS)
    if status == 0:
        raise UserError(f"{name} is expected to be refused, but ended well; see its log.")
    return f"it ended with status {status}"


def _certificate(deployment: Deployment) -> str:
    end = expect_valid(deployment.superlink / "superlink.crt", deployment.authority[0], deployment.host)
    return f"for {deployment.host} until {end:%Y-%m-%d}"


def _expect_private(deployment: Deployment) -> None:
    nodes = [deployment.node(number) for number in range(deployment.nodes)]
    keys = [deployment.superlink / "superlink.key", *(n / name for n in nodes for name in ("node.key", "state.key"))]
    for key in keys:
        if stat.S_IMODE(key.stat().st_mode) & 0o077:
            raise UserError(f"{key} is expected to be its owner's alone, but others may read it; run chmod 600 on it.")


def _expect_sealed(folder: Path, nodes: int) -> str:
    kept = [path for path in folder.glob("state-*/**/*") if path.is_file()]
    if len([path for path in kept if path.suffix == ".state"]) != nodes:
        raise UserError(f"Each of {nodes} nodes is expected to keep its private part, but {len(kept)} files are there.")
    for path in kept:
        content = path.read_bytes()  # of a lock, nothing
        if stat.S_IMODE(path.stat().st_mode) & 0o077 or (content and not content.startswith(b"fl-privacy sealed")):
            raise UserError(f"{path} is expected to be encrypted and its owner's alone, but is not.")
    return f"{len(kept)} files"
