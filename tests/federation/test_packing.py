"""Packed whole numbers add up like the values that they stand for."""

import pytest
import torch

from fl_privacy.errors import UserError
from fl_privacy.federation.ckks import SLOT_BITS, Packing


@pytest.mark.parametrize(("bits", "summands"), [(16, 10), (8, 3), (4, 100), (36, 16), (30, 1)])
def test_the_sum_of_packed_updates_is_the_sum_of_the_updates(bits: int, summands: int) -> None:
    packing = Packing(bits=bits, summands=summands)
    values = 2 * torch.rand(summands, 1001, generator=torch.Generator().manual_seed(0)).double() - 1
    values[:, 0], values[:, 1] = 1, -1
    values[:, 2] = 0

    slots = torch.stack([packing.pack(v) for v in values]).sum(0)

    assert slots.max() < 2**SLOT_BITS
    assert len(slots) == -(-1001 // packing.per_slot)
    found = packing.unpack(slots, 1001, summands=summands)
    assert (found - values.sum(0)).abs().max() <= summands * packing.step / 2 * (1 + 1e-6)
    assert found[0].item() == pytest.approx(summands)
    assert found[1].item() == pytest.approx(-summands)
    assert found[2] == 0


def test_more_bits_share_a_slot_with_fewer_values() -> None:
    assert [Packing(bits=b, summands=10).per_slot for b in (4, 8, 16, 20)] == [5, 3, 2, 1]
    with pytest.raises(
        UserError, match=r"bits is expected to be a whole number from 2 to 36, but got 40; more do not fit for 10"
    ):
        Packing(bits=40, summands=10)
