import numpy as np
import pytest
import torch
from PIL import Image

from fl_privacy.data import Examples


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No test reads what another, or the user, decoded."""
    monkeypatch.setenv("FL_PRIVACY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FL_PRIVACY_DATA", raising=False)


@pytest.fixture
def picture():
    """Return a function that makes a PIL image of smooth color and a little noise."""

    def make(height=16, width=16, seed=0, mode="RGB"):
        generator = np.random.default_rng(seed)
        ramp = np.linspace(0, 200, height)[:, None, None] + np.linspace(0, 40, width)[None, :, None]
        pixels = ramp + generator.integers(0, 15, (height, width, 3))
        return Image.fromarray(pixels.astype(np.uint8)).convert(mode)

    return make


@pytest.fixture
def labelled():
    """Return a function that makes examples of which only the labels matter."""

    def make(count=600, classes=10, groups=None):
        labels = torch.arange(count) % classes
        owners = None if groups is None else torch.arange(count) % groups
        return Examples(torch.zeros(count, 1, 1, 1, dtype=torch.uint8), labels, tuple(map(str, range(classes))), owners)

    return make
