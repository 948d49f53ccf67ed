"""Descriptors of small gray images: the product of two descriptors is the images' correlation."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

BLURS = (0.0, 1.0, 2.0)  # standard deviations of the blurs in pixels
MOSAICS = ((2, False, False), (3, False, False), (3, False, True), (3, True, False), (4, False, False))
"""Side of a mosaic's squares in pixels; ``True`` to stretch whole squares to the image's size; ``True`` to begin at the
right edge. Mosaics have the indices after those of ``BLURS``.
"""

_MOSAIC = len(BLURS)
WINDOWS = 5  # number of windows of an image: the whole and its four halves
_DETAIL = 1.5  # standard deviation in pixels of the coarse brightness
LEAST_CONTRAST = 0.1 / 255  # standard deviation of pixels below which an image counts as blank


Made = TypeVar("Made")


class Latest(Generic[Made]):
    """Cache of the latest ``most`` results of ``make``, a function of tensors, by the tensors' content."""

    def __init__(self, make: Callable[..., Made], most: int) -> None:
        self._make, self._most, self._kept = make, most, dict[object, Made]()

    def __call__(self, *given: Tensor) -> Made:
        key = tuple((one.shape, one.dtype, hashlib.blake2b(one.numpy().tobytes()).digest()) for one in given)
        own, kept = (one.clone(memory_format=torch.contiguous_format) for one in given), self._kept
        kept[key] = found = kept.pop(key, None) or self._make(*own)
        while len(kept) > self._most:
            del kept[next(iter(kept))]
        return found


class Once:
    """Base class of objects that cache values computed from themselves; ``once`` computes and caches a value."""

    def once(self, key: object, make: Callable[[], Made]) -> Made:
        kept: dict[object, Made] = self.__dict__.setdefault("_kept", {})
        if key not in kept:
            kept[key] = make()
        return kept[key]


@dataclass(frozen=True)
class DescriptorScale:
    """Resolution (``side`` pixels) and pairs of blurs at which images are compared."""

    side: int  # pixels of the longer side after averaging
    pairs: tuple[tuple[int, int], ...]  # blurs of the shifted and of the other image, compared in every window
    whole: tuple[tuple[int, int], ...]  # blurs compared in the whole image only
    gap: int  # pixels between each half and the middle
    between: bool  # ``True`` to also shift by half an averaged pixel

    @property
    def ways(self) -> Iterator[tuple[int, int, int]]:
        """Yield three indices for each comparison: blur of the shifted image, blur of the other image, and window."""
        for of, to in self.pairs:
            for window in range(WINDOWS):
                yield of, to, window
        for of, to in self.whole:
            yield of, to, 0


COARSE = DescriptorScale(side=16, pairs=((0, 0), (0, 1)), whole=(), gap=1, between=True)
FINE = DescriptorScale(
    side=32,
    pairs=((0, 0), (2, 2)),
    whole=((0, 1), (0, 2), (1, 1), *((0, _MOSAIC + number) for number in range(len(MOSAICS)))),
    gap=2,
    between=True,
)


@dataclass(frozen=True, eq=False)
class Descriptors(Once):
    """Descriptors of images (N, C, H, W): feature vectors whose inner products are the images' correlations."""

    images: Tensor
    sight: DescriptorScale

    def rows(self, blur: int, window: int) -> Tensor:
        """Return the cached descriptors (N, D) of one window of the blurred images, each with norm 1.

        ``blur``: index in ``BLURS`` followed by ``MOSAICS``; ``window``: 0 for the whole image, 1 to 4 for its left,
        right, upper or lower half.
        """

        def inside() -> Tensor:
            gray = small(self.images.float().mean(1, keepdim=True), self.sight.side)
            edges = shift_reach(gray.shape[-2]), shift_reach(gray.shape[-1])
            changed = blurred(gray, BLURS[blur]) if blur < _MOSAIC else _mosaic(gray, *MOSAICS[blur - _MOSAIC])
            bottom, right = gray.shape[-2] - edges[0], gray.shape[-1] - edges[1]
            return with_detail(changed)[..., edges[0] : bottom, edges[1] : right]

        inner = self.once(blur, inside)
        cut = _windows(*inner.shape[-2:], self.sight.gap)[window]
        return self.once((blur, window), lambda: unit(inner[..., cut[0], cut[1]]).flatten(-3) / 2**0.5)


@dataclass(frozen=True, eq=False)
class ShiftedDescriptors(Once):
    """Descriptors of guessed images (G, C, H, W) and their mirror images, shifted by up to a tenth of the width."""

    images: Tensor
    sight: DescriptorScale

    def rows(self, blur: int, window: int) -> Tensor:
        """Return cached descriptors (G, V, D) of V variants of G images: gray versions, mirror images and shifts."""

        def inside() -> Tensor:
            images = with_detail(blurred(self._shown.flatten(0, 1), BLURS[blur]))
            images = images.view(*self._shown.shape[:2], *images.shape[1:])
            both = torch.stack([images, images.flip(-1)], dim=2)
            height, width = (side - 2 * shift_reach(side) for side in both.shape[-2:])
            return both.unfold(-2, height, 1).unfold(-2, width, 1).permute(0, 1, 2, 4, 5, 3, 6, 7)

        def everywhere() -> Tensor:
            places = self.once(blur, inside)
            cut = _windows(*places.shape[-2:], self.sight.gap)[window]
            places = places if window == 0 else places[:, : self._grays.shape[1]]
            return unit(places[..., cut[0], cut[1]]).flatten(5).flatten(1, 4) / 2**0.5

        return self.once((blur, window), everywhere)

    @cached_property
    def _grays(self) -> Tensor:
        return grays(small(self.images.float(), self.sight.side))

    @cached_property
    def _shown(self) -> Tensor:
        between = _between(self.images, self.sight.side) if self.sight.between else ()
        return torch.cat([self._grays, *(each[:, None] for each in between)], 1)


