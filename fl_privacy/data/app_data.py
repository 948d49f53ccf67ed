"""Take images from a Flower app's training data: a data set, a loader or a list."""

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fl_privacy.errors import UserError
from fl_privacy.rng import derive_seed
from fl_privacy.types.plan import Normalization

IMAGE_KEYS = ("img", "image", "images", "pixel_values", "inputs", "x")
LABEL_KEYS = ("label", "labels", "fine_label", "target", "character", "y")
"""Keys of images and labels in data sets of the hub, the likeliest first."""

CHANNELS = (1, 2, 3, 4)  # channels of a Pillow or NumPy image: gray, gray and alpha, color, color and alpha
_STEPS = {"uint8": 255, "uint16": 65535, "bool": 1}  # integer type -> its brightest value
LOOKED_AT = 256  # images from which a normalization is estimated
_BLACK_AND_WHITE = 0.02  # tolerance of a channel's darkest and brightest pixel against black and white
Sample = tuple[Tensor, int]  # image (C, H, W) float as the model receives it, and its class


def samples(data: object) -> Iterator[Sample]:
    """Yield the examples of ``data`` in order, each as an image and its class.

    ``data``: a ``Dataset``, ``DataLoader``, data set of the hub, or iterable. Its examples are pairs (image, label) or
    mappings with keys of ``IMAGE_KEYS`` and ``LABEL_KEYS``. From a tuple such as (train, test), the first is taken.
    ``UserError`` if ``data`` or an example is of another kind.
    """
    yield from map(as_sample, _examples(data))


def first_data_set(data: Any) -> Any:
    """Return the data set in ``data``: itself, a loader's, or the first of a tuple or list."""
    if isinstance(data, tuple | list) and data and isinstance(data[0], DataLoader | Dataset):
        data = data[0]
    return data.dataset if isinstance(data, DataLoader) else data


def _examples(data: object) -> Iterator[Any]:
    data = first_data_set(data)
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        if not isinstance(data, Iterable):
            raise UserError(
                "data is expected to be a data set, a DataLoader or an iterable of (image, label), but got"
                f" {type(data).__name__}; give one of these."
            )
        yield from data
        return
    for index in range(len(data)):
        yield data[index]


def as_sample(example: object) -> Sample:
    """Convert an example to (image, class); ``UserError`` if it has no image or no label."""
    if isinstance(example, Mapping):
        return as_image(example), _class(_first(example, LABEL_KEYS))
    return as_image(example), _class(example[1])  # type: ignore[index]


def as_image(example: object) -> Tensor:
    """Return the image (C, H, W) of an example, without looking at its label; ``UserError`` if it has none."""
    if isinstance(example, Mapping):
        return _pixels(_first(example, IMAGE_KEYS))
    if isinstance(example, Sequence) and len(example) >= 2:
        return _pixels(example[0])
    raise UserError(
        f"An example is expected to be (image, label) or a mapping, but is a {type(example).__name__}; convert it."
    )


def _first(example: Mapping[Any, Any], keys: Sequence[str]) -> Any:
    found = next((key for key in keys if key in example), None)
    if found is None:
        raise UserError(
            f"An example is expected to have one of the keys {', '.join(keys)}, but has"
            f" {', '.join(map(str, example)) or 'none'}; rename the column."
        )
    return example[found]


def _class(label: Any) -> int:
    try:
        values = np.asarray(label.detach().cpu() if isinstance(label, Tensor) else label).astype(float).reshape(-1)
    except (TypeError, ValueError) as error:
        raise UserError(f"A label is expected to be a class's number, but got {label!r:.80}; encode it.") from error
    if len(values) == 1 and np.isfinite(values[0]) and values[0] == int(values[0]):
        return int(values[0])
    if len(values) > 1 and values.min() >= 0 and values.sum() == values.max() == 1:
        return int(values.argmax())
    raise UserError(
        f"A label is expected to be the number of one class, but got {np.array2string(values, threshold=10):.80};"
        " of several labels an image, give data whose label is one of them."
    )


