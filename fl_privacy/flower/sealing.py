"""Files of a node for its owner alone, encrypted if there is a key."""

import os
import secrets
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fl_privacy.errors import UserError
from fl_privacy.files import write_private

KEY_BYTES = 32
_MAGIC, _NONCE = b"fl-privacy sealed 1\n", 12


def write_own(path: Path, content: bytes, key: bytes | None) -> None:
    """Replace the file for its owner alone; with a key by AES-256-GCM, bound to the file's name."""
    write_private(path, content if key is None else seal(content, key, path.name))


def seal(content: bytes, key: bytes, name: str) -> bytes:
    """``content`` encrypted for the file ``name``."""
    nonce = secrets.token_bytes(_NONCE)
    return _MAGIC + nonce + AESGCM(key).encrypt(nonce, content, name.encode())


def read_own(path: Path, key: bytes | None) -> bytes:
    """The content of a file of ``write_own``.

    Raises:
        UserError: others own or read it, or it was written with another key, or with none.
    """
    content = read_unshared(path)
    if key is None:
        if content.startswith(_MAGIC):
            raise UserError(f"{path} is encrypted and expected with its key, but there is none; name it, or delete it.")
        return content
    if not content.startswith(_MAGIC):
        raise UserError(f"{path} is expected to be encrypted, but is not; delete it, or go without the key.")
    nonce, sealed = content[len(_MAGIC) : len(_MAGIC) + _NONCE], content[len(_MAGIC) + _NONCE :]
    try:
        return AESGCM(key).decrypt(nonce, sealed, path.name.encode())
    except InvalidTag as error:
        raise UserError(
            f"{path} is expected to be what was written with this key, but is not; name the right key, or delete it."
        ) from error


def read_unshared(path: Path) -> bytes:
    """The content of a file that nobody else owns or reads.

    Raises:
        UserError: others do.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if os.name == "posix" and (status.st_mode & 0o077 or status.st_uid != os.geteuid()):
            raise UserError(
                f"{path} is expected to be its user's alone, but others own or read it; delete it and let a new one be"
                " made."
            )
        return file.read()


def read_key(path: Path) -> bytes:
    """The 32 bytes of a key file.

    Raises:
        UserError: it can't be read, others can, or it holds something else.
    """
    try:
        key = read_unshared(path)
    except OSError as error:
        raise UserError(
            f"A key of {KEY_BYTES} bytes is expected in {path}, but {error.strerror or error}; make one: head -c 32"
            f" /dev/urandom > {path} && chmod 600 {path}."
        ) from error
    if len(key) != KEY_BYTES:
        raise UserError(f"A key of {KEY_BYTES} bytes is expected in {path}, but it holds {len(key)}.")
    return key
