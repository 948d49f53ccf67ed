"""Updates as whole numbers, several to a slot of a ciphertext, such that sums can be taken apart again."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.checks import whole

SLOT_BITS = 40
"""Whole numbers up to 2^40 survive CKKS at the precision of ``fl_privacy.federation.secure.ckks``."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Quantized batching in the way of BatchCrypt (Zhang et al. 2020).

    Values in [-1, 1] are rounded to ``2^bits - 1`` levels, of which one is zero; as many as fit lie side by side in a
    slot, each with room above for the carries of ``summands`` additions.

    Attributes:
        bits: of a value.
        summands: how many packed updates are added at most.
    """

    bits: int = 16
    summands: int = 10

    def __post_init__(self) -> None:
        whole(
            "secure_aggregation.bits",
            self.bits,
            at_least=2,
            at_most=SLOT_BITS - self._room,
            example=f"more do not fit for {self.summands} clients, try 16",
        )

    @property
    def _room(self) -> int:
        return math.ceil(math.log2(max(1, self.summands)))

    @property
    def width(self) -> int:
        """Bits that a value takes up in a slot."""
        return self.bits + self._room

    @property
    def per_slot(self) -> int:
        """Values in a slot."""
        return SLOT_BITS // self.width

    @property
    def step(self) -> float:
        """Distance of two levels; a value is off by half of it at most."""
        return 1 / self._most

    @property
    def _most(self) -> int:
        """The level of 1; that of -1 is its negative."""
        return 2 ** (self.bits - 1) - 1

    def pack(self, values: Tensor) -> Tensor:
        """(N,) in [-1, 1] -> (ceil(N / per_slot),) whole numbers as float64."""
        levels = (values.double().clamp(-1, 1) * self._most).round().long() + self._most
        padding = -len(levels) % self.per_slot
        fields = torch.cat([levels, levels.new_zeros(padding)]).view(-1, self.per_slot)
        return (fields << self._shifts()).sum(1).double()

    def unpack(self, slots: Tensor, count: int, *, summands: int) -> Tensor:
        """The sum (count,) of the values of ``summands`` packed updates from the sum of their slots."""
        whole = slots.round().long()
        fields = (whole[:, None] >> self._shifts()) & (2**self.width - 1)
        return (fields.flatten()[:count] - summands * self._most).double() * self.step

    def _shifts(self) -> Tensor:
        return torch.arange(self.per_slot) * self.width
