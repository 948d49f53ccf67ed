"""What enters a later fully connected layer is read exactly, or not at all, and holds descents to it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_privacy.attacks.adaptive import KnownFeatures
from fl_privacy.attacks.auto.members import entries
from fl_privacy.attacks.auto.race import Race
from fl_privacy.attacks.exact.certificate import Reproduction, model_as_sent
from fl_privacy.attacks.exact.hidden_layer import HiddenFeatures, first_hidden_layer, hidden_features
from fl_privacy.attacks.gradient_inversion.grouping import Group
from fl_privacy.models import Front, LeNet
from fl_privacy.types import Batch, LocalPlan, Observation, VictimId
from tests.attacks.exact.test_exact import mlp, noise, pruned, victims
from tests.attacks.victims import CLASSES, examples, observations, observe, smooth_net

FRONT = nn.Conv2d(2, 6, 3, stride=2), nn.Sigmoid(), nn.Flatten()


def with_hidden_layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*FRONT, nn.Linear(54, 96), nn.ReLU(), nn.Linear(96, CLASSES)).double()


def read(seen: Observation) -> HiddenFeatures | None:
    path = first_hidden_layer(seen)
    assert path is not None
    return hidden_features(Reproduction(seen, model_as_sent(seen)), path, torch.Generator().manual_seed(0))


def test_features_of_one_image_are_the_quotient():
    model = LeNet(in_channels=2, image_size=8, num_classes=CLASSES)
    (seen,), (truth,) = victims(model, 1, 1)
    found = read(seen)
    assert found is not None and found.path == "classifier"
    torch.testing.assert_close(found.values.float(), Front(model, found.path)(truth.inputs), rtol=1e-4, atol=1e-5)


def test_features_of_a_batch_come_with_its_labels_in_front_of_a_relu():
    model, truth = with_hidden_layer(), examples(4)
    found = read(observe(model, truth))
    assert found is not None and found.path == "3"
    apart = torch.cdist(found.values, Front(model, "3")(truth.inputs))
    order = apart.argmin(1)
    assert sorted(order.tolist()) == [0, 1, 2, 3]
    assert float(apart.amin(1).max()) < 1e-6
    assert torch.equal(found.labels, truth.labels[order])


@pytest.mark.parametrize("change", [noise(0.1), pruned(0.9)])
def test_what_a_defense_has_changed_gives_no_features(change):
    model, rng = LeNet(in_channels=2, image_size=8, num_classes=CLASSES), torch.Generator().manual_seed(0)
    (seen,), _ = victims(model, 1, 1)
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
    front, truth = nn.Sequential(*FRONT).double(), examples(2)
    values = front(truth.inputs)[None].repeat(3, 1, 1)
    known = KnownFeatures(front=front, values=values, weight=torch.tensor([1.0, 2.0, 0.0]).double())
    images = torch.stack([truth.inputs, 1 - truth.inputs, 1 - truth.inputs])
    exact, wrong, unknown = known.mismatch(images).tolist()
    assert exact == unknown == 0
    expected = (front(1 - truth.inputs) - values[0]).square().sum() / values[0].square().sum()
    assert wrong == pytest.approx(2 * float(expected))


def test_only_victims_whose_features_are_known_are_held_to_them():
    seen = observations(smooth_net(), 2)
    group = Group({0: seen[0], 1: replace(seen[1], id=VictimId(0, 0, 1))})
    found = read(seen[0])
    assert found is not None
    plain, held = (
        Race(group, entries(seen[0], 1, lambda attack: attack), 0, features=known) for known in ({}, {0: found})
    )
    wrong = Batch(1 - examples(1).inputs, examples(1).labels)
    for race in (plain, held):
        for position in (0, 1):
            race.add(position, wrong)
    losses = []
    for race in (plain, held):
        jobs = [(position, race.attempts[position][1]) for position in (0, 1)]
        rows = torch.stack([attempt.variables for _, attempt in jobs])
        losses.append(race._problem(0, jobs).loss(rows))
    assert losses[1][0] > losses[0][0] + 1e-3
    assert losses[1][1] == pytest.approx(float(losses[0][1]))