def largest(variants: Tensor, rows: Tensor) -> Tensor:
    """Return the largest absolute correlation (..., N) of each of N images with any of V variants of a guess.

    ``variants`` (..., V, D), ``rows`` (N, D): descriptors of the variants and of the images.
    """
    return (variants @ rows.T).abs_().amax(-2)


def small(images: Tensor, side: int) -> Tensor:
    """Downscale images (N, C, H, W) by averaging, to at most ``side`` pixels per side."""
    height, width = images.shape[-2:]
    factor = min(1.0, side / max(height, width))
    size = max(1, round(height * factor)), max(1, round(width * factor))
    return images if size == (height, width) else functional.adaptive_avg_pool2d(images, size)


def shift_reach(width: int) -> int:
    """Return the largest shift in pixels of an image of ``width`` pixels, about a tenth of the width."""
    return max(1, round(width / 10)) if width > 2 else 0


def blurred(images: Tensor, sigma: float) -> Tensor:
    """Blur images (N, C, H, W) by a Gaussian of ``sigma`` pixels, with repeated edges."""
    if not sigma:
        return images
    down, right = (_blur(side, sigma).to(images) for side in images.shape[-2:])
    return down @ images @ right.T


@lru_cache(maxsize=64)
def _blur(side: int, sigma: float) -> Tensor:
    reach = int(3 * sigma + 0.5)
    offset = torch.arange(-reach, reach + 1, dtype=torch.float64)
    from_pixel = (torch.arange(side)[:, None] + offset).clamp(0, side - 1).long()
    weights = torch.softmax(-(offset**2) / (2 * sigma**2), dim=0).expand(side, -1)
    return torch.zeros(side, side, dtype=torch.float64).scatter_add_(1, from_pixel, weights)


def _mosaic(gray: Tensor, side: int, stretched: bool, flipped: bool) -> Tensor:
    if flipped:
        return _mosaic(gray.flip(-1), side, stretched, False).flip(-1)
    height, width = gray.shape[-2:]
    if stretched and min(height, width) >= side:
        return functional.interpolate(functional.avg_pool2d(gray, side), size=(height, width))
    few = functional.avg_pool2d(gray, side, ceil_mode=True, count_include_pad=False)
    return functional.interpolate(few, scale_factor=side)[..., :height, :width]


def _between(images: Tensor, side: int) -> Iterator[Tensor]:
    # right and down, down, right; by half a pixel after reduction
    height, width = images.shape[-2:]
    half = round(max(height, width) / side / 2)
    if not half:
        return
    padded = functional.pad(images.float().mean(1, keepdim=True), (half, 0, half, 0), "replicate")
    for top, left in ((0, 0), (0, half), (half, 0)):
        yield small(padded[..., top : top + height, left : left + width], side)


def with_detail(gray: Tensor) -> Tensor:
    """Return images (N, 2, H, W): the gray ones (N, 1, H, W), and these minus a blurred copy."""
    return torch.cat([gray, gray - blurred(gray, _DETAIL)], dim=1)


@lru_cache(maxsize=64)
def _windows(height: int, width: int, gap: int) -> tuple[tuple[slice, slice], ...]:
    rows, columns = max(1, height // 2 - gap), max(1, width // 2 - gap)
    every = slice(None)
    return (
        (every, every),
        (every, slice(0, columns)),
        (every, slice(width - columns, width)),
        (slice(0, rows), every),
        (slice(height - rows, height), every),
    )


def unit(looks: Tensor) -> Tensor:
    """Return images ``looks`` (..., H, W) less their means, divided by their norms."""
    looks = looks - looks.mean((-2, -1), keepdim=True)
    norms = looks.square().sum((-2, -1), keepdim=True).sqrt()
    return looks / (norms + float(LEAST_CONTRAST * (looks.shape[-1] * looks.shape[-2]) ** 0.5))


_AGREE = 0.95  # least correlation of the channels' common part with their mean to use the mean alone


def grays(images: Tensor) -> Tensor:
    """Return gray versions (G, M, 1, H, W) of G images: channels' mean and, unless all agree, main component."""
    mean = images.mean(1, keepdim=True)
    if images.shape[1] == 1:
        return mean[:, None]
    pixels = images.flatten(2).double()
    pixels = pixels - pixels.mean(2, keepdim=True)
    pixels = pixels / (torch.linalg.vector_norm(pixels, dim=2, keepdim=True) + 1e-6)
    _, directions = torch.linalg.eigh(pixels @ pixels.mT)
    common = (directions[:, None, :, -1] @ pixels)[:, 0].to(images.dtype)
    plain = mean.flatten(1) - mean.flatten(1).mean(1, keepdim=True)
    agree = functional.cosine_similarity(common, plain, dim=1).abs() >= _AGREE
    if bool(agree.all()):
        return mean[:, None]
    common = common * (plain.std(1, keepdim=True) / common.std(1, keepdim=True).clamp_min(1e-12))
    return torch.stack([mean, torch.where(agree[:, None, None, None], mean, common.view_as(mean))], 1)
