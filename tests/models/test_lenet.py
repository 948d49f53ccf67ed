import pytest
import torch

from fl_privacy.errors import UserError
from fl_privacy.models import LeNet5


def test_its_shapes_are_those_of_fdl_pp():
    model = LeNet5(in_channels=1, image_size=28, num_classes=10)
    shapes = [tuple(p.shape) for p in model.parameters() if p.dim() > 1]
    assert shapes == [(6, 1, 5, 5), (16, 6, 5, 5), (120, 16, 5, 5), (84, 120), (10, 84)]


@pytest.mark.parametrize(("channels", "size", "classes"), [(1, 28, 10), (3, 32, 100), (3, 64, 2)])
def test_images_from_28_pixels_fit(channels, size, classes):
    model = LeNet5(in_channels=channels, image_size=size, num_classes=classes)
    assert model(torch.rand(2, channels, size, size)).shape == (2, classes)


def test_smaller_ones_do_not():
    with pytest.raises(UserError, match="at least 28x28 pixels, but got 16x16"):
        LeNet5(in_channels=1, image_size=16, num_classes=10)


def test_it_pools_by_maximum_unless_asked_for_the_mean():
    images = torch.rand(2, 1, 28, 28)
    for pooling, expected in ((None, torch.nn.MaxPool2d(2)), ("avg", torch.nn.AvgPool2d(2))):
        model = LeNet5(in_channels=1, image_size=28, num_classes=10, **({"pooling": pooling} if pooling else {}))
        seen = model.features[1](model.features[0](images))
        assert torch.equal(model.features[2](seen), expected(seen))
    with pytest.raises(UserError, match=r"model\.pooling is expected to be one of max, avg, but got 'mean'"):
        LeNet5(in_channels=1, image_size=28, num_classes=10, pooling="mean")
