"""Named random streams, derived from a seed or a secret; global streams; number of CPU threads."""

import hashlib
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import NoReturn

import numpy as np
import torch

SECRET_BYTES = 32  # length of a ``Secret`` in bytes, too long for a brute-force search

_WORDS, _HEADER = 624, 24
"""Number of state words of PyTorch's Mersenne Twister, and their byte offset in ``Generator.get_state()``."""


class Secret:
    """Secret of 32 bytes from which one client's random streams derive; never printed, pickled or sent."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) != SECRET_BYTES:
            raise ValueError(f"A secret is expected to have {SECRET_BYTES} bytes, but has {len(key)}; use draw().")
        self._key = bytes(key)

    @classmethod
    def draw(cls) -> "Secret":
        return cls(secrets.token_bytes(SECRET_BYTES))

    def derive(self, *names: str | int) -> "Secret":
        """Derive the secret of the stream ``names``, which reveals neither this secret nor those of other streams."""
        digest = hashlib.blake2b(key=self._key, digest_size=SECRET_BYTES)
        for name in map(str, names):
            digest.update(f"{len(name)}:{name}/".encode())
        return Secret(digest.digest())

    def bytes_of(self, purpose: str, number: int) -> bytes:
        return hashlib.shake_256(self._key + purpose.encode()).digest(number)

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A Secret is expected to stay in its process, but is to be copied or pickled; draw one there.")


class SecretGenerator(torch.Generator):
    """CPU generator seeded with a whole secret, instead of the 32 bits of ``manual_seed``.

    Enough output of the Mersenne Twister reveals its state. For output that others see, such as noise on a zero value,
    ``next_bytes`` gives cryptographic bytes from the same secret.
    """

    def __new__(cls, secret: Secret) -> "SecretGenerator":
        return super().__new__(cls)

    def __init__(self, secret: Secret) -> None:
        self._secret, self._taken = secret, 0
        self.set_state(_twister_state(secret.bytes_of("twister", 4 * _WORDS)))

    def next_bytes(self, number: int) -> bytes:
        self._taken += 1
        return self._secret.bytes_of(f"bytes-{self._taken}", number)


def derive_seed(seed: int, *names: str | int) -> int:
    """Derive the 63-bit seed of the stream ``names`` from the run's ``seed``; streams of other names are independent.

    The derived seed is not secret: PyTorch's CPU generator uses only 32 bits of it, which can be searched.
    """
    if not isinstance(seed, Integral):
        raise TypeError(f"A seed is expected to be a whole number or a Secret, but got {seed!r:.200}; try 0.")
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def derive_generator(
    seed: int | Secret, *names: str | int, device: torch.device | str = "cpu"
) -> torch.Generator | SecretGenerator:
    """Derive the generator of the stream ``names``, such as ("client", 3); for a ``Secret`` it is on the CPU."""
    if isinstance(seed, Secret):
        return SecretGenerator(seed.derive(*names))
    return torch.Generator(device=device).manual_seed(derive_seed(seed, *names))


@contextmanager
def seeded_globally(rng: torch.Generator, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed PyTorch's global streams of the CPU and of ``device`` from ``rng`` within the context."""
    gpus = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.set_state(rng.get_state())
        for gpu in gpus:
            with torch.cuda.device(gpu):
                if isinstance(rng, SecretGenerator):
                    torch.cuda.manual_seed(int.from_bytes(rng.next_bytes(8), "big") >> 1)
                else:
                    torch.cuda.manual_seed(rng.initial_seed())
        yield


@contextmanager
def global_stream(rng: torch.Generator) -> Iterator[None]:
    """Seed PyTorch's global CPU stream within the context from the next output of ``rng``."""
    with torch.random.fork_rng(devices=[]):
        if isinstance(rng, SecretGenerator):
            torch.default_generator.set_state(_twister_state(rng.next_bytes(4 * _WORDS)))
        else:
            torch.default_generator.manual_seed(int(torch.randint(2**62, (), generator=rng, device=rng.device)))
        yield


@contextmanager
def streams_put_back(seed: int | None = None) -> Iterator[None]:
    """Restore PyTorch's, NumPy's and Python's global streams after the context; ``seed`` sets them at its start."""
    ours, numpys = random.getstate(), np.random.get_state()
    gpus = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices=gpus):
            if seed is not None:
                torch.manual_seed(seed)
                np.random.seed(seed % 2**32)
                random.seed(seed)
            yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)


@dataclass(frozen=True, eq=False)
class Streams:
    """State of PyTorch's, NumPy's and Python's global streams, from ``streams_now``."""

    python: object
    numpy: object
    torch: torch.Tensor

    @contextmanager
    def used(self) -> Iterator[None]:
        with streams_put_back():
            random.setstate(self.python)  # type: ignore[arg-type]
            np.random.set_state(self.numpy)  # type: ignore[arg-type]
            torch.set_rng_state(self.torch)
            yield


def streams_now() -> Streams:
    """Return the current state of PyTorch's, NumPy's and Python's global streams of random numbers."""
    return Streams(random.getstate(), np.random.get_state(), torch.get_rng_state())


@contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """Let PyTorch use ``number`` CPU threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _twister_state(words: bytes) -> torch.Tensor:
    state = torch.Generator().manual_seed(0).get_state()
    held = np.frombuffer(words, dtype="<u4").astype("<u8")
    state[_HEADER : _HEADER + 8 * _WORDS] = torch.from_numpy(held.view(np.uint8).copy())
    return state
