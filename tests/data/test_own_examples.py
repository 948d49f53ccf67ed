"""Pictures and labels of whatever kind an app has them."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from fl_privacy.data.app_data import as_image, as_sample, find_normalization
from fl_privacy.data.images import _decode
from fl_privacy.errors import UserError

GRAY = np.array([[0, 65535], [32768, 257]], dtype=np.uint16)


def test_gray_of_16_bits_keeps_its_levels() -> None:
    image, _ = as_sample((Image.fromarray(GRAY), 0))
    assert image.shape == (1, 2, 2)
    assert torch.allclose(image[0], torch.tensor(GRAY.astype(np.float32)) / 65535)
    file = io.BytesIO()
    Image.fromarray(GRAY).save(file, format="PNG")
    pixels, channels = _decode({"bytes": file.getvalue(), "path": None}, None, "x")
    assert channels == 1 and pixels[0].tolist() == GRAY.tolist(), "as stored: the range of all pictures scales them"


def test_alpha_is_a_channel_not_a_row() -> None:
    image, _ = as_sample((Image.new("RGBA", (5, 7)), 0))
    assert image.shape == (4, 7, 5)


@pytest.mark.parametrize("label", [3, np.array([3]), torch.tensor([3]), np.int64(3), [0, 0, 0, 1], 3.0])
def test_a_class_however_it_is_written(label: object) -> None:
    assert as_sample((torch.zeros(1, 2, 2), label))[1] == 3


@pytest.mark.parametrize("label", [[0, 1, 1], np.zeros(4), "cat", None, float("nan"), 0.5])
def test_a_label_of_no_single_class_is_one_line(label: object) -> None:
    with pytest.raises(UserError, match="A label is expected"):
        as_sample((torch.zeros(1, 2, 2), label))


def test_images_are_had_whatever_their_labels_are() -> None:
    data = [(torch.rand(1, 2, 2), [1, 1, 0])] * 3
    assert as_image(data[0]).shape == (1, 2, 2)
    assert find_normalization(data) is None


@pytest.mark.parametrize("label", [[1, 1, -1], [1, -1, 1, -1, 1], [0.5, 0.5], [0, 0]])
def test_several_labels_of_an_image_are_not_taken_for_one(label: list[float]) -> None:
    with pytest.raises(UserError, match="of several labels"):
        as_sample((torch.zeros(1, 8, 8), torch.tensor(label)))
