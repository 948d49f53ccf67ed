"""Every operation against the Python Imaging Library, both signs."""

import itertools
import re

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torchvision.transforms import AutoAugment, AutoAugmentPolicy

from fl_privacy.data.transformations import OPERATIONS, TABLES, Operation
from fl_privacy.rng import derive_generator


def enhanced(enhancer, image, change):
    return enhancer(image).enhance(1 + change)


def rotated(image, degrees):
    turned = image.convert("RGBA").rotate(degrees)
    return Image.composite(turned, Image.new("RGBA", turned.size, (128,) * 4), turned).convert(image.mode)


def moved(image, matrix, how=Image.Resampling.NEAREST):
    black = (0, 0, 0) if image.mode == "RGB" else 0
    return image.transform(image.size, Image.Transform.AFFINE, matrix, how, fillcolor=black)


def by_pil(name, image, level, sign):
    ten = np.linspace(0, 1, 10)[level]
    share, change = sign * ten * 150 / 331, sign * ten * 0.5
    return {
        "shear_y": lambda: moved(image, (1, 0, 0, sign * ten * 0.3, 1, 0), Image.Resampling.BICUBIC),
        "translate_x": lambda: moved(image, (1, 0, share * image.size[0], 0, 1, 0)),
        "translate_y": lambda: moved(image, (1, 0, 0, 0, 1, share * image.size[1])),
        "rotate": lambda: rotated(image, 30 * ten),
        "color": lambda: enhanced(ImageEnhance.Color, image, change),
        "contrast": lambda: enhanced(ImageEnhance.Contrast, image, change),
        "sharpness": lambda: enhanced(ImageEnhance.Sharpness, image, change),
        "brightness": lambda: enhanced(ImageEnhance.Brightness, image, change),
        "posterize": lambda: ImageOps.posterize(image, int(np.round(8 - 4 * ten))),
        "solarize": lambda: ImageOps.solarize(image, 256 - 256 * ten),
        "invert": lambda: ImageOps.invert(image),
        "equalize": lambda: ImageOps.equalize(image),
        "autocontrast": lambda: ImageOps.autocontrast(image),
    }[name]()


def pictures(channels, height=32, width=32):
    """Make a smooth picture of few levels, a noisy one, and one of a single color."""
    rng = derive_generator(0, "pictures", channels)
    smooth = torch.nn.functional.interpolate(
        torch.rand(1, channels, 4, 4, generator=rng), (height, width), mode="bicubic"
    )
    noisy = torch.rand(1, channels, height, width, generator=rng)
    plain = torch.full((1, channels, height, width), 0.4)
    return (torch.cat([0.2 + 0.6 * smooth.clamp(0, 1), noisy, plain]) * 255).to(torch.uint8)


def to_pil(image):
    array = image.permute(1, 2, 0).numpy()
    return Image.fromarray(array if array.shape[2] == 3 else array[:, :, 0])


EVERY = [(index, sign) for index in range(50) for sign in (1, -1)]


@pytest.mark.parametrize(("channels", "size"), [(3, (32, 32)), (1, (28, 28)), (3, (20, 30))])
def test_equals_pil_within_rounding(channels, size):
    images = pictures(channels, *size)
    wrong = []
    for index, sign in EVERY:
        operation = OPERATIONS[index]
        for image, found in zip(images, operation(images, sign), strict=True):
            used = sign if operation.signed else 1
            expected = np.asarray(by_pil(operation.name, to_pil(image), operation.level, used))
            if np.abs(np.asarray(to_pil(found)).astype(int) - expected.astype(int)).max() > 1:
                wrong.append((index, operation, sign))
    assert not wrong


GEOMETRY = ("shear_y", "translate_x", "translate_y", "rotate")


