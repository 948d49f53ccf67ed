"""Images made comparable up to harmless changes: small, without brightness and contrast, in windows, and moved.

What is compared is the normalized correlation of two images of at most 32 pixels a side, as they are and without their
coarse brightness. Its absolute value is the same for negatives and for any change of brightness and contrast. One of
the two images is taken mirrored, shifted by up to a tenth of its width, and on request scaled and rotated.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

SIDE = 32
"""Pixels to which the longer side of an image is averaged down."""

COARSE_SIDE = 16
"""Likewise where images are scaled and rotated."""

BLURS = (0.0, 1.0, 2.0)
"""Standard deviations in pixels by which the image that stands still is blurred."""

MOSAIC = len(BLURS)
"""Index of the image of half the resolution, beside those that are blurred."""

PAIRS = ((0, 0), (0, 1), (0, 2), (0, MOSAIC), (1, 1))
"""Which blur of the moved image is compared with which blur of the other: reconstructions are blurred, or noisy."""

SCALES = (0.8, 0.9, 1.0, 1.12, 1.25)
ANGLES = (-15.0, -10.0, -5.0, 0.0, 5.0, 10.0, 15.0)
"""Of the moved image, where only the stored image is known; degrees."""

_DETAIL = 1.5
"""Standard deviation in pixels of the coarse brightness."""

_LEAST_CONTRAST = 0.1 / 255
"""Standard deviation of pixels below which there is nothing to see."""

_GAP = 2
"""Pixels that a half of an image is short of its middle, so that the other half shows in none of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Looks:
    """Images as rows of unit length, by blur and window: the product of two rows is a correlation.

    Attributes:
        rows: (blur, window) -> (N, V, D): N images, each in V places.
        coarse: likewise of the smaller images that are scaled and rotated; empty without.
    """

    rows: dict[tuple[int, int], Tensor]
    coarse: dict[int, Tensor]


def small(images: Tensor, side: int = SIDE) -> Tensor:
    """Images (N, C, H, W) averaged down to at most ``side`` pixels a side."""
    height, width = images.shape[-2:]
    factor = min(1.0, side / max(height, width))
    size = max(1, round(height * factor)), max(1, round(width * factor))
    return images if size == (height, width) else functional.adaptive_avg_pool2d(images, size)


def shift_reach(width: int) -> int:
    """Pixels by which an image of ``width`` pixels may be shifted, and that its window is short of its edge."""
    return max(1, round(width / 10)) if width > 2 else 0


def standing(images: Tensor, *, coarse: bool = False) -> Looks:
    """Originals or candidates (N, C, H, W) in [0, 1], in one place each."""
    gray = small(images.float()).mean(1, keepdim=True)
    edge_y, edge_x = shift_reach(gray.shape[-2]), shift_reach(gray.shape[-1])
    rows = {}
    for blur, unsharp in enumerate([*(blurred(gray, sigma) for sigma in BLURS), _mosaic(gray)]):
        inner = _inner(_with_detail(unsharp), edge_y, edge_x)
        for window, cut in enumerate(_windows(*inner.shape[-2:])):
            rows[blur, window] = _unit(inner[..., cut[0], cut[1]])[:, None]
    return Looks(rows=rows, coarse=_standing_coarse(images) if coarse else {})


def moved(image: Tensor, *, coarse: bool = False) -> Looks:
    """A guess (1, C, H, W) in [0, 1] in all places; where its channels disagree, also as what they have in common."""
    shown = small(image.float())
    grays = _grays(shown)
    rows = {}
    between = torch.cat([grays, *_between(image)])
    for blur in sorted({of for of, _ in PAIRS}):
        places = _shifted(_with_detail(blurred(between, BLURS[blur])))
        for window, cut in enumerate(_windows(*places.shape[-2:])):
            used = places if window == 0 else places[: len(grays)]
            rows[blur, window] = _unit(used[..., cut[0], cut[1]]).flatten(0, 1)[None]
    return Looks(rows=rows, coarse=_moved_coarse(grays) if coarse else {})


def correlations(guess: Looks, others: Looks) -> Iterator[Tensor]:
    """For each way to compare, (N,) largest absolute correlation of one guess with N images over all its places."""
    for of, to in PAIRS:
        for window in range(len(_windows(8, 8))):
            yield _largest(guess.rows[of, window], others.rows[to, window])
    for blur, places in guess.coarse.items():
        yield _largest(places, others.coarse[blur])


def _largest(places: Tensor, rows: Tensor) -> Tensor:
    best: Tensor = (places[0] @ rows[:, 0].T).abs_().amax(0)
    return best


def blurred(images: Tensor, sigma: float) -> Tensor:
    """Images (N, C, H, W) under a Gaussian of ``sigma`` pixels, edges repeated; the same for 0."""
    if not sigma:
        return images
    reach = int(3 * sigma + 0.5)
    offset = torch.arange(-reach, reach + 1, dtype=images.dtype, device=images.device)
    weights = torch.softmax(-(offset**2) / (2 * sigma**2), dim=0)
    flat = images.reshape(-1, 1, *images.shape[-2:])
    rows = functional.conv2d(functional.pad(flat, (0, 0, reach, reach), "replicate"), weights.view(1, 1, -1, 1))
    found = functional.conv2d(functional.pad(rows, (reach, reach, 0, 0), "replicate"), weights.view(1, 1, 1, -1))
    return found.reshape(images.shape)


