"""The secret of a node, from which its clients draw what a server must not know; it stays on the node."""

import contextlib
import os
import secrets
from pathlib import Path

import platformdirs
from flwr.app import Context

from fl_privacy.errors import UserError
from fl_privacy.files import PRIVATE_FOLDER, write_private
from fl_privacy.flower.records import PARTITION
from fl_privacy.flower.sealing import read_key, read_own, seal
from fl_privacy.rng import SECRET_BYTES, Secret

STATE = "fl-privacy-state"
"""Key of the node config: the folder of the node's secret."""

STATE_VARIABLE = "FL_PRIVACY_STATE"
"""Environment variable: the same, where the node config names none; else the user's state folder."""

SIMULATION_VARIABLE = "FL_PRIVACY_SIMULATION"
"""Environment variable: 1 says that nodes here are simulated, so that their clients draw from the run's seed. It is the
operator's to set; nothing in a message can."""

KEY = "fl-privacy-key"
"""Key of the node config: a file of 32 bytes with which what the node keeps is encrypted."""

KEY_VARIABLE = "FL_PRIVACY_KEY"
"""Environment variable: the same, where the node config names none."""

FILE = "node-secret"


class SimulatedContext(Context):
    """The context of a node that this process itself plays, as no node that was started elsewhere has."""


def node_secret(context: Context) -> Secret:
    """What the client of ``context`` draws from: the node's own secret, told apart by run and client.

    The secret is drawn once by ``secrets``, in a file that only its owner can read, in ``state_folder(context)``; it is
    encrypted if the node has a key.

    Raises:
        UserError: the file can't be made, others can read it, or it holds no secret.
    """
    kept = kept_secret(state_folder(context) / FILE, state_key(context))
    return kept.derive("run", context.run_id, *whose(context))


def whose(context: Context) -> tuple[str, int]:
    """What tells apart the clients of one state folder: a node's partition, which a restart leaves, else its id."""
    if isinstance(partition := context.node_config.get(PARTITION), int):
        return "partition", partition
    return "node", context.node_id


def state_folder(context: Context) -> Path:
    """Where a node keeps what never leaves it.

    The folder that the node config's ``fl-privacy-state`` names, else the variable FL_PRIVACY_STATE, else the user's
    state folder.
    """
    named = context.node_config.get(STATE) or os.environ.get(STATE_VARIABLE)
    return Path(str(named)).expanduser() if named else Path(platformdirs.user_state_dir("fl_privacy"))


def state_key(context: Context) -> bytes | None:
    """The key that the node config's ``fl-privacy-key`` or the variable FL_PRIVACY_KEY names; ``None`` without one.

    Raises:
        UserError: it can't be read, or others can.
    """
    named = context.node_config.get(KEY) or os.environ.get(KEY_VARIABLE)
    return read_key(Path(str(named)).expanduser()) if named else None


def kept_secret(path: Path, key: bytes | None = None) -> Secret:
    """The secret in ``path``; drawn and written for its owner alone where there is none yet.

    Raises:
        UserError: it can't be written, others can read it, or it is no secret.
    """
    try:
        if not path.exists():
            _make(path, key)
        return _read(path, key)
    except OSError as error:
        raise UserError(
            f"A client's secret is expected to be kept in {path}, but {error.strerror or error}; set {STATE_VARIABLE}"
            " to a folder that its user can write."
        ) from error


def is_simulation() -> bool:
    """Whether this process's environment says that clients are simulated.

    Raises:
        UserError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(SIMULATION_VARIABLE, "0")
    if value not in ("", "0", "1"):
        raise UserError(f"{SIMULATION_VARIABLE} is expected to be 0 or 1, but is {value!r}.")
    return value == "1"


def _make(path: Path, key: bytes | None) -> None:
    """Write a new secret, unless another process was faster."""
    path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    drawn = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    content = secrets.token_bytes(SECRET_BYTES)
    try:
        write_private(drawn, content if key is None else seal(content, key, path.name))
        with contextlib.suppress(FileExistsError):
            os.link(drawn, path)
    finally:
        drawn.unlink(missing_ok=True)


def _read(path: Path, key: bytes | None) -> Secret:
    content = read_own(path, key)
    if len(content) != SECRET_BYTES:
        raise UserError(
            f"{path} is expected to hold a secret of {SECRET_BYTES} bytes, but does not; delete it, and a new one is"
            " drawn."
        )
    return Secret(content)
