"""Gradients of single examples and their clipped sum, against differentiating each example's loss alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fl_privacy.models import ConvNet, LeNet, ResNet20
from fl_privacy.models.gradients import (
    Layered,
    Vectorized,
    VictimModel,
    clipped_sum,
    example_gradients,
    frozen_copy,
    loss_gradients,
    per_example as examples,
    register_layer_rule,
    victim_gradients,
)
from fl_privacy.models.gradients.layered import parameter_gradients
from fl_privacy.types import Batch, LocalPlan, ModelState

PLAN = LocalPlan(batch_norm="eval", loss_scale=1.7)


class SharedTwice(nn.Module):
    """A layer that is called twice, and one that is used outside of its own forward pass."""

    def __init__(self, *, hidden: bool) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(192, 12), nn.Linear(12, 12), nn.Linear(12, 5)
        self.hidden = hidden

    def forward(self, images: Tensor) -> Tensor:
        features = self.shared(torch.tanh(self.shared(torch.tanh(self.first(images.flatten(1))))))
        if self.hidden:
            features = features + features @ self.shared.weight.T
        return self.last(features)


def batch(number: int = 5, size: int = 32, channels: int = 3) -> Batch:
    rng = torch.Generator().manual_seed(3)
    return Batch(torch.rand(number, channels, size, size, generator=rng), torch.arange(number) % 5)


def alone(model: nn.Module, state: ModelState, batch: Batch) -> dict[str, Tensor]:
    rows = [
        loss_gradients(model, state, Batch(x[None], y[None]), batch_norm="eval", loss_scale=1.7).gradients
        for x, y in zip(batch.inputs, batch.labels, strict=True)
    ]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


MODELS = {
    "lenet": (lambda: LeNet(in_channels=3, image_size=32, num_classes=5), batch()),
    "convnet": (lambda: ConvNet(in_channels=3, image_size=32, num_classes=5, width=4), batch()),
    "resnet20": (lambda: ResNet20(in_channels=3, image_size=32, num_classes=5, width=4), batch()),
    "shared layer": (lambda: SharedTwice(hidden=False), batch(size=8)),
    "hidden use": (lambda: SharedTwice(hidden=True), batch(size=8)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [1, 1 << 26])
def test_they_are_those_of_each_example_alone(monkeypatch, name, chunk):
    monkeypatch.setattr(examples, "_CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    make, some = MODELS[name]
    model = make()
    state = ModelState.of(model)
    expected = alone(model, state, some)
    found = example_gradients(model, state, some, plan=PLAN)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-5)
    norms = torch.stack([g.flatten(1).square().sum(1) for g in expected.values()]).sum(0).sqrt()
    clip = float(norms.median())
    total, _ = clipped_sum(model, state, some, clip, plan=PLAN)
    factors = (clip / norms).clamp(max=1)
    for key, value in expected.items():
        torch.testing.assert_close(total[key], torch.tensordot(factors, value, dims=1), rtol=1e-3, atol=1e-5)


def test_layers_that_were_held_are_tried_when_they_train():
    torch.manual_seed(0)
    model, some = SharedTwice(hidden=True), batch(size=8)
    state = ModelState.of(model)
    body = [name for name in state.parameters if not name.startswith("last")]
    assert set(clipped_sum(model, state, some, 1e6, plan=PLAN, held=body)[0]) == {"last.weight", "last.bias"}
    total, _ = clipped_sum(model, state, some, 1e6, plan=PLAN)
    for key, value in alone(model, state, some).items():
        torch.testing.assert_close(total[key], value.sum(0), rtol=1e-3, atol=1e-5)


class Centered(nn.Module):
    """Normalizes by the batch, by no layer of PyTorch's."""

    def forward(self, features: Tensor) -> Tensor:
        return features - 0.5 * features.mean(0)


def test_a_single_example_does_not_tell_whether_examples_are_mixed():
    torch.manual_seed(0)
    model, some = nn.Sequential(nn.Flatten(), nn.Linear(192, 12), Centered(), nn.Linear(12, 5)), batch(size=8)
    state = ModelState.of(model)
    clipped_sum(model, state, Batch(some.inputs[:1], some.labels[:1]), 0.1, plan=PLAN)
    total, _ = clipped_sum(model, state, some, 1e6, plan=PLAN)
    for key, value in alone(model, state, some).items():
        torch.testing.assert_close(total[key], value.sum(0), rtol=1e-3, atol=1e-5)


