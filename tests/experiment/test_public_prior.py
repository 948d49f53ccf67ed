"""A run's Bayesian privacy loss by what the attacker knows of pixels."""

import pytest
import torch

from fl_privacy.data import Dataset, Examples, TextExamples
from fl_privacy.errors import UserError
from fl_privacy.runs.build import build_metrics
from fl_privacy.runs.config.settings import BpkiSettings


def dark(number: int) -> Examples:
    """Make images of which nine pixels of ten are black, the others gray."""
    images = torch.zeros(number, 1, 10, 10, dtype=torch.uint8)
    images[:, :, 0] = 128
    return Examples(images, torch.zeros(number).long(), ("only",))


def test_a_prior_of_public_images_is_theirs() -> None:
    data = Dataset(train=dark(5), test=dark(5), name="dark")
    guess = dark(1).images.float() / 255
    uniform, public = (
        build_metrics(BpkiSettings(bins=10, smoothing=1e-6, prior=prior), None, data, data.train)["bpki"](guess, guess)
        for prior in (None, "public")
    )
    assert public.item() == pytest.approx(0, abs=1e-6) and uniform.item() > 1


def test_a_prior_of_pixels_is_expected_of_images() -> None:
    data = Dataset(train=dark(5), test=dark(5), name="dark")
    texts = TextExamples.__new__(TextExamples)
    with pytest.raises(UserError, match=r"The setting bpki\.prior, a histogram of pixels, is expected with images"):
        build_metrics(BpkiSettings(bins=10, smoothing=1.0, prior="public"), None, data, texts)
