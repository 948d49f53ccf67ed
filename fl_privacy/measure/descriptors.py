"""Descriptors of small gray images: the product of two descriptors is the images' correlation.

A guess has descriptors for all shifts by up to a tenth of its width and for its mirror image.
"""

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
    """Resolution and blurs at which images are compared."""

    side: int  # pixels of the longer side after averaging
    pairs: tuple[tuple[int, int], ...]  # blurs of the shifted and of the other image, compared in every window
    whole: tuple[tuple[int, int], ...]  # blurs compared in the whole image only
    gap: int  # pixels between each half and the middle
    between: bool  # ``True`` to also shift by half an averaged pixel

    @property
    def ways(self) -> Iterator[tuple[int, int, int]]:
        """Yield each comparison as three indices: blur of the shifted image, blur of the other image, and window."""
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
    """Descriptors (vectors whose products are correlations) of originals or candidates (N, C, H, W), not shifted."""

    images: Tensor
    sight: DescriptorScale

    def rows(self, blur: int, window: int) -> Tensor:
        """Return the cached unit-length descriptors (N, D) of N images, for a blur and a window by index."""

        def inside() -> Tensor:
            gray = small(self.images.float().mean(1, keepdim=True), self.sight.side)
            edges = shift_reach(gray.shape[-2]), shift_reach(gray.shape[-1])
            changed = blurred(gray, BLURS[blur]) if blur < _MOSAIC else _mosaic(gray, *MOSAICS[blur - _MOSAIC])
            bottom, right = gray.shape[-2] - edges[0], gray.shape[-1] - edges[1]
            return with_detail(changed)[..., edges[0] : bottom, edges[1] : right]

        inner = self.once(blur, inside)
        cut = _windows(*inner.shape[-2:], self.sight.gap)[window]
        return self.once((blur, window), lambda: _unit(inner[..., cut[0], cut[1]]))


@dataclass(frozen=True, eq=False)
class ShiftedDescriptors(Once):
    """Descriptors of a guess (1, C, H, W) in [0, 1] and of its mirror image, shifted by up to a tenth of the width."""

    image: Tensor
    sight: DescriptorScale

    def rows(self, blur: int, window: int) -> Tensor:
        """Return cached descriptors (V, D) of all V variants of the guess, for a blur and a window by index.

        The variants are gray versions, mirror images and shifts.
        """

        def everywhere() -> Tensor:
            images = self.once(blur, lambda: with_detail(blurred(self._shown, BLURS[blur])))
            both = torch.stack([images, images.flip(-1)], dim=1)[: len(images) if window == 0 else len(self._grays)]
            height, width = (side - 2 * shift_reach(side) for side in both.shape[-2:])
            places = both.unfold(-2, height, 1).unfold(-2, width, 1).permute(0, 1, 3, 4, 2, 5, 6).flatten(1, 3)
            cut = _windows(height, width, self.sight.gap)[window]
            return _unit(places[..., cut[0], cut[1]]).flatten(0, 1)

        return self.once((blur, window), everywhere)

    @cached_property
    def _grays(self) -> Tensor:
        return grays(small(self.image.float(), self.sight.side))

    @cached_property
    def _shown(self) -> Tensor:
        return torch.cat([self._grays, *(_between(self.image, self.sight.side) if self.sight.between else ())])


def largest(places: Tensor, rows: Tensor) -> Tensor:
    """Return each row's largest absolute correlation (N,): ``rows`` (N, D) with any of ``places`` (V, D)."""
    return (places @ rows.T).abs_().amax(0)


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
    reach = int(3 * sigma + 0.5)
    offset = torch.arange(-reach, reach + 1, dtype=images.dtype, device=images.device)
    weights = torch.softmax(-(offset**2) / (2 * sigma**2), dim=0)
    flat = images.reshape(-1, 1, *images.shape[-2:])
    if len(flat) > 1:  # sums of shifted images, which are the same bits in an eighth of the time
        for dim, edges in ((-2, (0, 0, reach, reach)), (-1, (reach, reach, 0, 0))):
            padded, side = functional.pad(flat, edges, "replicate"), flat.shape[dim]
            flat = padded.narrow(dim, 0, side) * weights[0]
            for shift, weight in enumerate(weights[1:].tolist(), 1):
                flat.add_(padded.narrow(dim, shift, side), alpha=weight)
        return flat.reshape(images.shape)
    rows = functional.conv2d(functional.pad(flat, (0, 0, reach, reach), "replicate"), weights.view(1, 1, -1, 1))
    found = functional.conv2d(functional.pad(rows, (reach, reach, 0, 0), "replicate"), weights.view(1, 1, 1, -1))
    return found.reshape(images.shape)


def _mosaic(gray: Tensor, side: int, stretched: bool, flipped: bool) -> Tensor:
    if flipped:
        return _mosaic(gray.flip(-1), side, stretched, False).flip(-1)
    height, width = gray.shape[-2:]
    if stretched and min(height, width) >= side:
        return functional.interpolate(functional.avg_pool2d(gray, side), size=(height, width))
    few = functional.avg_pool2d(gray, side, ceil_mode=True, count_include_pad=False)
    return functional.interpolate(few, scale_factor=side)[..., :height, :width]


def _between(image: Tensor, side: int) -> Iterator[Tensor]:
    """Yield gray, downscaled versions of an image (1, C, H, W), shifted by half a pixel; none if the image is small."""
    height, width = image.shape[-2:]
    half = round(max(height, width) / side / 2)
    if not half:
        return
    padded = functional.pad(image.float().mean(1, keepdim=True), (half, 0, half, 0), "replicate")
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


def _unit(looks: Tensor) -> Tensor:
    looks = looks - looks.mean((-2, -1), keepdim=True)
    size = looks.shape[-1] * looks.shape[-2]
    rows: Tensor = looks / (torch.linalg.vector_norm(looks, dim=(-2, -1), keepdim=True) + LEAST_CONTRAST * size**0.5)
    return rows.flatten(-3) / 2**0.5


_AGREE = 0.95  # least correlation of the channels' common part with their mean to use the mean alone


def grays(image: Tensor) -> Tensor:
    """Return gray versions (G, 1, H, W) of an image: the channels' mean, and first principal component if different."""
    mean = image.mean(1, keepdim=True)
    if image.shape[1] == 1:
        return mean
    pixels = image[0].flatten(1).double()
    pixels = pixels - pixels.mean(1, keepdim=True)
    pixels = pixels / (torch.linalg.vector_norm(pixels, dim=1, keepdim=True) + 1e-6)
    _, directions = torch.linalg.eigh(pixels @ pixels.T)
    common = (directions[:, -1] @ pixels).to(image.dtype)
    plain = (mean.flatten() - mean.mean()).to(image.dtype)
    if functional.cosine_similarity(common, plain, dim=0).abs() >= _AGREE:
        return mean
    return torch.cat([mean, (common * (plain.std() / common.std().clamp_min(1e-12))).view_as(mean)])
