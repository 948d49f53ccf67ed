"""What enters a later fully connected layer is read exactly, or not at all, and holds descents to it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_privacy.attacks.adaptive import KnownFeatures
from fl_privacy.attacks.auto.race import Race
from fl_privacy.attacks.auto.sub_attacks import entries
from fl_privacy.attacks.exact.certificate import Reproduction, model_as_sent
from fl_privacy.attacks.exact.first_layer import HiddenFeatures, first_hidden_layer, hidden_features
from fl_privacy.attacks.gradient_inversion.grouping import Group
from fl_privacy.models import Front
from fl_privacy.models.losses import BINARY_CROSS_ENTROPY, CROSS_ENTROPY, SQUARED_ERROR
from fl_privacy.types import Batch, LocalPlan, Observation
from tests.attacks.exact.test_exact import mlp, noise, pruned, victims
from tests.attacks.victims import CLASSES, examples, observe


def front_of_features() -> nn.Module:
    """Whose features differ from image to image, so that neurons behind them do."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(2, 6, 3, stride=2)
    nn.init.normal_(convolution.weight, std=1.0)
    return nn.Sequential(convolution, nn.Tanh(), nn.Flatten()).double()


def with_hidden_layer() -> nn.Module:
    return nn.Sequential(*front_of_features(), nn.Linear(54, 96), nn.ReLU(), nn.Linear(96, CLASSES)).double()


def read(seen: Observation) -> HiddenFeatures | None:
    path = first_hidden_layer(seen)
    assert path is not None
    return hidden_features(Reproduction(seen, model_as_sent(seen)), path, torch.Generator().manual_seed(0))


def test_features_of_a_batch_come_with_its_labels_in_front_of_a_relu():
    model, truth = with_hidden_layer(), examples(4)
    found = read(observe(model, truth))
    assert found is not None and found.path == "3"
    apart = torch.cdist(found.values, Front(model, "3")(truth.inputs))
    order = apart.argmin(1)
    assert sorted(order.tolist()) == [0, 1, 2, 3]
    assert bool((apart.amin(1) < 1e-6).all())
    assert torch.equal(found.labels, truth.labels[order])


@pytest.mark.parametrize("loss", [CROSS_ENTROPY, BINARY_CROSS_ENTROPY, SQUARED_ERROR], ids=lambda loss: loss.name)
def test_features_of_an_example_that_occurs_twice_are_there_twice(loss):
    model, order = with_hidden_layer(), [0, 1, 2, 1]
    truth = Batch(examples(3).inputs[order], torch.tensor([0, 1, 2])[order] % CLASSES)
    gradients = torch.autograd.grad(loss(model(truth.inputs.double()), truth.labels), list(model.parameters()))
    seen = Observation.of_gradients(
        model, gradients, input_shape=tuple(truth.inputs.shape[1:]), batch_size=4, loss=loss
    )
    found = read(seen)
    assert found is not None
    apart = torch.cdist(found.values, Front(model, "3")(examples(3).inputs.double()))
    assert bool((apart.amin(1) < 1e-6).all()) and sorted(apart.argmin(1).tolist()) == [0, 1, 1, 2]
    labels = found.labels.argmax(1) if found.labels.is_floating_point() else found.labels
    assert torch.equal(labels, apart.argmin(1) % CLASSES)


@pytest.mark.parametrize("change", [noise(0.1), pruned(0.9)])
def test_what_a_defense_has_changed_gives_no_features(change):
    seen, rng = observe(with_hidden_layer(), examples(4)), torch.Generator().manual_seed(0)
    tensors = change(dict(seen.upload.tensors), rng)
    assert read(replace(seen, upload=replace(seen.upload, tensors=tensors))) is None


def test_layers_that_give_nothing_away_are_left_out():
    batch = examples(1)
    normalized = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, CLASSES)).double()
    assert first_hidden_layer(observe(normalized, batch, plan=LocalPlan(batch_norm="train"))) is None
    assert first_hidden_layer(observe(normalized, batch, plan=LocalPlan(batch_norm="eval"))) == "3"
    (seen,), _ = victims(mlp(widths=()), 1, 1)
    assert first_hidden_layer(seen) is None


def test_the_mismatch_of_features_is_a_share_of_their_length():
    front, truth = front_of_features(), examples(2)
    values = front(truth.inputs)[None].repeat(3, 1, 1).detach()
    values[2] = 0
    known = KnownFeatures(front=front, values=values, weight=torch.tensor([1.0, 2.0, 0.0]).double())
    images = torch.stack([truth.inputs, 1 - truth.inputs, 1 - truth.inputs])
    exact, wrong, unknown = known.mismatch(images).tolist()
    assert exact == unknown == 0
    expected = (front(1 - truth.inputs).detach() - values[0]).square().sum() / values[0].square().sum()
    assert wrong == pytest.approx(2 * float(expected))


def test_one_attempt_is_held_to_known_features_and_all_take_their_labels():
    model, truth = with_hidden_layer(), examples(4)
    seen = observe(model, truth)
    found = read(seen)
    assert found is not None
    race = Race(Group({0: seen}), entries(seen, 3, lambda attack: attack), 0, features={0: found})
    assert [attempt.with_features for attempt in race.attempts[0]] == [False, True, False]
    assert all(torch.equal(attempt.labels, found.labels) for attempt in race.attempts[0])
    order = torch.cdist(found.values, Front(model, "3")(truth.inputs)).argmin(1)
    losses = []
    for images in (truth.inputs[order], truth.inputs[order.flip(0)]):
        race.add(0, Batch(images, found.labels))
        free = race.attempts[0].pop()
        jobs = [free, replace(free, with_features=True)]
        losses.append(race._problem(jobs).loss(torch.stack([free.variables, free.variables])).detach().tolist())
    assert losses[0][1] == pytest.approx(losses[0][0], abs=1e-5)
    assert losses[1][1] > losses[1][0] + 1e-2
