"""Normal distributions of images: learned from public images, or of photographs in general."""

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_MOST_COMPONENTS, _MOST_IMAGES = 600, 5000
"""Most principal components, and most public images (evenly chosen) to learn them from."""

FEWEST = 50  # fewest public images for a prior

_OF_CLASS = 0.5  # weight of a class's own covariance; the rest is the covariance of all classes around their means

_CONTRAST = 0.25  # standard deviation of the pixels of photographs around their mean color


@dataclass(frozen=True, eq=False)
class PixelPrior:
    """A normal distribution of images, by class or for all: ``mean + basis z`` with standard normal z."""

    means: Tensor  # (K, N) of each class
    bases: Tensor  # (K, M, N), or (1, M, N) for all, scaled by the standard deviations
    residual: float  # standard deviation of a pixel in the directions left out
    images: int  # number of public images, 0 for photographs in general

    @property
    def components(self) -> int:
        return self.bases.shape[1]

    def of(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        own = labels.clamp(0, len(self.means) - 1)
        return self.means[own], own if len(self.bases) > 1 else torch.zeros_like(own)

    def images_of(self, variables: Tensor, labels: Tensor) -> Tensor:
        means, which = self.of(labels)
        if len(self.bases) == 1:
            return torch.add(means, variables @ self.bases[0])
        flat, kinds = variables.flatten(0, 1), which.flatten()
        found = torch.empty(len(flat), self.bases.shape[2]).to(variables)
        for kind in kinds.unique().tolist():  # type: ignore[no-untyped-call]
            rows = (kinds == kind).nonzero().flatten()
            found = found.index_copy(0, rows, flat[rows] @ self.bases[kind])
        return means + found.view(*variables.shape[:2], -1)

    def surprise(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """Return V victims' negative log density of images (V, B, pixels), up to a constant for each class."""
        means, which = self.of(labels)
        apart, total = pixels - means, pixels.new_zeros(len(pixels))
        for place in range(pixels.shape[1]):
            for kind in which[:, place].unique().tolist():  # type: ignore[no-untyped-call]
                rows = (which[:, place] == kind).nonzero().flatten()
                basis = self.bases[kind]
                scale = basis.square().sum(1).clamp_min(1e-12)
                inside = apart[rows, place] @ basis.T / scale
                rest = (apart[rows, place] - inside @ basis).square().sum(1)
                total = total.index_add(0, rows, 0.5 * (inside.square().sum(1) + rest / self.residual**2))
        return total

    def to(self, like: Tensor) -> "PixelPrior":
        return PixelPrior(self.means.to(like), self.bases.to(like), self.residual, self.images)


_learned = WeakTensorKeyDictionary()  # labels, classes and prior by images
_latest: dict[bytes, PixelPrior] = {}  # the last prior by its images' content: runs of a study load them anew
_MOST_KEPT = 1 << 23  # most values of a prior that is kept without its images


def learn_prior(images: Tensor, labels: Tensor | None, num_classes: int) -> PixelPrior:
    """Learn the prior of public ``images`` (N, C, H, W) in [0, 1] with classes ``labels`` (N,) if known."""
    if images not in _learned or _learned[images][0] is not labels or _learned[images][1] != num_classes:
        chosen = torch.linspace(0, len(images) - 1, min(_MOST_IMAGES, len(images))).long()
        few, classes = images[chosen], None if labels is None else labels[chosen].long()
        content = hashlib.blake2b(repr((few.shape, few.dtype, few.device, num_classes, classes is None)).encode())
        for each in (few,) if classes is None else (few, classes):
            content.update(each.cpu().numpy().tobytes())
        prior = _latest.get(content.digest()) or _learn(few, classes, num_classes)
        _learned[images] = labels, num_classes, prior
        _latest.clear()
        if prior.bases.numel() <= _MOST_KEPT:
            _latest[content.digest()] = prior
    found: PixelPrior = _learned[images][2]
    return found


def _learn(images: Tensor, labels: Tensor | None, num_classes: int) -> PixelPrior:
    pixels = images.flatten(1).float()
    classes = torch.zeros(len(pixels), dtype=torch.long) if labels is None else labels
    kinds = 1 if labels is None else num_classes
    mean = pixels.mean(0)
    means = torch.stack([pixels[classes == k].mean(0) if bool((classes == k).any()) else mean for k in range(kinds)])
    centered = pixels - means[classes]
    few = labels is None or pixels.shape[1] > 1024 or len(pixels) < 100 * kinds
    number = min(_MOST_COMPONENTS, pixels.shape[1], max(1, len(pixels) - kinds))
    if few:
        if min(centered.shape) <= 1024:
            _, sizes, directions = torch.linalg.svd(centered, full_matrices=False)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                _, sizes, columns = torch.svd_lowrank(centered, q=number, niter=3)
            directions = columns.T
        bases = torch.mul(sizes[:number, None] / len(centered) ** 0.5, directions[:number])[None]
    else:
        within, each = centered.T @ centered / len(centered), []
        for kind in range(kinds):
            own = centered[classes == kind]
            values, vectors = torch.linalg.eigh(_OF_CLASS * (own.T @ own / max(1, len(own))) + (1 - _OF_CLASS) * within)
            each.append((vectors.flip(1)[:, :number] * values.flip(0)[:number].clamp_min(1e-9).sqrt()).T)
        bases = torch.stack(each)
    variance = centered.square().mean() - bases.square().sum((1, 2)).mean() / pixels.shape[1]
    residual = math.sqrt(max(float(variance), 1e-4 * float(centered.square().mean()), 1e-8))
    return PixelPrior(means.float(), bases.float(), residual, len(pixels))


@lru_cache(maxsize=8)
def prior_of_photographs(shape: tuple[int, ...]) -> PixelPrior:
    """Build the prior of photographs of ``shape`` (C, H, W): amplitudes fall with the frequency (Field 1987)."""
    channels, height, width = shape
    rows, columns = _cosines(height), _cosines(width)
    amplitude = (1 + (torch.arange(height)[:, None] ** 2 + torch.arange(width)[None] ** 2).double()).rsqrt()
    amplitude = amplitude / amplitude.square().mean().sqrt() * _CONTRAST
    order = amplitude.flatten().argsort(descending=True, stable=True)[: max(1, _MOST_COMPONENTS // channels)]
    waves = torch.einsum("ah,bw->abhw", rows, columns).flatten(0, 1)[order] * amplitude.flatten()[order][:, None, None]
    bases = torch.einsum("kc,mhw->kmchw", _colors(channels), waves).flatten(0, 1).flatten(1)
    left = _CONTRAST**2 - float(waves.square().sum()) / (height * width)
    return PixelPrior(torch.full((1, math.prod(shape)), 0.5), bases.float()[None], math.sqrt(max(left, 1e-6)), 0)


def _cosines(side: int) -> Tensor:
    place = (torch.arange(side).double() + 0.5) * math.pi / side
    waves = torch.cos(torch.arange(side).double()[:, None] * place)
    return torch.div(waves, waves.square().sum(1, keepdim=True).sqrt())


def _colors(channels: int) -> Tensor:
    if channels == 1:
        return torch.ones(1, 1).double()
    basis, _ = torch.linalg.qr(torch.cat([torch.ones(channels, 1), torch.eye(channels)[:, :-1]], 1).double())
    strength = torch.full((channels, 1), 0.3).double()
    strength[0] = 1.0
    return torch.mul(basis.T, strength * channels**0.5)
