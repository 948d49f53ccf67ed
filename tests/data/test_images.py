"""Decoding and resizing against PIL."""

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from fl_privacy.data.images import decode_images, fit_images
from fl_privacy.errors import UserError


def cell(image, fmt="PNG"):
    encoded = io.BytesIO()
    image.save(encoded, fmt)
    return {"bytes": encoded.getvalue(), "path": None}


def decode(cells, *, image_size=None, channels=None, fit="resize"):
    return decode_images(cells, len(cells), image_size=image_size, channels=channels, fit=fit, name="some")


def as_tensor(image):
    pixels = torch.from_numpy(np.array(image))
    return pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1)


@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "BMP"])
@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
def test_decodes_what_pil_decodes(picture, fmt, mode, channels):
    cells = [cell(picture(seed=s, mode=mode), fmt) for s in range(3)]
    images = decode(cells)
    assert images.dtype == torch.uint8
    assert images.shape == (3, channels, 16, 16)
    for image, source in zip(images, cells, strict=True):
        assert torch.equal(image, as_tensor(Image.open(io.BytesIO(source["bytes"]))))


def test_more_images_than_a_chunk(picture):
    cells = [cell(picture(4, 4, seed=s)) for s in range(1100)]
    images = decode(cells)
    assert torch.equal(images[1099], as_tensor(picture(4, 4, seed=1099)))
    assert torch.equal(images[1024], as_tensor(picture(4, 4, seed=1024)))


def test_channels_are_converted_as_pil_does(picture):
    grey = decode([cell(picture())], channels=1)
    assert torch.equal(grey[0], as_tensor(picture().convert("L")))
    color = decode([cell(picture(mode="L"))], channels=3)
    assert torch.equal(color[0], as_tensor(picture(mode="L").convert("RGB")))


@pytest.mark.parametrize("size", [8, 13, 32])
def test_resize_is_pils_antialiased_bilinear(picture, size):
    images = decode([cell(picture(20, 20))], image_size=size)
    expected = as_tensor(picture(20, 20).resize((size, size), Image.Resampling.BILINEAR))
    assert (images[0].int() - expected.int()).abs().max() <= 1


def test_oblong_images_are_cropped_at_the_center(picture):
    images = decode([cell(picture(20, 40))], image_size=10)
    expected = ImageOps.fit(picture(20, 40), (10, 10), Image.Resampling.BILINEAR)
    assert (images[0].int() - as_tensor(expected).int()).abs().max() <= 1


def test_pad_keeps_the_pixels_and_adds_black(picture):
    images = decode([cell(picture(28, 28))], image_size=32, fit="pad")
    expected = ImageOps.expand(picture(28, 28), 2, 0)
    assert torch.equal(images[0], as_tensor(expected))


def test_pad_shrinks_what_is_too_large(picture):
    images = decode([cell(picture(20, 40))], image_size=10, fit="pad")
    expected = ImageOps.pad(picture(20, 40), (10, 10), Image.Resampling.BILINEAR)
    assert images.shape == (1, 3, 10, 10)
    assert (images[0].int() - as_tensor(expected).int()).abs().max() <= 1


def test_mixed_sizes_fit_like_single_ones(picture):
    pictures = [picture(20, 24, seed=1), picture(9, 9, seed=2), picture(12, 12, seed=3)]
    images = decode([cell(p) for p in pictures], image_size=12)
    for image, source in zip(images, pictures, strict=True):
        assert torch.equal(image, fit_images(as_tensor(source), 12, "resize"))


def test_orientation_of_photographs_is_applied(picture):
    encoded = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(8, 12).save(encoded, "JPEG", exif=exif, quality=95)
    images = decode([{"bytes": encoded.getvalue(), "path": None}])
    assert images.shape == (1, 3, 12, 8)


@pytest.mark.parametrize(("heights", "words"), [((16, 18), "16x16 and 18x16.*data.image_size"), ((), "empty")])
def test_what_can_not_be_stacked_is_said(picture, heights, words):
    with pytest.raises(UserError, match=words):
        decode([cell(picture(h, 16)) for h in heights])


@pytest.mark.parametrize(
    "broken",
    [{"bytes": b"no image", "path": None}, {"bytes": None, "path": "/none.png"}, {"bytes": None, "path": None}],
)
def test_broken_image_is_named(picture, broken):
    with pytest.raises(UserError, match=r"Image 1 of data set some") as error:
        decode([cell(picture()), broken])
    assert "\n" not in str(error.value)
