"""Guesses turned, cut or in pieces, and empty ones that look like the data, for ``verdict_pairs.py``.

Not a command of its own. What a generator makes needs its weights in the folder ``weights`` of ``FL_PRIVACY_DATA``.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from verdict_kinds import Make, Subjects, as_jpeg, at_random, blurred, mapped, of_class, others, resized


def quarter(images: Tensor, times: int = 1) -> Tensor:
    """Turn images by quarters counterclockwise; those that are not square are brought to their size again."""
    return resized(torch.rot90(images, times, (-2, -1)), (images.shape[-2], images.shape[-1]))


def cut(s: Subjects, share: float) -> Tensor:
    """Cut a part of height and width at a random place, and enlarge it to the image's size."""
    height, width = s.images.shape[-2:]
    rows, columns = round(share * height), round(share * width)
    made = []
    for image in s.images:
        top, left = (
            int(torch.randint(total - part + 1, (), generator=s.rng))
            for total, part in ((height, rows), (width, columns))
        )
        made.append(resized(image[None, :, top : top + rows, left : left + columns], (height, width)))
    return torch.cat(made)


def rotated(s: Subjects, degrees: float) -> Tensor:
    """Rotate every other image to the other side."""
    both = mapped(s.images, degrees), mapped(s.images, -degrees)
    left = torch.arange(len(s.images))[:, None, None, None] % 2 == 0
    return torch.where(left, *both)


def mosaic(images: Tensor, side: int) -> Tensor:
    """Average squares of ``side`` pixels."""
    height, width = images.shape[-2:]
    small = functional.avg_pool2d(images, side, ceil_mode=True, count_include_pad=False)
    return functional.interpolate(small, scale_factor=side)[..., :height, :width]


