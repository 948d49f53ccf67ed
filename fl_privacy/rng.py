"""Random streams named by what they are for, so that no draw depends on the order of the work."""

import hashlib

import torch


def derive_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream ``names`` under the run's ``seed``; independent for different names."""
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def derive_generator(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator on ``device`` for the stream ``names``, for example ``("client", 3, "round", 7)``."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, *names))
