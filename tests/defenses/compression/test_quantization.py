import pytest
import torch
from scipy import stats

from fl_privacy.defenses import quantization
from fl_privacy.errors import UserError

from ..harness import flat, large_update, local_step, run

PAPER_BITS = [1, 2, 4, 8, 12, 16, 20, 24, 28]


@pytest.mark.parametrize("bits", PAPER_BITS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_levels_and_error_are_those_of_the_bits(bits, rounding):
    for name, q in run(quantization(bits=bits, rounding=rounding), large_update(), local_step()).items():
        clean = large_update()[name].double()
        top = clean.abs().max()
        assert len(q.unique()) <= 2**bits
        if bits == 1:
            assert len(q.unique()) == 2
            assert q.abs().unique().item() == pytest.approx(top if rounding == "stochastic" else clean.abs().mean())
            continue
        spacing = top / (2 ** (bits - 1) - 1)
        steps = q.double() / spacing
        if bits <= 16:  # beyond, float32 rounds the multiples
            torch.testing.assert_close(steps, steps.round(), rtol=1e-6, atol=1e-6)
        limit = spacing * (0.5 if rounding == "nearest" else 1.0)
        assert (q.double() - clean).abs().max() <= limit * (1 + 1e-6) + 2**-24 * top


def test_nearest_is_that_of_torch():
    x = large_update()["a.weight"]
    scale = (x.abs().max() / 127).item()
    reference = torch.fake_quantize_per_tensor_affine(x, scale, 0, -127, 127)
    torch.testing.assert_close(run(quantization(bits=8, rounding="nearest"), {"a": x}, local_step())["a"], reference)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_stochastic_rounding_has_no_bias_and_the_variance_of_a_coin(bits):
    x = torch.tensor([1.0, 0.37, -0.81, 0.0, -0.05])
    step = local_step()
    draws = torch.stack([run(quantization(bits=bits), {"a": x}, step)["a"] for _ in range(4000)]).double()
    spacing = {1: 2.0, 2: 1.0, 3: 1 / 3}[bits]
    up = ((x.double() + 1) / spacing) % 1
    std = spacing * (up * (1 - up)).sqrt()
    z = (draws.mean(0) - x)[std > 1e-6] / (std[std > 1e-6] / 4000**0.5)
    assert stats.chi2(len(z)).sf((z**2).sum().item()) > 0.001
    torch.testing.assert_close(draws.std(0), std, rtol=0.05, atol=1e-6)


def test_zeros_stay_zeros_from_two_bits_on():
    update = {"a": torch.zeros(5), "b": torch.tensor([0.0, 0.5, -1.0])}
    for bits in (2, 8):
        q = run(quantization(bits=bits), update, local_step())
        assert q["a"].tolist() == [0] * 5
        assert q["b"][0] == 0
    assert run(quantization(bits=1), update, local_step())["a"].tolist() == [0] * 5


def test_a_broken_update_stays_visibly_broken():
    assert flat(run(quantization(), {"a": torch.tensor([1.0, float("nan")])}, local_step())).isnan().any()


@pytest.mark.parametrize(
    "options", [{"bits": 0}, {"bits": 29}, {"bits": 2.5}, {"bits": True}, {"rounding": "up"}, {"error_feedback": True}]
)
def test_bad_options_are_one_line(options):
    with pytest.raises(UserError, match="expected") as error:
        quantization(**options)
    assert "\n" not in str(error.value)