def _pixels(image: Any) -> Tensor:
    """Convert an image to (C, H, W) float; integers of 8 or 16 bits are scaled to [0, 1]."""
    if isinstance(image, Tensor):
        pixels, steps = image, _STEPS.get(str(image.dtype).removeprefix("torch."))
    else:
        array = np.array(image)
        deep = getattr(image, "mode", "")[:1] == "I"  # 16-bit gray, which Pillow may hold in 32 bits
        steps = _STEPS["uint16"] if deep else _STEPS.get(array.dtype.name)
        pixels = torch.from_numpy(array.astype(np.float32) if array.dtype.kind in "ub" or deep else array)
    if pixels.dim() == 2:
        pixels = pixels.unsqueeze(0)
    elif pixels.dim() == 3 and not isinstance(image, Tensor) and pixels.shape[-1] in CHANNELS:
        pixels = pixels.permute(2, 0, 1)
    if pixels.dim() != 3:
        raise UserError(f"An image is expected to have the shape (C, H, W), but has {tuple(pixels.shape)}; reshape it.")
    pixels = pixels.detach().cpu().float()
    return pixels if steps is None else pixels / steps


def probe_seed(probe: int, size: int) -> int:
    """Return the seed for global random generators while examples are drawn for a probe, an extra attacked upload.

    ``probe``: number of the probe; ``size``: number of its examples.
    """
    return derive_seed(0, "probe", probe, size)


def declared_normalization(source: object) -> Normalization | None:
    """Return the ``transforms.Normalize`` in the transform ``source``, or in the transform of a data set or loader."""
    seen, waiting = set[int](), [source]
    while waiting and len(seen) < MOST_LOOKED_AT:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        mean, std = getattr(each, "mean", None), getattr(each, "std", None)
        if type(each).__name__ == "Normalize" and mean is not None and std is not None:
            return Normalization(tuple(map(float, mean)), tuple(map(float, std)))
        names = ("transform", "transforms", "dataset")
        within = [part for name in names if (part := getattr(each, name, None)) is not None]
        waiting += [part for one in within for part in (one if isinstance(one, list | tuple) else [one])]
    return None


def find_normalization(data: object) -> Normalization | None:
    """Infer the normalization from the transform or the extreme pixels; ``None`` if pixels lie within [0, 1].

    The extreme pixels are taken for black and white: -mean / std and (1 - mean) / std. ``UserError`` without images.
    """
    loaded = data[0] if isinstance(data, tuple | list) and data and isinstance(data[0], DataLoader | Dataset) else data
    if (stated := declared_normalization(loaded)) is not None:
        return stated
    images = [as_image(example) for example in islice(_examples(data), LOOKED_AT)]
    if not images:
        raise UserError("data is expected to hold images, but is empty; give some.")
    channels = [torch.cat([image[c].flatten() for image in images]) for c in range(len(images[0]))]
    darkest, brightest = (torch.stack([pick(c) for c in channels]) for pick in (torch.min, torch.max))
    if float(darkest.min()) >= -_BLACK_AND_WHITE and float(brightest.max()) <= 1 + _BLACK_AND_WHITE:
        return None
    std = 1 / (brightest - darkest).clamp_min(1e-6)
    mean, std = ((v * 2**16).round() / 2**16 for v in (-darkest * std, std))
    return Normalization(tuple(mean.tolist()), tuple(std.tolist()))


def fingerprint(image: Tensor) -> str:
    """Return a hash of the 8-bit pixels of an image (C, H, W) in [0, 1]."""
    levels = (image.clamp(0, 1) * 255).round().to(torch.uint8).cpu().contiguous()
    return hashlib.sha256(str(tuple(levels.shape)).encode() + levels.numpy().tobytes()).hexdigest()


MOST_LOOKED_AT = 1000  # most objects within a data set that are searched for generators
Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


@contextmanager
def own_streams_put_back(data: object) -> Iterator[None]:
    """Restore the random generators in attributes of ``data`` (not in closures) at the end of the context."""
    restorers = [_putting_back(generator) for generator in _generators(data)]
    try:
        yield
    finally:
        for put_back in restorers:
            put_back()


def _generators(data: object) -> list[Generator]:
    found: list[Generator] = []
    seen, waiting = set[int](), [data]
    while waiting and len(seen) < MOST_LOOKED_AT:
        each = waiting.pop(0)
        if id(each) in seen or isinstance(each, torch.Tensor | np.ndarray | str | bytes | int | float | type):
            continue
        seen.add(id(each))
        if isinstance(each, Generator):
            found.append(each)
        elif isinstance(each, list | tuple):
            waiting += each[:MOST_LOOKED_AT]
        elif isinstance(each, Mapping):
            waiting += list(each.values())[:MOST_LOOKED_AT]
        else:
            waiting += list(getattr(each, "__dict__", {}).values())
    return found


def _putting_back(generator: Generator) -> Callable[[], object]:
    """Return a function that restores the present state of ``generator``."""
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())  # type: ignore[arg-type]
