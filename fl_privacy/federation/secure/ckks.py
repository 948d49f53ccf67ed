"""Additive homomorphic encryption of packed updates with CKKS (Cheon et al. 2017), by TenSEAL."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fl_privacy.extras import lacks

DEGREE, MODULUS_BITS, SCALE_BITS = 8192, (60, 40, 60), 40
"""Ring dimension and coefficient modulus of 128-bit security; half the dimension are the slots of a ciphertext."""


def _tenseal() -> Any:
    try:
        import tenseal  # noqa: PLC0415
    except ImportError as error:
        raise lacks("tenseal", "secure_aggregation=ckks") from error
    return tenseal


class Adder:
    """What the server can do: add ciphertexts without a secret key.

    Attributes:
        received: bytes of ciphertexts so far.
    """

    def __init__(self, context: bytes) -> None:
        self._tenseal = _tenseal()
        self.context = self._tenseal.context_from(context)
        self.received = 0

    def add(self, uploads: Iterable[Sequence[bytes]]) -> list[bytes]:
        """The sums, ciphertext by ciphertext; of ``uploads`` one at a time is held."""
        totals: list[Any] = []
        for upload in uploads:
            self.received += sum(map(len, upload))
            vectors = [self._tenseal.ckks_vector_from(self.context, c) for c in upload]
            totals = [t + v for t, v in zip(totals, vectors, strict=True)] if totals else vectors
        return [bytes(total.serialize()) for total in totals]


class KeyHolder:
    """What the clients share and the server lacks: the secret key."""

    def __init__(self) -> None:
        self._tenseal = _tenseal()
        self._context = self._tenseal.context(
            self._tenseal.SCHEME_TYPE.CKKS, DEGREE, coeff_mod_bit_sizes=list(MODULUS_BITS)
        )
        self._context.global_scale = 2**SCALE_BITS

    def public_context(self) -> bytes:
        """For an ``Adder``."""
        return bytes(self._context.serialize(save_secret_key=False, save_galois_keys=False, save_relin_keys=False))

    def encrypt(self, slots: Tensor) -> list[bytes]:
        """(N,) -> ciphertexts of up to ``DEGREE / 2`` slots."""
        pieces = slots.split(DEGREE // 2)
        return [bytes(self._tenseal.ckks_vector(self._context, p.tolist()).serialize()) for p in pieces]

    def decrypt(self, ciphertexts: Sequence[bytes]) -> Tensor:
        """(N,) float64."""
        vectors = (self._tenseal.ckks_vector_from(self._context, c) for c in ciphertexts)
        return torch.cat([torch.tensor(v.decrypt(), dtype=torch.float64) for v in vectors])
