"""SuperLink and SuperNodes as processes on loopback, and the trial of a deployment (``deploy OUT --check``)."""

import json
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fl_privacy.errors import UserError
from fl_privacy.files import temporary_folder
from fl_privacy.site.deploy.certificates import expect_valid, make_authority, make_node_key
from fl_privacy.site.deploy.writing import Deployment

ADDRESS = "127.0.0.1"
START_SECONDS = 90.0
JOIN_SECONDS = 300.0
STOP_SECONDS = 10.0
_POLL = 0.2

JOINED = "SuperNode ID:"  # text in a node's output after the SuperLink has admitted it


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Secured:
    """Files for TLS of a SuperLink; see ``write_deployment``."""

    authority: Path
    certificate: Path
    key: Path


@dataclass(eq=False)
class LoopbackFederation:
    """Federation of processes on loopback, with their logs."""

    folder: Path
    secured: Secured | None = None  # files for TLS and node authentication; ``None`` uses neither
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    database: str | None = "superlink.db"  # name of a file in ``folder``; ``None`` keeps the database in memory
    _processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict, init=False)

    @property
    def address(self) -> str:
        return f"{ADDRESS}:{self.port}"

    def start_superlink(self) -> None:
        home = self.folder / "flwr"
        home.mkdir(parents=True, exist_ok=True)
        trust = f"root-certificates = {json.dumps(str(self.secured.authority))}" if self.secured else "insecure = true"
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "loopback"\n\n[superlink.loopback]\naddress = "{self.address}"\n{trust}\n'
        )
        command = ["flower-superlink", "--host", ADDRESS, "--port", str(self.port)]
        held = ":flwr-in-memory:" if self.database is None else str(self.folder / self.database)
        command += ["--database", held, "--disable-runtime-dependency-installation"]
        if self.secured:
            command += ["--ssl-ca-certfile", str(self.secured.authority), "--enable-supernode-auth"]
            command += ["--ssl-certfile", str(self.secured.certificate), "--ssl-keyfile", str(self.secured.key)]
        else:
            command += ["--insecure"]
        self.start("superlink", command)

        def listens() -> bool:
            with suppress(OSError), socket.create_connection((ADDRESS, self.port), timeout=1):
                return True
            return False

        self.wait_for("superlink", listens, "listen")

    def register(self, public_key: Path) -> None:
        self.flwr("supernode", "register", str(public_key), "loopback")

    def start_node(
        self,
        name: str,
        config: Mapping[str, object],
        *,
        key: Path | None = None,
        superlink: str | None = None,
        authority: Path | None = None,
        extra: tuple[str, ...] = (),
    ) -> None:
        command = [sys.executable, "-m", "fl_privacy", "supernode", "--superlink", superlink or self.address]
        command += ["--port", str(free_port()), "--node-config", _written(config), *extra]
        trusted = authority or (self.secured and self.secured.authority)
        command += ["--root-certificates", str(trusted)] if trusted else ["--insecure"]
        if key:
            command += ["--auth-supernode-private-key", str(key)]
        self.start(name, command)

    def wait_for_node(self, name: str, seconds: float = JOIN_SECONDS) -> None:
        """Wait until a node has joined; call it before a run. ``UserError`` if the node ends, or after ``seconds``."""
        self.wait_for(name, lambda: JOINED in self.said(name), "join the SuperLink", seconds)

    def run(self, name: str, app: Path, run_config: Mapping[str, object]) -> None:
        self.start(name, ["flwr", "run", str(app), "loopback", "--stream", "--run-config", _written(run_config)])

    def flwr(self, *arguments: str) -> str:
        run = partial(subprocess.run, capture_output=True, text=True, check=False, timeout=START_SECONDS)
        done = run(["flwr", *arguments], env=self.variables())
        if done.returncode:
            said = _last(done.stderr)
            raise UserError(f"flwr {shlex.join(arguments)} is expected to succeed, but said: {said}; correct that.")
        return done.stdout

    def start(self, name: str, command: list[str]) -> None:
        with self.log(name).open("ab") as log:
            pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            started = subprocess.Popen(command, env=self.variables(), cwd=self.folder, start_new_session=True, **pipes)
        self._processes[name] = started

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def said(self, name: str) -> str:
        return self.log(name).read_text(errors="replace")

    def ended(self, name: str) -> int | None:
        return self._processes[name].poll()

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()

    def wait_for(self, name: str, ready: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> None:
        """Wait until ``ready()``; ``UserError`` if ``name`` ends, or does not do ``what`` within ``seconds``."""
        deadline = time.monotonic() + seconds
        while not ready():
            if (status := self.ended(name)) is not None and not ready():
                said = _last(self.said(name))
                raise UserError(f"{name} is expected to {what}, but ended with {status}: {said}; correct that.")
            if time.monotonic() > deadline:
                said = _last(self.said(name))  # a trial's log does not outlast it
                raise UserError(f"{name} is expected to {what} in {seconds:g} s, but did not: {said}; try again.")
            time.sleep(_POLL)

    def wait(self, name: str, seconds: float) -> int:
        self.wait_for(name, lambda: self.ended(name) is not None, "end", seconds)
        return int(self._processes[name].returncode)

    def stop(self) -> None:
        for process in self._processes.values():
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            _signal(process, signal.SIGKILL)
            process.wait()

    def variables(self) -> dict[str, str]:
        own = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "FLWR_HOME": str(self.folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PYTHONDONTWRITEBYTECODE": "",  # otherwise each process compiles its imports
        }
        return {**os.environ, **own, **self.environment}


@contextmanager
def loopback_federation(federation: LoopbackFederation) -> Iterator[LoopbackFederation]:
    """Create the folder of ``federation``, all on this machine; end its processes when the block ends."""
    federation.folder.mkdir(parents=True, exist_ok=True)
    try:
        yield federation
    finally:
        federation.stop()


def _written(config: Mapping[str, object]) -> str:
    return " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())


def _signal(process: "subprocess.Popen[bytes]", number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing"


MOST_NODES = 4  # most nodes in a trial

ROUNDS = 2
RUN_SECONDS = 300.0
REFUSAL_SECONDS = 60.0
ONCE = ("--max-retries", "1", "--patience", "0")
UNREGISTERED, UNKNOWN_AUTHORITY = "unregistered node", "another authority"
"""Names of the nodes that the SuperLink must refuse."""


def check_deployment(folder: Path, say: Callable[[str], None]) -> int:
    """Start a deployment's server and nodes on this machine and train a small app; return 0 on success, else 1.

    ``say``: function that gets lines on the progress. ``UserError`` if a node has a policy (site.yaml).
    """
    deployment = Deployment.read(folder)
    nodes = [deployment.node(number) for number in range(deployment.nodes)]
    if behind := [node for node in nodes if (node / "site.yaml").exists()]:
        raise UserError(
            f"--check is expected to find nodes without policies, but {behind[0]} has a"
            " site.yaml; move it away for the trial."
        )

    def expect_private() -> None:
        own = [node / name for node in nodes for name in ("node.key", "state.key")]
        for key in (deployment.superlink / "superlink.key", *own):
            if stat.S_IMODE(key.stat().st_mode) & 0o077:
                raise UserError(f"{key} is expected to be private to its owner, but others may read it; chmod 600 it.")

    def certificate() -> str:
        end = expect_valid(deployment.superlink / "superlink.crt", deployment.authority[0], deployment.host)
        return f"for {deployment.host} until {end:%Y-%m-%d}"

    trial = _Trial(say)
    trial.step("private keys are their owner's alone", expect_private)
    trial.step("the SuperLink's certificate", certificate)
    with temporary_folder("fl-privacy-deploy-") as work:
        server = deployment.superlink
        secured = Secured(server / "ca.crt", server / "superlink.crt", server / "superlink.key")
        with loopback_federation(LoopbackFederation(work, secured)) as federation:
            if trial.step("the SuperLink starts with TLS", federation.start_superlink):
                _try_nodes(trial, deployment, federation)
    return int(trial.failed)


@dataclass
class _Trial:
    say: Callable[[str], None]
    failed: bool = field(default=False, init=False)

    def step(self, what: str, work: Callable[[], str | None]) -> bool:
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
            state = {"fl-privacy-state": str(federation.folder / f"state-{number}")}
            own = {"partition-id": number, "num-partitions": len(numbers), "fl-privacy-key": str(node / "state.key")}
            federation.start_node(f"node-{number}", own | state, key=node / "node.key")
        for number in numbers:
            federation.wait_for_node(f"node-{number}")
        return small_run(federation, deployment.app, len(numbers))

    if not trial.step(f"{len(numbers)} node keys are registered", register):
        return
    unregistered = partial(_refused, federation, UNREGISTERED, key=stranger)
    trial.step("a node whose key is not registered is refused", unregistered)
    own, other = deployment.node(0) / "node.key", federation.folder / "other.crt"
    misled = partial(_refused, federation, UNKNOWN_AUTHORITY, key=own, authority=other)
    trial.step("a SuperLink of another authority is refused", misled)
    if trial.step(f"{ROUNDS} rounds with {len(numbers)} nodes", run):
        sealed = partial(_expect_sealed, federation.folder, len(numbers))
        trial.step("what nodes keep is encrypted and their own", sealed)


def small_run(federation: LoopbackFederation, app: Path, nodes: int) -> str:
    """Train on digits for two rounds, with layers private to each of ``nodes`` nodes; ``UserError`` if it fails."""
    overrides = (
        f"federation.clients={nodes} federation.rounds={ROUNDS} federation.plan.batch_size=16 defense=spn attack=none"
        f" baseline=false device=cpu out={federation.folder / 'runs'}"
    )
    federation.run("run", app, {"overrides": overrides, "round-timeout": 120})
    federation.wait("run", RUN_SECONDS)
    if len(list((federation.folder / "runs").rglob("summary.json"))) != 1:
        raise UserError(f"The run is expected to finish, but did not; correct this: {federation.said('run')[-300:]}")
    return "finished"


def _refused(federation: LoopbackFederation, name: str, *, key: Path, authority: Path | None = None) -> str:
    federation.start_node(name, {}, key=key, authority=authority, extra=ONCE)
    status = federation.wait(name, REFUSAL_SECONDS)
    if status == 0:
        raise UserError(f"{name} is expected to be refused, but was admitted; do not start this deployment.")
    return f"it ended with status {status}"


def _expect_sealed(folder: Path, nodes: int) -> str:
    kept = [path for path in folder.glob("state-*/**/*") if path.is_file()]
    if len([path for path in kept if path.suffix == ".state"]) != nodes:
        raise UserError(f"{nodes} nodes are expected to keep a file each, but kept {len(kept)}; do not start them.")
    for path in kept:
        content = path.read_bytes()  # empty for a lock
        if stat.S_IMODE(path.stat().st_mode) & 0o077 or (content and not content.startswith(b"fl-privacy sealed")):
            raise UserError(f"{path} is expected to be encrypted and private, but is not; do not start the nodes.")
    return f"{len(kept)} files"
