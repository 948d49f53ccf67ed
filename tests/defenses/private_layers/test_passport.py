"""Passport layers against the paper's formula written out, and what of them moves."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.signal import correlate2d
from torch import nn

from fl_privacy.data import Examples
from fl_privacy.defenses import ClientState, Defense, fdl_pp, split_fed
from fl_privacy.defenses._fdl_pp import PassportConv2d, passport_layers
from fl_privacy.errors import UserError
from fl_privacy.federation import Client, private_names
from fl_privacy.models import LeNet5, ResNet18
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.types import Batch, LocalPlan, ModelState


def passport_layer(*, stored: bool = False) -> PassportConv2d:
    torch.manual_seed(0)
    return PassportConv2d(nn.Conv2d(2, 4, 3, padding=1), (2, 7, 7), hidden=3, stored=stored).double()


def by_hand(layer: PassportConv2d, passport: torch.Tensor) -> np.ndarray:
    """Avg(D(E(W * P))) with SciPy's correlation and loops over positions."""
    weight, image = layer.weight.detach().numpy(), passport.numpy()
    maps = np.array([sum(correlate2d(image[c], kernel[c], mode="same") for c in range(2)) for kernel in weight])
    e, d = layer.encoder, layer.decoder
    made = []
    for row in range(7):
        for column in range(7):
            code = e.weight.detach().numpy() @ maps[:, row, column] + e.bias.detach().numpy()
            code = np.where(code > 0, code, 0.01 * code)
            made.append(d.weight.detach().numpy() @ code + d.bias.detach().numpy())
    return np.mean(made, axis=0)


def test_gamma_and_beta_are_those_of_the_formula() -> None:
    layer = passport_layer()
    gamma, beta = layer.affine()

    np.testing.assert_allclose(gamma.detach(), by_hand(layer, layer.passport_gamma), rtol=1e-10)
    np.testing.assert_allclose(beta.detach(), by_hand(layer, layer.passport_beta), rtol=1e-10)


@pytest.mark.parametrize(
    "geometry",
    [
        {"stride": (2, 1), "padding": (1, 2)},
        {"dilation": (1, 2), "padding": "same"},
        {"groups": 2, "padding": 3, "padding_mode": "circular"},
    ],
    ids=["stride", "dilation", "groups"],
)
def test_passports_pass_through_the_convolution_as_images_do(geometry: dict[str, Any]) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv2d(4, 6, 3, bias=False, **geometry).double()
    layer = PassportConv2d(convolution, (4, 8, 9), hidden=5).double()

    for made, passport in zip(layer.affine(), (layer.passport_gamma, layer.passport_beta), strict=True):
        maps = convolution(passport[None]).movedim(1, -1)
        decoded = layer.decoder(nn.functional.leaky_relu(layer.encoder(maps)))
        torch.testing.assert_close(made, decoded.mean((0, 1, 2)))


def test_the_output_is_scaled_and_shifted_without_the_convolution_s_bias() -> None:
    layer, images = passport_layer(), torch.rand(3, 2, 7, 7, dtype=torch.float64)
    gamma, beta = layer.affine()

    plain = torch.nn.functional.conv2d(images, layer.weight, padding=1)

    expected = plain * gamma.view(1, 4, 1, 1) + beta.view(1, 4, 1, 1)
    torch.testing.assert_close(layer(images), expected)
    assert "bias" not in dict(layer.named_parameters())


def test_gradients_flow_through_gamma_and_beta_into_weights_and_autoencoder() -> None:
    layer = passport_layer()

    layer(torch.zeros(1, 2, 7, 7, dtype=torch.float64)).sum().backward()  # W * X is 0: only beta is left

    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())
    assert layer.passport_gamma.grad is None


def test_the_penalty_is_the_squared_distance_of_what_is_stored() -> None:
    layer = passport_layer(stored=True)
    gamma, beta = by_hand(layer, layer.passport_gamma), by_hand(layer, layer.passport_beta)

    assert layer.penalty().item() == pytest.approx(((1 - gamma) ** 2).sum() + (beta**2).sum())
    assert passport_layer().penalty().item() == 0


def installed(model: nn.Module, shape: tuple[int, ...], seed: int = 1, **settings: object) -> nn.Module:
    defense = fdl_pp(**settings)
    for hook in defense.model:
        model = hook(model, ClientState(input_shape=shape), torch.Generator().manual_seed(seed))
    return model


def lenet() -> nn.Module:
    torch.manual_seed(3)
    return LeNet5(in_channels=1, image_size=28, num_classes=10)


