import numpy as np
import pytest
import torch

from fl_privacy.defenses import quantization, selective_sharing
from fl_privacy.defenses.encoding import decode, encode, encoded_bytes, pack, packed_bytes, unpack
from fl_privacy.errors import UserError

from ..harness import large_update, local_step, run

N = 20_000
OVERHEAD = 2 * (6 + 4)
"""Header and scale of the two tensors of the update."""


def round_trip(update):
    decoded = decode(encode(update), update)
    assert list(decoded) == list(update)
    for name, t in update.items():
        assert decoded[name].dtype == t.dtype
        assert torch.equal(decoded[name], t)


@pytest.mark.parametrize("bits", [1, 2, 3, 7, 8, 13, 17, 28, 32])
def test_packing_is_that_of_numpy(bits):
    numbers = np.random.default_rng(0).integers(0, 2**bits, size=300_001)
    packed = pack(numbers, bits)
    assert len(packed) == packed_bytes(len(numbers), bits)
    text = "".join(f"{n:0{bits}b}" for n in numbers[:16])
    assert packed[: 2 * bits] == int(text, 2).to_bytes(2 * bits, "big")
    assert (unpack(packed, len(numbers), bits) == numbers).all()


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 12, 16, 20, 24, 28])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_quantized_updates_take_the_bits_promised(bits, rounding):
    update = run(quantization(bits=bits, rounding=rounding), large_update(), local_step())
    round_trip(update)
    assert encoded_bytes(update) <= N * bits / 8 + OVERHEAD + 2


@pytest.mark.parametrize("share", [0.001, 0.01, 0.05, 0.3])
def test_sparse_updates_take_positions_and_values(share):
    update = run(selective_sharing(share=share), large_update(), local_step())
    round_trip(update)
    k = round(share * N)
    assert encoded_bytes(update) <= min(N / 8 + 4 * k, k * (15 / 8 + 4)) + OVERHEAD + 2


def test_sparse_and_quantized_together():
    update = run(selective_sharing(share=0.05), large_update(), local_step())
    update = run(quantization(bits=4), update, local_step())
    round_trip(update)
    assert encoded_bytes(update) <= N / 8 + 0.05 * N * 4 / 8 + OVERHEAD + 2


def test_nothing_to_gain_costs_a_header_only():
    assert sum(map(len, encode(large_update()).values())) == 4 * N + 2 * 6
    assert encoded_bytes(large_update()) == 4 * N


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 4),
        torch.zeros(0),
        torch.tensor(1.5),
        torch.tensor([0.0, 3.0]),
        torch.tensor([float("inf"), 0.0, -1.0]),
        torch.ones(1),
        torch.randn(7, 9, dtype=torch.float64),
        torch.randn(33).to(torch.bfloat16),
        torch.randn(33).to(torch.float16).masked_fill_(torch.arange(33) > 1, 0),
        torch.randn(4, 6).T,
        torch.randn(5, requires_grad=True),
    ],
    ids=lambda t: f"{tuple(t.shape)}-{t.dtype}",
)
def test_every_shape_and_dtype_comes_back(tensor):
    round_trip({"a": tensor})


def test_negative_zeros_come_back():
    update = {"a": torch.tensor([-0.0, 0.0, 0.0, 1.0, -0.5]).repeat(20)}
    assert decode(encode(update), update)["a"].signbit().tolist() == update["a"].signbit().tolist()


def test_nan_comes_back():
    update = {"a": torch.tensor([float("nan"), 0.0, 1.0])}
    assert decode(encode(update), update)["a"].isnan().tolist() == [True, False, False]


def test_withheld_names_stay_withheld():
    update = large_update()
    assert list(decode(encode({"b.weight": update["b.weight"]}), update)) == ["b.weight"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: p[:-1],
        lambda p: p[:3],
        lambda p: p[:0],
        lambda p: torch.cat([p, p[:1]]),
        lambda p: torch.cat([torch.tensor([7], dtype=torch.uint8), p[1:]]),
        lambda p: torch.cat([p[:2], torch.tensor([255, 255, 255, 255], dtype=torch.uint8), p[6:]]),
    ],
)
@pytest.mark.parametrize("share", [1.0, 0.05, 0.001])
def test_damaged_bytes_are_refused(damage, share):
    update = run(selective_sharing(share=share), large_update(), local_step())
    encoded = {name: damage(p) for name, p in encode(update).items()}
    with pytest.raises(UserError, match="expected") as error:
        decode(encoded, update)
    assert "\n" not in str(error.value)


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="extra"):
        decode(encode({"extra": torch.ones(2)}), large_update())
