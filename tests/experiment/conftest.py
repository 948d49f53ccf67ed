"""Runs that several tests look at, and weights for LPIPS that need no download."""

from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save_file

from fl_privacy.measure.lpips import _network
from tests.experiment.runs import TINY, Run, run

ALEXNET = {0: (64, 3, 11), 3: (192, 64, 5), 6: (384, 192, 3), 8: (256, 384, 3), 10: (256, 256, 3)}
"""Layer -> channels out, channels in, kernel."""


@pytest.fixture(scope="package", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """FL_PRIVACY_DATA with random weights of AlexNet and nothing else, for this process and those it starts."""
    root = tmp_path_factory.mktemp("data")
    rng = torch.Generator().manual_seed(0)
    weights = {}
    for layer, (out, into, size) in ALEXNET.items():
        weights[f"features.{layer}.weight"] = torch.randn(out, into, size, size, generator=rng) / (size * into**0.5)
        weights[f"features.{layer}.bias"] = torch.zeros(out)
    (root / "weights").mkdir()
    save_file(weights, root / "weights" / "alexnet_features.safetensors")
    _network.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FL_PRIVACY_DATA", str(root))
        yield
    _network.cache_clear()


@pytest.fixture(scope="package")
def undefended(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run without a defense, keeping what is intercepted."""
    return run("run", *TINY, "intercept.save=true", out=tmp_path_factory.mktemp("undefended"), drawn=True)


@pytest.fixture(scope="package")
def defended(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run with pruning, in a folder where nothing was run before."""
    return run("run", *TINY, "defense=pruning", out=tmp_path_factory.mktemp("defended"), drawn=True)
