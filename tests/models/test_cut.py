"""A model cut in two is the model again."""

import pytest
import torch

from fl_privacy.errors import UserError
from fl_privacy.models import AlexNet, Front, LeNet5, ResNet10, ResNet18, Rest, behind_activation, cut_layer

MODELS = {
    "lenet5": (LeNet5, {}, 28, "features.3"),
    "alexnet": (AlexNet, {"width": 4}, 32, "features.4"),
    "resnet10": (ResNet10, {"width": 4}, 16, "stem.1"),
}


@pytest.mark.parametrize("name", MODELS)
def test_front_and_rest_are_the_model(name):
    make, options, size, expected = MODELS[name]
    torch.manual_seed(0)
    model = make(in_channels=1, image_size=size, num_classes=5, **options).eval()
    images = torch.rand(3, 1, size, size)
    names = [n for n, _ in model.named_parameters()]
    layer = cut_layer(model, (1, size, size), names)
    assert layer == expected
    features = Front(model, layer)(images)
    torch.testing.assert_close(Rest(model, layer, (1, size, size))(features), model(images))
    assert not torch.allclose(Rest(model, layer, (1, size, size))(features + 1), model(images))


def test_the_cut_is_behind_the_private_layers():
    model = LeNet5(in_channels=1, image_size=28, num_classes=5)
    public = [n for n, _ in model.named_parameters() if not n.startswith(("features.0.", "features.3."))]
    assert cut_layer(model, (1, 28, 28), public) == "features.6"
    with pytest.raises(UserError, match="expected to have a public layer behind the private ones"):
        cut_layer(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 5)), (1, 28, 28), ["1.weight"])
    with pytest.raises(UserError, match="A layer of the model is expected, but"):
        Front(model, "nowhere")


def test_the_cut_is_behind_the_last_private_layer_and_leaves_the_mode_alone():
    model = LeNet5(in_channels=1, image_size=28, num_classes=5).train()
    public = [n for n, _ in model.named_parameters() if not n.startswith("features.3.")]

    assert cut_layer(model, (1, 28, 28), public) == "features.6"
    assert all(module.training for module in model.modules())
    behind = [n for n, _ in model.named_parameters() if not n.startswith("classifier")]
    with pytest.raises(UserError, match="expected to have a public layer behind the private ones"):
        cut_layer(model, (1, 28, 28), behind)


def test_the_front_stops_at_its_layer():
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(), torch.nn.Conv2d(2, 2, 3))
    model[2].forward = lambda features: pytest.fail("the pass went on")
    front, images = Front(model, "2"), torch.rand(3, 4, 1, 8, 8)
    weights = torch.rand(3, 2, 1, 3, 3)

    def one(weight, inputs):
        return torch.func.functional_call(front, {"model.0.weight": weight}, (inputs,))

    together = torch.func.vmap(one)(weights, images)

    for k in range(3):
        torch.testing.assert_close(together[k], one(weights[k], images[k]))
    assert not model[2]._forward_pre_hooks
    unused = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "unused": torch.nn.Linear(2, 2)})
    unused.forward = unused["used"].forward
    with pytest.raises(UserError, match="expected to call unused on an image"):
        Front(unused, "unused")(torch.rand(1, 2))


@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        (LeNet5, {}, "features.2"),
        (AlexNet, {"width": 4}, "features.3"),
        (ResNet18, {"width": 4}, "stages.0.0.residual.0"),
    ],
)
@pytest.mark.parametrize("private", [(), ("features.0.", "stem.0.", "stem.1.")])
def test_features_are_shown_behind_the_activation(make, options, expected, private):
    torch.manual_seed(0)
    model = make(in_channels=1, image_size=28, num_classes=5, **options).train()
    public = [n for n, _ in model.named_parameters() if not n.startswith(private or ("nowhere",))]

    assert behind_activation(model, (1, 28, 28), public) == expected

    assert model.training
    shown = Front(model, expected)(torch.rand(3, 1, 28, 28))
    assert shown.min() == 0 < shown.max()


def test_features_of_a_model_without_an_activation_are_those_of_the_first_public_layer():
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(2 * 26 * 26, 5))

    assert behind_activation(model, (1, 28, 28), [n for n, _ in model.named_parameters()]) == "2"
