"""The secret of a node, from which its clients draw what a server must not know; it stays on the node."""

import contextlib
import os
import secrets
from pathlib import Path

import platformdirs
from flwr.app import Context

from fl_privacy.errors import UserError
from fl_privacy.files import PRIVATE_FOLDER, write_private
from fl_privacy.rng import SECRET_BYTES, Secret

STATE = "fl-privacy-state"
"""Key of the node config: the folder of the node's secret."""

STATE_VARIABLE = "FL_PRIVACY_STATE"
"""Environment variable: the same, where the node config names none; else the user's state folder."""

SIMULATION_VARIABLE = "FL_PRIVACY_SIMULATION"
"""Environment variable: 1 says that nodes here are simulated, so that their clients draw from the run's seed. It is the
operator's to set; nothing in a message can."""

FILE = "node-secret"


def node_secret(context: Context) -> Secret:
    """What the client of ``context`` draws from: the node's own secret, told apart by run and node.

    The secret is drawn once by ``secrets``, in a file that only its owner can read: in the folder that the node
    config's ``fl-privacy-state`` names, else the variable FL_PRIVACY_STATE, else in the user's state folder.

    Raises:
        UserError: the file can't be made, others can read it, or it holds no secret.
    """
    named = context.node_config.get(STATE) or os.environ.get(STATE_VARIABLE)
    folder = Path(str(named)).expanduser() if named else Path(platformdirs.user_state_dir("fl_privacy"))
    return kept_secret(folder / FILE).derive("run", context.run_id, "node", context.node_id)


def kept_secret(path: Path) -> Secret:
    """The secret in ``path``; drawn and written for its owner alone where there is none yet.

    Raises:
        UserError: it can't be written, others can read it, or it is no secret.
    """
    try:
        if not path.exists():
            _make(path)
        return _read(path)
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


def _make(path: Path) -> None:
    """Write a new secret, unless another process was faster."""
    path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    drawn = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        write_private(drawn, secrets.token_bytes(SECRET_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(drawn, path)
    finally:
        drawn.unlink(missing_ok=True)


def _read(path: Path) -> Secret:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        key = file.read(SECRET_BYTES + 1)
    if os.name == "posix" and (status.st_mode & 0o077 or status.st_uid != os.geteuid()):
        raise UserError(
            f"{path} is expected to be its user's alone, but others own or read it; delete it, and a new one is drawn."
        )
    if len(key) != SECRET_BYTES:
        raise UserError(
            f"{path} is expected to hold a secret of {SECRET_BYTES} bytes, but does not; delete it, and a new one is"
            " drawn."
        )
    return Secret(key)
