"""What an update tells about its defense, against what the defense was set to."""

import pytest
import torch

from fl_privacy.attacks.adaptive import estimate_clip_norm, estimate_noise_std, estimate_step
from fl_privacy.defenses import dp_noise, quantization
from tests.attacks.defended import protected, smooth_images
from tests.attacks.victims import observe, smooth_net


def update(defense):
    batch = smooth_images(1)
    return protected(observe(smooth_net(), batch), batch, defense).update()


def norm(tensors):
    return float(torch.cat([t.flatten() for t in tensors.values()]).norm())


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_the_noise_is_told_from_the_gradient(scale):
    assert estimate_noise_std(update(dp_noise(scale=scale))) == pytest.approx(scale, rel=0.2)


def test_the_clip_norm_is_what_is_left_of_the_norm_without_noise():
    clean = update(dp_noise(scale=0.0))
    assert estimate_clip_norm(update(dp_noise(scale=0.0, clip_norm=0.5)), 0.0) == pytest.approx(0.5)
    noised = update(dp_noise(scale=0.01, clip_norm=0.5))
    assert norm(noised) > 0.55 and norm(clean) > 1
    assert estimate_clip_norm(noised, 0.01) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_step_is_that_of_the_quantizer(bits, rounding):
    weight = update(quantization(bits=bits, rounding=rounding))["2.weight"]
    levels = 2 if bits == 1 else 2**bits - 1
    assert estimate_step(weight) == pytest.approx(2 * float(weight.abs().max()) / (levels - 1), rel=1e-6)


def test_of_equal_elements_there_is_no_step():
    assert estimate_step(torch.ones(3)) == 0
