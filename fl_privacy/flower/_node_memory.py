"""Storage of a node's client states between rounds."""

import contextlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

import platformdirs
import safetensors.torch
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from flwr.app import ConfigRecord, Context, RecordDict
from safetensors import SafetensorError

from fl_privacy.defenses import ClientState
from fl_privacy.errors import UserError
from fl_privacy.files import make_missing_private, write_private
from fl_privacy.files.foreign import expanded
from fl_privacy.flower.records import PARTITION, load_state, save_state
from fl_privacy.rng import SECRET_BYTES, Secret

KEY_BYTES = 32
_MAGIC, _NONCE = b"fl-privacy sealed 1\n", 12


def write_own(path: Path, content: bytes, key: bytes | None) -> None:
    """Write a file that only its owner can read; a ``key`` encrypts it by AES-256-GCM, bound to the file's name."""
    write_private(path, content if key is None else seal(content, key, path.name))


def seal(content: bytes, key: bytes, name: str) -> bytes:
    """Encrypt ``content`` for the file ``name``."""
    nonce = secrets.token_bytes(_NONCE)
    return _MAGIC + nonce + AESGCM(key).encrypt(nonce, content, name.encode())


def read_own(path: Path, key: bytes | None) -> bytes:
    """Return what ``write_own`` wrote; ``UserError`` if others can read the file, or the cipher's ``key`` is wrong."""
    content = read_unshared(path)
    if key is None:
        if content.startswith(_MAGIC):
            raise UserError(f"{path} is expected with its key, but none is given; set {KEY_VARIABLE}, or delete it.")
        return content
    if not content.startswith(_MAGIC):
        raise UserError(f"{path} is expected to be encrypted, but is not; delete it, or give no key ({KEY_VARIABLE}).")
    nonce, sealed = content[len(_MAGIC) : len(_MAGIC) + _NONCE], content[len(_MAGIC) + _NONCE :]
    try:
        return AESGCM(key).decrypt(nonce, sealed, path.name.encode())
    except InvalidTag as error:
        raise UserError(
            f"{path} is expected to be encrypted by the given key, but is not; give the right key, or delete it."
        ) from error


def read_unshared(path: Path) -> bytes:
    """Return the content of a file; on POSIX systems, ``UserError`` if others own or can read the file."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if os.name == "posix" and (status.st_mode & 0o077 or status.st_uid != os.geteuid()):
            raise UserError(
                f"{path} is expected to be its user's alone, but others own or read it; delete it and let a new one be"
                " made."
            )
        return file.read()


def read_key(path: Path) -> bytes:
    """Return the 32 bytes of a key file; ``UserError`` if the file is not private, not readable, or has no key."""
    try:
        key = read_unshared(path)
    except OSError as error:
        raise _no_key(path, error.strerror or error) from error
    if len(key) != KEY_BYTES:
        raise _no_key(path, f"it holds {len(key)}")
    return key


def _no_key(path: Path, got: object) -> UserError:
    made = f"head -c 32 /dev/urandom > {path} && chmod 600 {path}"
    return UserError(f"A key of {KEY_BYTES} bytes is expected in {path}, but {got}; make one: {made}.")


STATE = "fl-privacy-state"  # node config key: folder of the node's secret

STATE_VARIABLE = "FL_PRIVACY_STATE"
"""Environment variable: folder of the node's secret if the node config has none; default: the user's state folder."""

SIMULATION_VARIABLE = "FL_PRIVACY_SIMULATION"
"""Environment variable of the operator: 1 lets clients derive random numbers from the run's seed."""

KEY = "fl-privacy-key"  # node config key: file of 32 bytes by which the node's files are encrypted
KEY_VARIABLE = "FL_PRIVACY_KEY"  # environment variable: the key file if the node config has none
FILE = "node-secret"


class SimulatedContext(Context):
    """The context of a node that this process itself simulates."""


def node_secret(context: Context) -> Secret:
    """Return the secret of the client of ``context`` in its run, derived from the node's secret.

    The node's secret is drawn once by ``secrets`` into a file in ``state_folder(context)`` that only its owner can
    read; ``UserError`` if the file can't be made, others can read it, or it holds no secret.
    """
    return kept_secret(state_folder(context) / FILE, state_key(context)).derive("run", context.run_id, *whose(context))


def whose(context: Context) -> tuple[str, int]:
    """Return the parts of a client's file names: ("partition", number) if it has a partition, else ("node", id)."""
    if isinstance(partition := context.node_config.get(PARTITION), int):
        return "partition", partition
    return "node", context.node_id


def state_folder(context: Context) -> Path:
    """Return the folder named by the node config or FL_PRIVACY_STATE, else the user's state folder."""
    named = context.node_config.get(STATE) or os.environ.get(STATE_VARIABLE)
    return expanded(str(named)) if named else Path(platformdirs.user_state_dir("fl_privacy"))


def state_key(context: Context) -> bytes | None:
    """Return the key that encrypts stored state, from the file that node config or FL_PRIVACY_KEY names, if any."""
    named = context.node_config.get(KEY) or os.environ.get(KEY_VARIABLE)
    return read_key(expanded(str(named))) if named else None


