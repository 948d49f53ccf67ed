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


def tiff(values):
    encoded = io.BytesIO()
    Image.fromarray(values).save(encoded, "TIFF")
    return {"bytes": encoded.getvalue(), "path": None}


RAMP = np.arange(256).reshape(16, 16)

DEEP = {
    "float_of_one": (RAMP / 255).astype(np.float32),
    "float_of_bytes": RAMP.astype(np.float32),
    "float_of_its_own": (RAMP / 60 - 2).astype(np.float32),
    "hounsfield": (RAMP * 16 - 1000).astype(np.int32),
    "signed_16": (RAMP * 100 - 12_750).astype(np.int16),
    "of_12_bits": np.round(RAMP * 4095 / 255).astype(np.uint16),
    "of_16_bits": (RAMP * 257).astype(np.uint16),
    "few_counts": (RAMP // 64).astype(np.uint16),
}
"""Pictures that are black to white, as they are saved."""


@pytest.mark.parametrize("kind", DEEP)
def test_a_picture_of_more_than_8_bits_is_read_by_its_range(kind):
    expected = torch.from_numpy(RAMP if kind != "few_counts" else RAMP // 64 * 85)
    with pytest.warns(UserWarning, match=r"1 of 1 images of data set some have more than 8 bits .* for white"):
        images = decode([tiff(DEEP[kind])])
    assert images.dtype == torch.uint8 and images.shape == (1, 1, 16, 16)
    assert (images[0, 0].int() - expected).abs().max() <= 1


def test_all_pictures_of_a_data_set_have_one_range():
    cells = [
        tiff((RAMP / 255).astype(np.float32)),
        tiff((RAMP / 510).astype(np.float32)),
        cell(Image.new("L", (16, 16), 9)),
    ]
    with pytest.warns(UserWarning, match="2 of 3 images .* from 0 to 1; 0 is taken for black and 1 for white"):
        images = decode(cells, image_size=8, channels=3)
    assert images.shape == (3, 3, 8, 8) and (images[0].float() - 2 * images[1].float()).abs().max() <= 2
    assert (images[2] == 9).all()


@pytest.mark.parametrize("values", [np.zeros((4, 4), np.uint8), np.ones((4, 4), np.uint8)])
def test_black_pictures_are_refused(values):
    with pytest.raises(UserError, match="expected to show something, but are black"):
        decode([cell(Image.fromarray(values))] * 2)


def test_pixels_that_are_no_numbers_are_refused():
    with pytest.raises(UserError, match="finite pixels"):
        decode([tiff(np.full((4, 4), np.nan, np.float32))])


def test_signed_bytes_are_read_as_they_are(tmp_path):
    picture = Image.fromarray(np.array([[0, 127], [128, 255]], np.uint8))  # 0, 127, -128, -1
    picture.save(tmp_path / "signed.tiff", tiffinfo={339: 2})
    with pytest.warns(UserWarning, match="from -128 to 127"):
        images = decode([{"bytes": None, "path": str(tmp_path / "signed.tiff")}])
    assert images.flatten().tolist() == [128, 255, 0, 127]
