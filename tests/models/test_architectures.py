"""Shapes, parameter counts and properties that every model must have to be attacked and exchanged."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from fl_privacy.errors import UserError
from fl_privacy.models import (
    MLP,
    VGG16,
    AlexNet,
    ConvNet,
    DLNet,
    InputNormalization,
    LeNet,
    LeNet5,
    MobileNetV2,
    ResNet10,
    ResNet18,
    ResNet20,
    ResNet34,
    ResNet50,
)
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.types import Batch, ModelState

SMALL = {model: {"width": 4} for model in (AlexNet, VGG16, ConvNet)} | {
    model: {"width": 8} for model in (ResNet10, ResNet18, ResNet20, ResNet34)
}
MODELS = [MLP, LeNet, DLNet, AlexNet, VGG16, ConvNet, ResNet10, ResNet18, ResNet20, ResNet34]


@pytest.mark.parametrize("model_class", MODELS)
@pytest.mark.parametrize(("channels", "size", "classes"), [(1, 28, 10), (3, 32, 100), (3, 64, 2), (1, 17, 5)])
def test_any_image_size_and_channels(model_class, channels, size, classes):
    options = SMALL.get(model_class, {})
    model = model_class(in_channels=channels, image_size=size, num_classes=classes, **options)
    assert model(torch.rand(2, channels, size, size)).shape == (2, classes)


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_published_parameter_counts():
    cifar = {"in_channels": 3, "image_size": 32, "num_classes": 10}
    assert count(LeNet(**cifar)) == (3 * 12 + 12 * 12 * 2) * 25 + 36 + 768 * 10 + 10
    assert count(DLNet(**cifar)) == (3 * 12 + 12 * 12 * 3) * 25 + 48 + 768 * 10 + 10
    # The 3x3-stem ResNet-18 for CIFAR-10 is known to have 11,173,962 parameters, ResNet-20 of width 16 0.27 million.
    assert count(ResNet18(**cifar)) == 11_173_962
    assert count(ResNet10(**cifar)) == 4_903_242
    assert count(ResNet20(**cifar, width=16)) == 272_474
    # Of its 3x3-stem sibling of 34 layers 21,282,122, and of torchvision's ResNet-50 for ImageNet 25,557,032.
    assert count(ResNet34(**cifar)) == 21_282_122
    assert count(ResNet50(in_channels=3, image_size=224, num_classes=1000)) == 25_557_032
    assert ConvNet(**cifar).classifier.in_features == 36 * 64
    # ConvNet64 in the authors' code: convolutions with biases of 64, 128, 128 and five times 256 channels, batch norm.
    assert count(ConvNet(**cifar)) == 2_904_970
    assert LeNet(in_channels=1, image_size=28, num_classes=10).classifier.in_features == 588
    # LeNet-5 for MNIST is known to have 61,706 parameters.
    assert count(LeNet5(in_channels=1, image_size=28, num_classes=10)) == 61_706


def test_alexnet_and_vgg16_have_the_shapes_of_spn():
    cifar = {"in_channels": 3, "image_size": 32, "num_classes": 10}
    convolutions = [(64, 3, 5, 5), (192, 64, 5, 5), (384, 192, 3, 3), (256, 384, 3, 3), (256, 256, 3, 3)]
    assert weight_shapes(AlexNet(**cifar)) == [*convolutions, (256, 4096), (10, 256)]
    assert weight_shapes(AlexNet(**cifar, hidden=None)) == [*convolutions, (10, 4096)]
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    vgg = VGG16(**cifar, norm="group")
    assert weight_shapes(vgg) == [(o, i, 3, 3) for i, o in pairwise(widths)] + [(256, 8192), (10, 256)]
    assert sum(isinstance(m, torch.nn.GroupNorm) for m in vgg.modules()) == 13


def test_the_last_scale_starts_the_last_normalization_alone():
    torch.manual_seed(0)
    plain = VGG16(in_channels=3, image_size=16, num_classes=10, width=8, norm="group").state_dict()
    torch.manual_seed(0)
    scaled = VGG16(in_channels=3, image_size=16, num_classes=10, width=8, norm="group", last_scale=0.1).state_dict()
    (name,) = [key for key in plain if not torch.equal(plain[key], scaled[key])]
    assert torch.equal(scaled[name], torch.full((64,), 0.1))
    assert name == [key for key in plain if key.startswith("features") and plain[key].dim() == 1][-2]


def weight_shapes(model):
    """Of convolutions and linear layers, in order."""
    return [tuple(p.shape) for p in model.parameters() if p.dim() > 1]


@pytest.mark.parametrize("model_class", MODELS)
def test_second_derivative_reaches_the_image(model_class):
    options = SMALL.get(model_class, {})
    model = model_class(in_channels=1, image_size=12, num_classes=3, activation="tanh", **options)
    image = torch.rand(2, 1, 12, 12, requires_grad=True)
    result = loss_gradients(model, ModelState.of(model), Batch(image, torch.tensor([0, 2])), create_graph=True)
    sum(g.square().sum() for g in result.gradients.values()).backward()
    assert image.grad.abs().sum() > 0


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_state_holds_parameters_and_running_statistics_only(norm):
    model = ResNet10(in_channels=3, image_size=16, num_classes=4, width=8, norm=norm, mean=[0.5] * 3, std=[0.2] * 3)
    state = ModelState.of(model)
    statistics = {name for name in state.buffers if name.endswith(("running_mean", "running_var"))}
    assert set(state.buffers) == statistics == (statistics if norm == "batch" else set())
    assert set(model.state_dict()) == set(state.parameters) | set(state.buffers)
    assert all(b.is_floating_point() for b in state.buffers.values())
    images = torch.rand(4, 3, 16, 16)
    model.eval()
    assert torch.equal(functional_call(model, {**state.parameters, **state.buffers}, (images,)), model(images))


def test_batch_norm_updates_as_pytorch_does():
    ours = ResNet10(in_channels=1, image_size=8, num_classes=2, width=4).stem
    reference = torch.nn.BatchNorm2d(4)
    images = torch.rand(5, 1, 8, 8)
    reference(ours[0](images))
    ours(images)
    torch.testing.assert_close(ours[1].running_mean, reference.running_mean)
    torch.testing.assert_close(ours[1].running_var, reference.running_var)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("model", [ResNet10, MobileNetV2])
def test_plain_dictionaries_are_loaded_with_and_without_a_counter_of_batches(model, counted):
    shape = {"in_channels": 1, "image_size": 32, "num_classes": 2}
    sent, own = dict(model(**shape).state_dict()), model(**shape)
    means = [name for name in sent if name.endswith("running_mean")]
    for name in means:
        sent[name] = torch.full_like(sent[name], 0.5)
    counters = {name.replace("running_mean", "num_batches_tracked"): torch.tensor(3) for name in means}
    own.load_state_dict(sent | counters if counted else sent)
    assert set(own.state_dict()) == set(sent)
    assert all(torch.equal(value, sent[name]) for name, value in own.state_dict().items())


def test_input_normalization_is_that_of_torchvision_and_follows_the_module():
    v2 = pytest.importorskip("torchvision.transforms.v2.functional")
    mean, std = [0.49, 0.48, 0.45], [0.25, 0.24, 0.26]
    images = torch.rand(2, 3, 8, 8)
    layer = InputNormalization(mean, std)
    torch.testing.assert_close(layer(images), v2.normalize(images, mean, std))
    model = LeNet(in_channels=3, image_size=8, num_classes=2, mean=[0.5], std=[0.25]).double()
    assert model.normalize.mean.dtype == torch.float64
    assert model.to("meta").normalize.mean.device.type == "meta"
    torch.testing.assert_close(InputNormalization([0.5], [0.25])(images), images * 4 - 2)


def test_lenet_is_a_plain_stack():
    model = LeNet(in_channels=3, image_size=32, num_classes=10, activation="sigmoid")
    weights = dict(model.named_parameters())
    images = torch.rand(2, 3, 32, 32)
    hidden = images
    for layer, stride in (("features.0", 2), ("features.2", 2), ("features.4", 1)):
        hidden = F.conv2d(hidden, weights[f"{layer}.weight"], weights[f"{layer}.bias"], stride, 2).sigmoid()
    expected = hidden.flatten(1) @ weights["classifier.weight"].T + weights["classifier.bias"]
    torch.testing.assert_close(model(images), expected)


@pytest.mark.parametrize(
    ("factory", "options", "words"),
    [
        (LeNet, {"activation": "swish"}, "activation"),
        (LeNet, {"init": "zeros"}, "init"),
        (LeNet, {"mean": [0.5, 0.5], "std": [1.0]}, "mean"),
        (LeNet, {"std": [0.0]}, "std"),
        (LeNet, {"mean": 0.5}, "mean"),
        (LeNet, {"strides": [2, 0]}, "strides"),
        (LeNet, {"strides": 2}, "strides"),
        (LeNet, {"strides": []}, "strides"),
        (ResNet18, {"strides": [1, 2]}, "4 values"),
        (ResNet18, {"norm": "layer"}, "norm"),
        (ConvNet, {"image_size": 8}, "9x9"),
        (AlexNet, {"image_size": 7}, "8x8"),
        (VGG16, {"hidden": 0}, "hidden"),
        (VGG16, {"norm": "group", "last_scale": 0}, "last_scale"),
        (VGG16, {"last_scale": 0.1}, "norm=none"),
        (MLP, {"widths": 64}, "widths"),
        (MLP, {"widths": [64, 0]}, "widths"),
        (ResNet10, {"width": -1}, "width"),
    ],
)
def test_wrong_options_are_named(factory, options, words):
    with pytest.raises(UserError, match=words) as error:
        factory(**{"in_channels": 3, "image_size": 16, "num_classes": 10, **options})
    assert "\n" not in str(error.value)
