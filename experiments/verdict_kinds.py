"""Guesses of which it is known by construction whether a reader sees the original in them, for ``verdict_pairs.py``.

Not a command of its own.
"""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from fl_privacy.data import Examples
from fl_privacy.measure.descriptors import blurred

Make = Callable[["Subjects"], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Subjects:
    """What guesses are made of.

    Attributes:
        images: (N, C, H, W) in [0, 1], the originals.
        labels: (N,) their classes.
        spare: images that are neither originals nor candidates.
        spare_labels: their classes.
        rng: of what is random.
    """

    images: Tensor
    labels: Tensor
    spare: Tensor
    spare_labels: Tensor
    rng: torch.Generator

    @property
    def noise(self) -> Tensor:
        return torch.randn(self.images.shape, generator=self.rng)

    def since(self, first: int) -> "Subjects":
        """Drop the originals before ``first``."""
        return replace(self, images=self.images[first:], labels=self.labels[first:])

    @classmethod
    def of(cls, originals: Examples, spare: Examples, seed: int = 0) -> "Subjects":
        """Create the subjects from bytes."""
        every = torch.arange(len(originals)), torch.arange(len(spare))
        own, other = originals.batch(every[0]), spare.batch(every[1])
        return cls(
            images=own.inputs,
            labels=own.labels,
            spare=other.inputs,
            spare_labels=other.labels,
            rng=torch.Generator().manual_seed(seed),
        )


def shifted(images: Tensor, down: int, right: int) -> Tensor:
    """Shift images by ``down`` and ``right`` pixels, edges repeated."""
    height, width = images.shape[-2:]
    padded = functional.pad(images, (4, 4, 4, 4), "replicate")
    return padded[..., 4 - down : 4 - down + height, 4 - right : 4 - right + width]


def as_jpeg(images: Tensor, quality: int) -> Tensor:
    made = []
    for image in images:
        written, pixels = io.BytesIO(), (255 * image).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(written, "JPEG", quality=quality)
        back = torch.from_numpy(np.array(Image.open(written))).float() / 255
        made.append(back[None] if back.dim() == 2 else back.permute(2, 0, 1))
    return torch.stack(made)


def half_black(images: Tensor) -> Tensor:
    found = images.clone()
    found[..., images.shape[-1] // 2 :] = 0
    return found


def own_color(s: Subjects) -> Tensor:
    return s.images.mean((2, 3), keepdim=True).expand_as(s.images)


def of_class(s: Subjects, pick: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``pick`` to the spare images of each original's class, or to all where it has none."""
    made = []
    for label in s.labels:
        own = s.spare[s.spare_labels == label]
        made.append(pick(own if len(own) else s.spare))
    return torch.stack(made)


def at_random(s: Subjects) -> Callable[[Tensor], Tensor]:
    return lambda images: images[int(torch.randint(len(images), (), generator=s.rng))]


def from_prior(s: Subjects) -> Tensor:
    """Sample a Gaussian with the spare images' first principal components."""
    flat = s.spare.flatten(1)
    mean = flat.mean(0)
    _, scales, directions = torch.linalg.svd(flat - mean, full_matrices=False)
    number = min(60, len(scales) - 1)
    weights = torch.randn(len(s.images), number, generator=s.rng) * scales[:number] / len(flat) ** 0.5
    return (mean + weights @ directions[:number]).view_as(s.images).clamp(0, 1)


def resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    return functional.interpolate(images, size=size, mode="bilinear", antialias=True, align_corners=False)


def mapped(images: Tensor, degrees: float) -> Tensor:
    angle = torch.tensor(degrees).deg2rad()
    matrix = torch.stack(
        [torch.stack([angle.cos(), -angle.sin(), angle * 0]), torch.stack([angle.sin(), angle.cos(), angle * 0])]
    )
    grid = functional.affine_grid(matrix.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


def elastic(s: Subjects) -> Tensor:
    """Move every pixel by about a pixel in 32, in a smooth field."""
    height, width = s.images.shape[-2:]
    coarse = torch.randn(len(s.images), 2, 5, 5, generator=s.rng) * 2 / 32
    field = functional.interpolate(coarse, size=(height, width), mode="bicubic", align_corners=False).permute(
        0, 2, 3, 1
    )
    still = functional.affine_grid(
        torch.eye(2, 3).expand(len(s.images), 2, 3), list(s.images.shape), align_corners=False
    )
    return functional.grid_sample(s.images, still + field, padding_mode="border", align_corners=False)


def erased(s: Subjects) -> Tensor:
    """Replace a rectangle of 40 % of height and width by noise."""
    found, (height, width) = s.images.clone(), s.images.shape[-2:]
    rows, columns = int(0.4 * height), int(0.4 * width)
    for image in found:
        top, left = (
            int(torch.randint(total - part, (), generator=s.rng)) for total, part in ((height, rows), (width, columns))
        )
        image[:, top : top + rows, left : left + columns] = torch.rand(len(image), rows, columns, generator=s.rng)
    return found


def peppered(s: Subjects) -> Tensor:
    """Make a tenth of the pixels black or white."""
    where = torch.rand(s.images[:, :1].shape, generator=s.rng)
    return s.images.masked_fill(where < 0.05, 0.0).masked_fill(where > 0.95, 1.0)


def median(images: Tensor) -> Tensor:
    """Take the median of 3 x 3 pixels."""
    padded = functional.pad(images, (1, 1, 1, 1), "replicate")
    return padded.unfold(-2, 3, 1).unfold(-2, 3, 1).flatten(-2).median(-1).values


def cropped(images: Tensor) -> Tensor:
    """Crop to the upper left 80 % and resize to the original's size."""
    height, width = (int(0.8 * side) for side in images.shape[-2:])
    return resized(images[..., :height, :width], (images.shape[-2], images.shape[-1]))


def only_edges(images: Tensor) -> Tensor:
    """Compute each pixel's largest change to a neighbor."""
    down = functional.pad((images[..., 1:, :] - images[..., :-1, :]).abs(), (0, 0, 0, 1))
    right = functional.pad((images[..., 1:] - images[..., :-1]).abs(), (0, 1))
    return torch.maximum(down, right)


def stripes(s: Subjects) -> Tensor:
    return ((torch.arange(s.images.shape[-1]) // 4) % 2).float().expand_as(s.images).contiguous()


def checkerboard(s: Subjects) -> Tensor:
    rows, columns = (torch.arange(side) // 4 for side in s.images.shape[-2:])
    return ((rows[:, None] + columns) % 2).float().expand_as(s.images).contiguous()


def shuffled(s: Subjects) -> Tensor:
    """Shuffle the original's own pixels."""
    flat = s.images.flatten(2)
    return torch.stack([i[:, torch.randperm(i.shape[1], generator=s.rng)] for i in flat]).view_as(s.images)


def blob(s: Subjects) -> Tensor:
    """Reduce the original to its brightness at 4 x 4, resized to its own size."""
    size = (s.images.shape[-2], s.images.shape[-1])
    return functional.interpolate(
        functional.adaptive_avg_pool2d(s.images, 4), size=size, mode="bilinear", align_corners=False
    )


def dotted(s: Subjects) -> Tensor:
    """Draw independent random pixels."""
    return torch.rand(s.images.shape, generator=s.rng)


def sharpened(images: Tensor) -> Tensor:
    return (images + 1.5 * (images - blurred(images, 1.0))).clamp(0, 1)


def solarized(images: Tensor) -> Tensor:
    """Invert bright pixels."""
    return torch.where(images > 0.5, 1 - images, images)


def framed(images: Tensor) -> Tensor:
    """Make an eighth on every side black."""
    found, edge = torch.zeros_like(images), images.shape[-1] // 8
    found[..., edge:-edge, edge:-edge] = images[..., edge:-edge, edge:-edge]
    return found


def shrunk(images: Tensor) -> Tensor:
    """Shrink the image to 80 % and center it on black."""
    height, width = (int(0.8 * side) for side in images.shape[-2:])
    top, left = (images.shape[-2] - height) // 2, (images.shape[-1] - width) // 2
    found = torch.zeros_like(images)
    found[..., top : top + height, left : left + width] = resized(images, (height, width))
    return found


def tiled(images: Tensor) -> Tensor:
    """Repeat the image four times at half the size."""
    height, width = images.shape[-2:]
    return resized(images, (height // 2, width // 2)).repeat(1, 1, 2, 2)


def occluded(images: Tensor) -> Tensor:
    """Gray out the middle, a quarter of the area."""
    found, (height, width) = images.clone(), images.shape[-2:]
    found[..., height // 4 : height - height // 4, width // 4 : width - width // 4] = 0.5
    return found


def lettered(images: Tensor) -> Tensor:
    """Draw bars and strokes of letters across the image, white with a black edge."""
    height, width = images.shape[-2:]
    found, unit = images.clone(), max(1, width // 16)
    for left in range(unit, width - 3 * unit, 4 * unit):
        found[..., height // 2 - 3 * unit : height // 2 + 3 * unit, left : left + 3 * unit] = 0.0
        found[..., height // 2 - 2 * unit : height // 2 + 2 * unit, left + unit : left + 2 * unit] = 1.0
        found[..., height // 2 : height // 2 + unit, left : left + 3 * unit] = 1.0
    return found


def one_channel(images: Tensor) -> Tensor:
    """Keep the first channel alone; gray images stay as they are."""
    found = torch.zeros_like(images)
    found[:, :1] = images[:, :1]
    return found


def speckled(s: Subjects) -> Tensor:
    return (s.images * (1 + 0.3 * s.noise)).clamp(0, 1)


def quartered(images: Tensor) -> Tensor:
    """Black out all but the upper left quarter."""
    return half_black(half_black(images).mT).mT


def ramp(s: Subjects) -> Tensor:
    """Draw a ramp from black to white in a random direction."""
    angle = 2 * torch.pi * torch.rand(len(s.images), 1, 1, 1, generator=s.rng)
    down, right = (torch.linspace(-1, 1, side) for side in s.images.shape[-2:])
    slope = angle.cos() * down[:, None] + angle.sin() * right
    return (0.5 + 0.5 * slope).clamp(0, 1).expand_as(s.images).contiguous()


def waves(s: Subjects) -> Tensor:
    """Draw a sine of three to six periods in a random direction."""
    angle, periods = (torch.rand(len(s.images), 1, 1, 1, generator=s.rng) for _ in range(2))
    down, right = (torch.linspace(-1, 1, side) for side in s.images.shape[-2:])
    along = (2 * torch.pi * angle).cos() * down[:, None] + (2 * torch.pi * angle).sin() * right
    return (0.5 + 0.5 * (torch.pi * (3 + 3 * periods) * along).sin()).expand_as(s.images).contiguous()


def others(s: Subjects) -> Tensor:
    return torch.stack([at_random(s)(s.spare) for _ in s.images])


def batch_mean(s: Subjects) -> Tensor:
    """Average the original with seven others, as the mean of a batch shows them."""
    seven = torch.stack([s.spare[torch.randperm(len(s.spare), generator=s.rng)[:7]].sum(0) for _ in s.images])
    return (s.images + seven) / 8


READ: Mapping[str, Make] = {
    "itself": lambda s: s.images,
    "mirror": lambda s: s.images.flip(-1),
    "negative": lambda s: 1 - s.images,
    "shift by 1": lambda s: shifted(s.images, 1, -1),
    "shift by 2": lambda s: shifted(s.images, 2, -2),
    "shift by 3": lambda s: shifted(s.images, -3, 3),
    "brightness +.2": lambda s: (s.images + 0.2).clamp(0, 1),
    "brightness -.2": lambda s: (s.images - 0.2).clamp(0, 1),
    "contrast x .5": lambda s: 0.5 + (s.images - 0.5) * 0.5,
    "contrast x 2": lambda s: (0.5 + (s.images - 0.5) * 2).clamp(0, 1),
    "noise .05": lambda s: (s.images + 0.05 * s.noise).clamp(0, 1),
    "noise .1": lambda s: (s.images + 0.1 * s.noise).clamp(0, 1),
    "noise .2": lambda s: (s.images + 0.2 * s.noise).clamp(0, 1),
    "blur 1": lambda s: blurred(s.images, 1.0),
    "blur 2": lambda s: blurred(s.images, 2.0),
    "JPEG 10": lambda s: as_jpeg(s.images, 10),
    "half resolution": lambda s: functional.interpolate(functional.avg_pool2d(s.images, 2), size=s.images.shape[-2:]),
    "2 bits": lambda s: (3 * s.images).round() / 3,
    "gray of color": lambda s: s.images.mean(1, keepdim=True).expand_as(s.images),
    "half black": lambda s: half_black(s.images),
    "channels swapped": lambda s: s.images.flip(1),
    "mirrored negative, shifted": lambda s: shifted(1 - s.images.flip(-1), 0, 1),
}
"""Of the specification: a reader sees the original."""

EMPTY: Mapping[str, Make] = {
    "flat gray": lambda s: torch.full_like(s.images, 0.5),
    "own mean color": own_color,
    "own mean color, noise .02": lambda s: (own_color(s) + 0.02 * s.noise).clamp(0, 1),
    "own mean color, noise .1": lambda s: (own_color(s) + 0.1 * s.noise).clamp(0, 1),
    "class mean": lambda s: of_class(s, lambda images: images.mean(0)),
    "another of its class": lambda s: of_class(s, at_random(s)),
    "another": lambda s: torch.stack([at_random(s)(s.spare) for _ in s.images]),
    "smooth noise": lambda s: (blurred(s.noise, 2.0) + 0.5).clamp(0, 1),
    "prior's sample": from_prior,
}
"""Of the specification: there is nothing of the original but what is true of many."""

MORE_READ: Mapping[str, Make] = {
    "3 gray levels": lambda s: (2 * s.images).round() / 2,
    "gamma .5": lambda s: s.images.clamp_min(1e-6) ** 0.5,
    "gamma 2": lambda s: s.images**2,
    "upper half black": lambda s: half_black(s.images.mT).mT,
    "erased by 16 %": erased,
    "salt and pepper 10 %": peppered,
    "median of 3 x 3": lambda s: median(s.images),
    "red negative": lambda s: torch.cat([1 - s.images[:, :1], s.images[:, 1:]], dim=1),
    "vignette": lambda s: s.images * torch.linspace(0.3, 1, s.images.shape[-1]),
    "rotated by 10": lambda s: mapped(s.images, 10.0),
    "crop of 80 %": lambda s: cropped(s.images),
    "elastic": elastic,
    "edges of its own": lambda s: only_edges(s.images),
}
"""Beyond the specification, seen while thresholds were fixed: a reader sees the original."""

MORE_EMPTY: Mapping[str, Make] = {
    "stripes": stripes,
    "checkerboard": checkerboard,
    "static": dotted,
    "own pixels shuffled": shuffled,
    "own brightness at 4 x 4": blob,
    "mean of 10 others": lambda s: torch.stack(
        [s.spare[torch.randperm(len(s.spare), generator=s.rng)[:10]].mean(0) for _ in s.images]
    ),
    "edges of another": lambda s: only_edges(torch.stack([at_random(s)(s.spare) for _ in s.images])),
    "another of its class, blurred": lambda s: blurred(of_class(s, at_random(s)), 2.0),
}
"""Beyond the specification, seen likewise: there is nothing of the original but what is true of many."""

HELD_READ: Mapping[str, Make] = {
    "sharpened": lambda s: sharpened(s.images),
    "solarized": lambda s: solarized(s.images),
    "framed by an eighth": lambda s: framed(s.images),
    "at 80 % within a frame": lambda s: shrunk(s.images),
    "tiled, 2 x 2": lambda s: tiled(s.images),
    "middle quarter gray": lambda s: occluded(s.images),
    "letters across": lambda s: lettered(s.images),
    "first channel": lambda s: one_channel(s.images),
    "speckle .3": speckled,
    "upper left quarter": lambda s: quartered(s.images),
    "JPEG 5": lambda s: as_jpeg(s.images, 5),
    "blur 1, noise .1": lambda s: (blurred(s.images, 1.0) + 0.1 * s.noise).clamp(0, 1),
    "noise .3": lambda s: (s.images + 0.3 * s.noise).clamp(0, 1),
    "crop of 90 %": lambda s: resized(
        s.images[..., : int(0.9 * s.images.shape[-2]), : int(0.9 * s.images.shape[-1])],
        (s.images.shape[-2], s.images.shape[-1]),
    ),
    "rotated by 5": lambda s: mapped(s.images, 5.0),
}
"""Held back until thresholds were fixed: a reader sees the original, or a part of it."""

HELD_EMPTY: Mapping[str, Make] = {
    "black": lambda s: torch.zeros_like(s.images),
    "ramp": ramp,
    "waves": waves,
    "letters on gray": lambda s: lettered(torch.full_like(s.images, 0.5)),
    "saturated noise": lambda s: (0.5 + 5 * s.noise).clamp(0, 1),
    "another, noise .1": lambda s: (others(s) + 0.1 * s.noise).clamp(0, 1),
    "another, negative and mirrored": lambda s: 1 - others(s).flip(-1),
    "class mean, noise .1": lambda s: (of_class(s, lambda images: images.mean(0)) + 0.1 * s.noise).clamp(0, 1),
    "mean of all": lambda s: s.spare.mean(0).expand_as(s.images).contiguous(),
    "half another, half black": lambda s: half_black(others(s)),
    "mean with 7 others": batch_mean,
}
"""Held back likewise: there is nothing of the original but what is true of many, or an eighth of it."""