def test_wide_layers_are_clipped_without_forming_their_gradients(monkeypatch):
    layers = [nn.Linear(192, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 5)]
    model = nn.Sequential(nn.Flatten(), *layers)
    state, some, formed = ModelState.of(model), batch(size=8), []
    clipped_sum(model, state, some, 0.1, plan=PLAN)

    def watched(call, own):
        formed.extend((len(call.inputs), call.names[name]) for name in own)
        return parameter_gradients(call, own)

    monkeypatch.setattr(examples, "parameter_gradients", watched)
    clipped_sum(model, state, some, 0.1, plan=PLAN)
    assert {name for victims, name in formed if victims == 5} == {"1.bias", "3.bias", "5.bias"}


def test_they_are_differentiable_by_the_images():
    torch.manual_seed(0)
    model = LeNet(in_channels=3, image_size=32, num_classes=5)
    some = batch()
    leaf = some.inputs.clone().requires_grad_()
    gradients = example_gradients(model, ModelState.of(model), Batch(leaf, some.labels), plan=PLAN)
    (slope,) = torch.autograd.grad(torch.stack([g.square().sum() for g in gradients.values()]).sum(), leaf)
    assert slope.shape == leaf.shape and slope.abs().sum() > 0


def test_a_clients_dropout_stays_on():
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.Dropout(0.5), nn.Linear(64, 5))
    state, some = ModelState.of(model), batch(size=8)
    one, other = (example_gradients(model, state, some, plan=PLAN)["1.weight"] for _ in range(2))
    assert not torch.equal(one, other)


def test_the_mode_of_batch_norm_is_that_of_the_plan():
    torch.manual_seed(0)
    model = ResNet20(in_channels=3, image_size=32, num_classes=5, width=4)
    state = ModelState.of(model)
    shifted = ModelState(state.parameters, {k: b + 1 if b.is_floating_point() else b for k, b in state.buffers.items()})
    plan = replace(PLAN, loss_scale=1.0)
    found, _ = clipped_sum(model, shifted, batch(), 1e6, plan=plan)
    expected = loss_gradients(model, shifted, batch(), batch_norm="eval").gradients
    for key, value in expected.items():
        torch.testing.assert_close(found[key] / 5, value, rtol=1e-3, atol=1e-4)


class Scaled(nn.Linear):
    """A layer of a user's own, with a rule of its own."""

    def forward(self, images: Tensor) -> Tensor:
        return 3 * super().forward(images)


def scaled_factors(scale):
    return lambda call: (scale * call.deltas.flatten(1, -2).mT, call.inputs.flatten(1, -2).mT)


@pytest.mark.parametrize("scale", [3.0, 0.03], ids=["right", "wrong"])
def test_a_rule_of_ones_own_is_used_where_its_factors_are_right_and_breaks_no_bound_where_not(scale):
    @register_layer_rule(Scaled, factors=scaled_factors(scale))
    def gradients(call, names):
        deltas, inputs = 3 * call.deltas.flatten(1, -2), call.inputs.flatten(1, -2)
        found = {"weight": deltas.mT @ inputs, "bias": deltas.sum(1)}
        return {name: found[name] for name in names}

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), Scaled(192, 512), nn.ReLU(), Scaled(512, 5))
    state, one = ModelState.of(model), batch(1, size=8)
    total, _ = clipped_sum(model, state, one, 0.01, plan=PLAN)
    assert torch.cat([t.flatten() for t in total.values()]).norm() == pytest.approx(0.01, rel=1e-4)
    frozen = frozen_copy(model, state, PLAN, device=torch.device("cpu"), dtype=torch.float32)
    victim_model = VictimModel(frozen, list(state.parameters), PLAN)
    chosen = victim_gradients(victim_model, one.inputs[None], one.labels[None])
    assert type(chosen) is (Layered if scale == 3 else Vectorized)