def _mosaic(gray: Tensor) -> Tensor:
    """(N, 1, H, W) as squares of 2 x 2 pixels."""
    height, width = gray.shape[-2:]
    halved = functional.avg_pool2d(gray, 2, ceil_mode=True, count_include_pad=False)
    return functional.interpolate(halved, scale_factor=2)[..., :height, :width]


def _between(image: Tensor) -> Iterator[Tensor]:
    """An image (1, C, H, W) that is averaged down, shifted by half a pixel of what that makes; else nothing."""
    height, width = image.shape[-2:]
    half = round(max(height, width) / SIDE / 2)
    if not half:
        return
    padded = functional.pad(image.float().mean(1, keepdim=True), (half, 0, half, 0), "replicate")
    for top, left in ((0, 0), (0, half), (half, 0)):
        yield small(padded[..., top : top + height, left : left + width])


def _with_detail(gray: Tensor) -> Tensor:
    """(N, 1, H, W) -> (N, 2, H, W): as it is, and without its coarse brightness."""
    return torch.cat([gray, gray - blurred(gray, _DETAIL)], dim=1)


def _inner(images: Tensor, edge_y: int, edge_x: int) -> Tensor:
    height, width = images.shape[-2:]
    return images[..., edge_y : height - edge_y, edge_x : width - edge_x]


@lru_cache(maxsize=64)
def _windows(height: int, width: int) -> tuple[tuple[slice, slice], ...]:
    """The whole and its four halves."""
    rows, columns = max(1, height // 2 - _GAP), max(1, width // 2 - _GAP)
    every = slice(None)
    return (
        (every, every),
        (every, slice(0, columns)),
        (every, slice(width - columns, width)),
        (slice(0, rows), every),
        (slice(height - rows, height), every),
    )


def _shifted(images: Tensor) -> Tensor:
    """(N, 2, H, W) -> (N, V, 2, H', W'): mirrored or not, the inner window at each shift."""
    height, width = images.shape[-2:]
    size = height - 2 * shift_reach(height), width - 2 * shift_reach(width)
    both = torch.stack([images, images.flip(-1)], dim=1)
    places = both.unfold(-2, size[0], 1).unfold(-2, size[1], 1)
    return places.permute(0, 1, 3, 4, 2, 5, 6).flatten(1, 3)


def _unit(looks: Tensor) -> Tensor:
    """(..., 2, H, W) -> (..., D) of unit length, half of it for each look; zeros where there is nothing to see."""
    looks = looks - looks.mean((-2, -1), keepdim=True)
    size = looks.shape[-1] * looks.shape[-2]
    length = torch.linalg.vector_norm(looks, dim=(-2, -1), keepdim=True)
    rows: Tensor = looks / (length + _LEAST_CONTRAST * size**0.5)
    return rows.flatten(-3) / 2**0.5


_AGREE = 0.95
"""Correlation from which on what the channels have in common is their mean."""


def _grays(image: Tensor) -> Tensor:
    """(1, C, H, W) -> (G, 1, H, W): the mean of the channels, and their first principal component where it differs.

    The latter is the same if channels are negative or of other contrast, and leaves out a channel that is noise.
    """
    mean = image.mean(1, keepdim=True)
    if image.shape[1] == 1:
        return mean
    pixels = image[0].flatten(1).double()
    pixels = pixels - pixels.mean(1, keepdim=True)
    pixels = pixels / (torch.linalg.vector_norm(pixels, dim=1, keepdim=True) + 1e-6)
    _, directions = torch.linalg.eigh(pixels @ pixels.T)
    common = (directions[:, -1] @ pixels).to(image.dtype)
    plain = (mean.flatten() - mean.mean()).to(image.dtype)
    agreement = functional.cosine_similarity(common, plain, dim=0).abs()
    if agreement >= _AGREE:
        return mean
    spread = plain.std() / common.std().clamp_min(1e-12)
    return torch.cat([mean, (common * spread).view_as(mean)])


def _standing_coarse(images: Tensor) -> dict[int, Tensor]:
    gray = small(images.float(), COARSE_SIDE).mean(1, keepdim=True)
    edges = shift_reach(gray.shape[-2]), shift_reach(gray.shape[-1])
    return {blur: _unit(_inner(_with_detail(blurred(gray, BLURS[blur])), *edges))[:, None] for blur in (0, 1)}


def _moved_coarse(grays: Tensor) -> dict[int, Tensor]:
    """(G, 1, H, W) in every scale, rotation, shift and mirrored; compared as it is with two blurs of the other."""
    turned = small(_turned(grays), COARSE_SIDE)
    places = _unit(_shifted(_with_detail(turned))).flatten(0, 1)[None]
    return dict.fromkeys((0, 1), places)


def _turned(grays: Tensor) -> Tensor:
    angles = torch.tensor(ANGLES).deg2rad().repeat(len(SCALES))
    sizes = torch.tensor(SCALES).repeat_interleave(len(ANGLES))
    height, width = grays.shape[-2:]
    cosine, sine, zero = angles.cos() / sizes, angles.sin() / sizes, torch.zeros_like(angles)
    maps = torch.stack(
        [torch.stack([cosine, -sine * height / width, zero], 1), torch.stack([sine * width / height, cosine, zero], 1)],
        dim=1,
    )
    every = grays.repeat_interleave(len(maps), dim=0)
    grid = functional.affine_grid(maps.repeat(len(grays), 1, 1), list(every.shape), align_corners=False)
    return functional.grid_sample(every, grid, padding_mode="border", align_corners=False)