def exchanged(s: Subjects, number: int) -> Tensor:
    """Put tiles of ``number`` x ``number`` in another order, none in its own place; what is left over stays."""
    height, width = (side // number for side in s.images.shape[-2:])
    found = s.images.clone()
    for image, made in zip(s.images, found, strict=True):
        order = torch.randperm(number**2, generator=s.rng)
        for to, of in zip(order, order.roll(1), strict=True):
            (down, right), (top, left) = divmod(int(to), number), divmod(int(of), number)
            made[:, down * height : (down + 1) * height, right * width : (right + 1) * width] = image[
                :, top * height : (top + 1) * height, left * width : (left + 1) * width
            ]
    return found


def noisy(s: Subjects, images: Tensor, sigma: float = 0.1) -> Tensor:
    return (images + sigma * s.noise).clamp(0, 1)


TURNED_READ: Mapping[str, Make] = {
    "upside down": lambda s: s.images.flip(-2),
    "turned by 90": lambda s: quarter(s.images),
    "turned by 180": lambda s: quarter(s.images, 2),
    "turned by 270, mirrored": lambda s: quarter(s.images, 3).flip(-1),
    "turned by 90, negative": lambda s: 1 - quarter(s.images),
    "turned by 90, noise .1": lambda s: noisy(s, quarter(s.images)),
    "turned by 90, channels swapped": lambda s: quarter(s.images).flip(1),
    "upside down, noise .2": lambda s: noisy(s, s.images.flip(-2), 0.2),
    "upside down, blur 1": lambda s: blurred(s.images.flip(-2), 1.0),
    "upside down, JPEG 10": lambda s: as_jpeg(s.images.flip(-2), 10),
    "rotated by 5 either way": lambda s: rotated(s, 5),
    "rotated by 10 either way": lambda s: rotated(s, 10),
    "rotated by 15 either way": lambda s: rotated(s, 15),
    "rotated by 8, mirrored": lambda s: rotated(s, 8).flip(-1),
    "rotated by 8, noise .1": lambda s: noisy(s, rotated(s, 8)),
    "cut to 90 %": lambda s: cut(s, 0.9),
    "cut to 80 %": lambda s: cut(s, 0.8),
    "cut to 70 %": lambda s: cut(s, 0.7),
    "cut to 85 %, mirrored": lambda s: cut(s, 0.85).flip(-1),
    "mosaic of 2 pixels": lambda s: mosaic(s.images, 2),
    "mosaic of 3 pixels": lambda s: mosaic(s.images, 3),
    "mosaic of 4 pixels": lambda s: mosaic(s.images, 4),
    "mosaic of 3 pixels, mirrored": lambda s: mosaic(s.images.flip(-1), 3),
    "tiles exchanged, 2 x 2": lambda s: exchanged(s, 2),
    "tiles exchanged, 3 x 3": lambda s: exchanged(s, 3),
    "tiles exchanged, 4 x 4": lambda s: exchanged(s, 4),
    "tiles exchanged, 2 x 2, noise .1": lambda s: noisy(s, exchanged(s, 2)),
}
"""A reader sees the original, turned, cut, coarse or in pieces."""


def icons(s: Subjects) -> Tensor:
    """Draw a disk, ring, square, cross, triangle or arrow of random size and place, in one of two plain colors."""
    height, width = s.images.shape[-2:]
    down, right = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    made = []
    for _ in s.images:
        size, y, x = (torch.rand(3, generator=s.rng) * torch.tensor([0.5, 0.6, 0.6])).tolist()
        size, v, u = size + 0.3, down - y + 0.3, right - x + 0.3
        shapes = (
            u**2 + v**2 < size**2,
            (u**2 + v**2 - size**2).abs() < 0.25 * size,
            torch.maximum(u.abs(), v.abs()) < size,
            (torch.minimum(u.abs(), v.abs()) < 0.2 * size) & (torch.maximum(u.abs(), v.abs()) < size),
            (v.abs() < size) & (u.abs() < 0.5 * (v + size)),
            ((v.abs() < 0.15 * size) & (u.abs() < size)) | ((u > 0) & (u < size) & (v.abs() < size - u)),
        )
        shape = shapes[int(torch.randint(len(shapes), (), generator=s.rng))].float()
        one, other = torch.rand(2, s.images.shape[1], 1, 1, generator=s.rng)
        made.append(one + (other - one) * shape)
    return torch.stack(made)


def generated(s: Subjects) -> Tensor:
    """Sample a trained generator of digits, or for larger images of faces."""
    return _digits(s) if s.images.shape[-1] < 32 else _faces(s)


def _weights(name: str) -> Mapping[str, Tensor]:
    path = Path(os.environ["FL_PRIVACY_DATA"]) / "weights" / f"{name}.safetensors"
    return {key: tensor.float() for key, tensor in load_file(path).items()}


def _digits(s: Subjects) -> Tensor:
    """Half of a variational autoencoder, half of a GAN."""
    vae, gan = _weights("mnist_vae"), _weights("mnist_gan_mlp_generator")
    names = sorted({key.rsplit(".", 1)[0] for key in gan}, key=lambda name: int(name.rsplit(".", 1)[-1]))
    z = torch.randn(len(s.images), 20, generator=s.rng)
    hidden = functional.linear(z, vae["fc3.weight"], vae["fc3.bias"]).relu()
    ones = functional.linear(hidden, vae["fc4.weight"], vae["fc4.bias"]).sigmoid()
    rest = torch.randn(len(s.images), 64, generator=s.rng)
    for place, name in enumerate(names):
        rest = functional.linear(rest, gan[f"{name}.weight"], gan[f"{name}.bias"])
        rest = rest.relu() if place + 1 < len(names) else (rest.tanh() + 1) / 2
    made = torch.where(torch.arange(len(z))[:, None] % 2 == 0, ones, rest).view(-1, 1, 28, 28)
    return made.expand(-1, s.images.shape[1], -1, -1).contiguous()


def _faces(s: Subjects) -> Tensor:
    weights = _weights("face_dcgan_generator")
    made = torch.randn(len(s.images), 100, 1, 1, generator=s.rng)
    for layer in (0, 3, 6, 9, 12):
        stride, padding = (1, 0) if layer == 0 else (2, 1)
        made = functional.conv_transpose2d(made, weights[f"main.{layer}.weight"], stride=stride, padding=padding)
        if (norm := f"main.{layer + 1}") + ".weight" in weights:
            named = [weights[f"{norm}.{each}"] for each in ("running_mean", "running_var", "weight", "bias")]
            made = functional.batch_norm(made, *named).relu()
    made = (made.tanh() + 1) / 2
    made = made.mean(1, keepdim=True) if s.images.shape[1] == 1 else made
    return resized(made, (s.images.shape[-2], s.images.shape[-1]))


def nearest_of_class(s: Subjects) -> Tensor:
    """Take the spare image of the original's class, or of all where it has none, that is nearest to it."""
    made = []
    for image, label in zip(s.images, s.labels, strict=True):
        own = s.spare[s.spare_labels == label]
        own = own if len(own) else s.spare
        made.append(own[int((own - image).flatten(1).norm(dim=1).argmin())])
    return torch.stack(made)


def smooth(s: Subjects, sigma: float) -> Tensor:
    made = blurred(s.noise, sigma)
    return (0.5 + 0.2 * made / made.std()).clamp(0, 1)


def few_of_class(s: Subjects) -> Callable[[Tensor], Tensor]:
    return lambda images: images[torch.randperm(len(images), generator=s.rng)[:3]].mean(0)


ALIKE_EMPTY: Mapping[str, Make] = {
    "of its class": lambda s: of_class(s, at_random(s)),
    "of its class, mirrored": lambda s: of_class(s, at_random(s)).flip(-1),
    "of its class, upside down": lambda s: of_class(s, at_random(s)).flip(-2),
    "of its class, noise .2": lambda s: noisy(s, of_class(s, at_random(s)), 0.2),
    "nearest of its class": nearest_of_class,
    "mean of its class": lambda s: of_class(s, lambda images: images.mean(0)),
    "mean of 3 of its class": lambda s: of_class(s, few_of_class(s)),
    "another's tiles exchanged": lambda s: exchanged(Subjects(**{**vars(s), "images": others(s)}), 2),
    "mosaic of another, 4 pixels": lambda s: mosaic(others(s), 4),
    "cut of another, 70 %": lambda s: cut(Subjects(**{**vars(s), "images": others(s)}), 0.7),
    "generated": generated,
    "icons": icons,
    "smooth noise, 1 pixel": lambda s: smooth(s, 1.0),
    "smooth noise, 4 pixels": lambda s: smooth(s, 4.0),
    "noise .1 on gray": lambda s: (0.5 + 0.1 * s.noise).clamp(0, 1),
}
"""There is nothing of the original, but what is true of many, in guesses that look like the data or like nothing."""