def kept_secret(path: Path, key: bytes | None = None) -> Secret:
    """Return the secret in the file ``path``, drawn and written if missing; ``key`` encrypts the file.

    ``UserError`` if others can read the file, or it holds no secret.
    """
    try:
        if not path.exists():
            make_missing_private(path.parent)
            drawn = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
            content = secrets.token_bytes(SECRET_BYTES)
            try:
                write_private(drawn, content if key is None else seal(content, key, path.name))
                with contextlib.suppress(FileExistsError):
                    os.link(drawn, path)
            finally:
                drawn.unlink(missing_ok=True)
        content = read_own(path, key)
    except OSError as error:
        raise UserError(
            f"A client's secret is expected to be kept in {path}, but {error.strerror or error}; set {STATE_VARIABLE}"
            " to a folder that its user can write."
        ) from error
    if len(content) != SECRET_BYTES:
        raise UserError(
            f"{path} is expected to hold a secret of {SECRET_BYTES} bytes, but holds {len(content)}; delete it, and a"
            " new one is drawn."
        )
    return Secret(content)


def is_simulation() -> bool:
    """Return whether FL_PRIVACY_SIMULATION is 1; ``UserError`` if it is neither 0 nor 1."""
    value = os.environ.get(SIMULATION_VARIABLE, "0")
    if value not in ("", "0", "1"):
        raise UserError(f"{SIMULATION_VARIABLE} is expected to be 0 or 1, but is {value!r}; set or unset it.")
    return value == "1"


SERVED = "served"  # metadata key of the file: last answered round by kind of message, as JSON

MOST_AHEAD = 1000
"""Largest step from the last answered round if the run's length is unknown; earlier rounds are refused afterwards."""

ANSWERED = "fl-privacy.answered"  # record of ``context.state`` with the last answered round by kind of message


def answered(records: RecordDict) -> dict[str, int]:
    """Return the last answered round by kind of message, as ``remember_answer`` recorded it."""
    kept = records.config_records.get(ANSWERED, ConfigRecord())
    return {kind: last for kind, last in kept.items() if isinstance(last, int)}


def expect_later(counted: Mapping[str, int], kind: str, round: int) -> None:
    """Raise ``UserError`` unless ``round`` is after ``counted[kind]``, the last answered round of such messages."""
    if round <= (last := counted.get(kind, -1)):
        raise UserError(
            f"A message of a round after {last} is expected, but got one of round {round}: it was answered before,"
            " and a second answer would leak more than one; start a new run."
        )


def expect_near(answered: Iterable[int], round: int) -> None:
    """Raise ``UserError`` if ``round`` is negative or over ``MOST_AHEAD`` rounds after the last ``answered`` one."""
    most = max([0, *answered]) + MOST_AHEAD
    if not 0 <= round <= most:
        raise UserError(
            f"A round of 0 to {most} is expected, {MOST_AHEAD} after the last one that was answered, but got {round};"
            " if the run has more rounds, state how many (rounds=, last_round or num-server-rounds in its config)."
        )


def remember_answer(records: RecordDict, kind: str, round: int) -> None:
    """Record in ``records`` that a message of this ``kind`` and ``round`` is answered."""
    records[ANSWERED] = ConfigRecord({**records.config_records.get(ANSWERED, {}), kind: round})


class ContextMemory:
    """Client state in Flower's ``context.state``, lost at a restart; with ``once``, each round is answered once."""

    def __init__(self, records: RecordDict, *, once: bool = False) -> None:
        self.records: RecordDict = records
        self.once: bool = once

    def load(self, device: torch.device | str = "cpu") -> ClientState:
        return load_state(self.records, device)

    def save(self, state: ClientState, *, after: tuple[str, int] | None = None) -> None:
        save_state(self.records, state)
        if self.once and after is not None:
            remember_answer(self.records, *after)

    def expect_new(self, kind: str, round: int, *, bounded: bool = False) -> None:
        if self.once:
            expect_later(answered(self.records), kind, round)
            if not bounded:
                expect_near(answered(self.records).values(), round)


class NodeMemory:
    """Client state in a file of the node, encrypted by ``key``; it survives restarts and is never sent."""

    def __init__(self, path: Path, key: bytes | None = None) -> None:
        self.path: Path = path
        self._key = key

    def load(self, device: torch.device | str = "cpu") -> ClientState:
        return ClientState({name: t.to(device) for name, t in self._read()[0].items()})

    def save(self, state: ClientState, *, after: tuple[str, int] | None = None) -> None:
        served = dict(self._read()[1])
        if after is not None:
            served[after[0]] = after[1]
        tensors = {name: t.detach().cpu().contiguous() for name, t in state.tensors.items()}
        content = safetensors.torch.save(tensors, {SERVED: json.dumps(served)})
        make_missing_private(self.path.parent)
        write_own(self.path, content, self._key)

    def expect_new(self, kind: str, round: int, *, bounded: bool = False) -> None:
        served = self._read()[1]
        expect_later(served, kind, round)
        if not bounded:
            expect_near(served.values(), round)

    def _read(self) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        if not self.path.exists():
            return {}, {}
        content = read_own(self.path, self._key)
        try:
            tensors = safetensors.torch.load(content)
            size = int.from_bytes(content[:8], "little")
            served = json.loads(json.loads(content[8 : 8 + size])["__metadata__"][SERVED])
        except (SafetensorError, KeyError, ValueError) as error:
            raise UserError(
                f"{self.path} is expected to hold what a client keeps between rounds, but can't be parsed; delete it,"
                " and the client starts afresh."
            ) from error
        return tensors, {str(kind): int(round) for kind, round in served.items()}


Memory = ContextMemory | NodeMemory  # a client's private layers and other state between rounds


def node_memory(context: Context) -> NodeMemory:
    """Return the file that keeps the client's state between rounds; ``UserError`` if its key can't be read."""
    run, client = f"run-{context.run_id}", "-".join(map(str, whose(context)))
    return NodeMemory(state_folder(context) / run / f"{client}.state", state_key(context))