@pytest.mark.parametrize("name", GEOMETRY)
def test_geometry_is_exact_at_every_level(name):
    wrong = []
    for channels, size in ((3, (32, 32)), (1, (28, 28)), (1, (17, 40))):
        images = pictures(channels, *size)
        for level, sign in itertools.product(range(10), (1, -1)):
            found = Operation(name, level, 1.0)(images, sign)
            used = sign if name != "rotate" else 1
            wrong += [
                (channels, size, level, sign)
                for f, i in zip(found, images, strict=True)
                if not np.array_equal(np.asarray(to_pil(f)), np.asarray(by_pil(name, to_pil(i), level, used)))
            ]
    assert not wrong


def test_on_floats_it_is_the_same_without_rounding_and_has_a_slope():
    images = pictures(3)
    leaf = (images.float() / 255).requires_grad_()
    for index, sign in EVERY:
        relaxed = OPERATIONS[index](leaf, sign)
        exact = OPERATIONS[index](images, sign).float() / 255
        off = (relaxed.detach() - exact).abs()[:2]
        assert off.mean() < 1.5 / 255, (index, sign)
        (slope,) = torch.autograd.grad(relaxed.sum(), leaf)
        assert slope.isfinite().all(), (index, sign)
        assert slope[:2].abs().sum() > 0, (index, sign)


def test_images_of_a_batch_do_not_meet():
    images = pictures(3)
    for index, sign in EVERY:
        together = OPERATIONS[index](images, sign)
        assert all(torch.equal(together[i], OPERATIONS[index](images[i], sign)) for i in range(3)), (index, sign)


def test_probabilities_are_those_of_autoaugment():
    policies = AutoAugment(AutoAugmentPolicy.CIFAR10).policies
    assert [o.probability for o in OPERATIONS] == [p for pair in policies for _, p, _ in pair]


def test_moves_leave_black_behind_and_rotation_grey():
    white = torch.full((1, 3, 32, 32), 255, dtype=torch.uint8)
    for name, left in (("translate_x", 0), ("translate_y", 0), ("shear_y", 0), ("rotate", 128)):
        for given, unit in ((white, 1), (white.float() / 255, 255)):
            found = Operation(name, 9, 1.0)(given) * unit
            assert found.min() == pytest.approx(left), name
            assert (found < 255).float().mean() > 0.05


TABLE_1 = """
invert 7, contrast 6, rotate 2, translateX 9, sharpness 1, sharpness 3, shearY 2, translateY 2, autocontrast 5,
equalize 2, shearY 5, posterize 5, color 3, brightness 5, sharpness 9, brightness 9, translateX 4, equalize 1,
contrast 7, sharpness 5, color 5, translateX 5, equalize 7, autocontrast 8, translateY 3, sharpness 6, brightness 6,
color 8, solarize 0, invert 0, equalize 0, autocontrast 0, equalize 8, equalize 4, color 5, equalize 5, autocontrast 4,
solarize 4, brightness 3, color 0, solarize 1, autocontrast 0, translateY 3, translateY 4, autocontrast 1, solarize 1,
equalize 5, invert 1, translateY 3, autocontrast 1
"""
"""Table 1 of ATS as printed: transformation and magnitude, by index."""


def test_table():
    printed = [re.sub("([XY])", r"_\1", each.strip()).lower() for each in TABLE_1.split(",")]
    assert [f"{o.name} {o.level}" for o in OPERATIONS] == printed
    assert TABLES["paper"] is OPERATIONS


def test_table_of_the_code_differs_at_three_numbers():
    other = {i: (o.name, o.level) for i, o in enumerate(TABLES["code"]) if o != OPERATIONS[i]}
    assert other == {16: ("equalize", 5), 43: ("translate_y", 3), 47: ("invert", 0)}
    images = pictures(3)
    assert torch.equal(TABLES["code"][47](images), OPERATIONS[47](images))


def test_strongest_changes_of_a_factor_are_by_a_half():
    assert {o.magnitude for o in OPERATIONS if o.name in ("brightness", "sharpness") and o.level == 9} == {0.5}
    white = torch.full((1, 3, 4, 4), 200, dtype=torch.uint8)
    assert OPERATIONS[15](white, -1).unique().tolist() == [100]