def test_passports_have_the_shape_of_the_layer_s_input_and_are_each_client_s_own() -> None:
    one, other = (passport_layers(installed(lenet(), (1, 28, 28), seed))["features.0"] for seed in (1, 2))

    assert one.passport_gamma.shape == one.passport_beta.shape == (1, 28, 28)
    assert not torch.equal(one.passport_gamma, one.passport_beta)
    assert not torch.equal(one.passport_gamma, other.passport_gamma)
    assert sorted(one.weight.flatten().tolist()) == sorted(other.weight.flatten().tolist())
    assert not torch.equal(one.weight, other.weight)


def test_a_passport_takes_the_place_of_the_stem_s_normalization() -> None:
    torch.manual_seed(3)
    model = ResNet18(in_channels=3, image_size=16, num_classes=5, width=4)

    changed = installed(model, (3, 16, 16), private=["stem"])

    assert list(passport_layers(changed)) == ["stem.0"]
    assert isinstance(changed.stem[1], nn.Identity)
    assert isinstance(model.stem[1], nn.BatchNorm2d)
    assert changed(torch.rand(2, 3, 16, 16)).shape == (2, 5)


def test_the_penalized_form_adds_the_gradient_of_the_penalty() -> None:
    settings = {"form": "penalized", "penalty": 0.5}
    model = installed(lenet(), (1, 28, 28), **settings)
    batch = Batch(torch.rand(2, 1, 28, 28), torch.tensor([1, 2]))
    sent = ModelState.of(model)
    plain = loss_gradients(model, sent, batch).gradients

    tied = loss_gradients(model, sent, batch, changes=fdl_pp(**settings).loss).gradients

    layer = passport_layers(model)["features.0"]
    layer.penalty().backward()
    for name, gradient in plain.items():
        own = layer.get_parameter(name.removeprefix("features.0.")) if name.startswith("features.0.") else None
        expected = gradient if own is None or own.grad is None else gradient + 0.5 * own.grad
        torch.testing.assert_close(tied[name], expected)


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(UserError, match="expected to have a private convolution"):
        installed(lenet(), (1, 28, 28), private=["classifier"])
    with pytest.raises(UserError, match="expected to get the shape of the client"):
        fdl_pp().model[-1](lenet(), ClientState(), torch.Generator())
    with pytest.raises(UserError, match=r"defense\.form is expected to be one of functional, penalized"):
        fdl_pp(form="stored")


def test_federations_that_share_a_defense_keep_their_own_shapes() -> None:
    defense = fdl_pp()
    shapes = {(1, 28, 28): 28, (1, 32, 32): 32}
    clients = {
        side: Client(
            id=0,
            examples=Examples(torch.zeros(2, *shape, dtype=torch.uint8), torch.tensor([0, 1]), tuple("ab")),
            indices=torch.arange(2),
            model=nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)),
            plan=LocalPlan(),
            defense=defense,
        )
        for shape, side in shapes.items()
    }
    for side in (28, 32, 28):
        (layer,) = passport_layers(clients[side].architecture()).values()
        assert layer.passport_gamma.shape == (1, side, side)


def test_by_default_the_normalization_behind_the_first_convolution_gives_way_too() -> None:
    torch.manual_seed(3)
    model = ResNet18(in_channels=3, image_size=16, num_classes=5, width=4)

    changed = installed(model, (3, 16, 16))

    assert list(passport_layers(changed)) == ["stem.0"]
    assert isinstance(changed.stem[1], nn.Identity)
    kept = private_names(model, fdl_pp())
    assert {"stem.0.weight", "stem.1.weight", "stem.1.running_mean"} <= kept
    assert not any(name.startswith("stages") for name in kept)
    assert private_names(lenet(), fdl_pp()) == {"features.0.weight", "features.0.bias"}


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect"])
def test_the_convolution_s_padding_is_kept(mode: str) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv2d(2, 4, 3, padding=1, padding_mode=mode, bias=False).double()
    layer = PassportConv2d(convolution, (2, 7, 7), hidden=3, stored=True).double()  # gamma is 1, beta 0
    images = torch.rand(3, 2, 7, 7, dtype=torch.float64)

    torch.testing.assert_close(layer(images), convolution(images))


@pytest.mark.parametrize("make", [split_fed, fdl_pp])
def test_a_model_without_layers_to_keep_or_to_share_is_refused(make: Callable[[], Defense]) -> None:
    with pytest.raises(UserError, match="expected to have a convolution or linear layer, but Sequential"):
        private_names(nn.Sequential(nn.BatchNorm1d(3)), make())
    with pytest.raises(UserError, match="names all; name fewer"):
        private_names(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), make())
