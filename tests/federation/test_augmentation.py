"""Training images are cropped and flipped at random, those that are probed are not."""

from dataclasses import replace

import pytest
import torch
from torchvision.transforms.v2 import functional as reference

from fl_privacy.defenses import ClientState, Defense
from fl_privacy.errors import UserError
from fl_privacy.federation.client import augment, cropped
from fl_privacy.types import Batch, LocalPlan, ModelState, VictimId
from tests.federation import harness

SENT = ModelState.of(harness.small_net())
PLAN = replace(harness.FEDAVG, crop_padding=2, flip=True)


def images(count, channels=3, height=6, width=5):
    return torch.rand(count, channels, height, width, generator=torch.Generator().manual_seed(1))


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def test_windows_are_those_of_torchvision():
    given, offsets = images(25), torch.cartesian_prod(torch.arange(5), torch.arange(5)).T

    found = cropped(given, 2, offsets)

    for image, window, (top, left) in zip(given, found, offsets.T.tolist(), strict=True):
        padded = reference.pad(image, [2, 2, 2, 2])
        assert torch.equal(window, reference.crop(padded, top, left, 6, 5))


def test_each_image_draws_for_itself():
    same = images(1).expand(600, -1, -1, -1)
    batch = Batch(same, torch.arange(600))

    found = augment(batch, LocalPlan(crop_padding=1, flip=True), rng())

    kinds, counts = found.inputs.unique(dim=0, return_counts=True)
    assert len(kinds) == 2 * 3 * 3
    assert counts.min() > 600 / 18 / 3
    assert torch.equal(found.labels, batch.labels)
    assert torch.equal(augment(batch, LocalPlan(crop_padding=1, flip=True), rng()).inputs, found.inputs)
    assert not torch.equal(augment(batch, LocalPlan(crop_padding=1, flip=True), rng(1)).inputs, found.inputs)


def test_flipping_alone_mirrors_half_of_the_images():
    given = images(400)
    found = augment(Batch(given, torch.zeros(400)), LocalPlan(flip=True), rng()).inputs
    kept = (found == given).flatten(1).all(1)
    assert torch.equal(found[~kept], given[~kept].flip(-1))
    assert 160 < kept.sum() < 240


def test_a_client_trains_on_windows_of_its_own_images_before_any_defense_of_the_data():
    inverting = Defense(data=(lambda batch, state, rng: Batch(1 - batch.inputs, batch.labels),))
    client = harness.clients(PLAN, inverting)[1]

    rounds = [harness.replay(client, VictimId(r, 1)).transformed.inputs for r in (1, 1, 2)]

    assert torch.equal(rounds[0], rounds[1])
    assert not torch.equal(rounds[0], rounds[2])
    own = harness.replay(client, VictimId(1, 1)).examples.inputs
    offsets = torch.cartesian_prod(torch.arange(5), torch.arange(5)).T
    for image, seen in zip(own, rounds[0], strict=True):
        windows = cropped(image.expand(25, -1, -1, -1), 2, offsets)
        possible = torch.cat([windows, windows.flip(-1)])
        assert torch.isclose(possible, 1 - seen).flatten(1).all(1).any()


def test_what_is_probed_is_left_as_it_is():
    with_, without = (harness.clients(plan)[1] for plan in (PLAN, harness.FEDAVG))
    probes = [c.probe(SENT, ClientState(), round=1, probe=0, batch_size=2).upload.tensors for c in (with_, without)]
    harness.assert_same_tensors(*probes)
    updates = [c.update(SENT, ClientState(), round=1).upload.tensors for c in (with_, without)]
    assert not torch.equal(updates[0]["out.bias"], updates[1]["out.bias"])


def test_what_is_probed_is_augmented_where_asked_for():
    client = harness.clients(replace(PLAN, augment_probes=True))[1]
    probed = {"round": 1, "probe": 0, "batch_size": 4}
    own = client.victim_batch(0, 4).inputs
    seen, again = (harness.replay(client, VictimId(1, 1, 0), 4).transformed.inputs for _ in range(2))
    later = harness.replay(client, VictimId(2, 1, 0), 4).transformed.inputs
    assert torch.equal(seen, again)
    assert not torch.equal(seen, own)
    assert not torch.equal(seen, later)
    offsets = torch.cartesian_prod(torch.arange(5), torch.arange(5)).T
    for image, found in zip(own, seen, strict=True):
        windows = cropped(image.expand(25, -1, -1, -1), 2, offsets)
        assert (torch.cat([windows, windows.flip(-1)]) == found).flatten(1).all(1).any()
    plain = harness.clients(harness.FEDAVG)[1].probe(SENT, ClientState(), **probed).upload.tensors
    assert not torch.equal(client.probe(SENT, ClientState(), **probed).upload.tensors["out.bias"], plain["out.bias"])


def test_probes_are_not_augmented_where_nothing_is():
    with pytest.raises(UserError, match=r"plan.augment_probes is expected with crop_padding or flip"):
        LocalPlan(augment_probes=True)


def test_the_learning_rate_drops_after_the_rounds_named():
    plan = LocalPlan(shares="delta", lr=1.0, lr_drops=[2, 4])
    assert [plan.in_round(r).lr for r in range(1, 7)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert plan.in_round(3).in_round(9).lr == pytest.approx(0.1)
    halved = replace(plan, lr_drop_factor=0.5)
    assert [halved.in_round(r).lr for r in range(1, 7)] == pytest.approx([1, 1, 0.5, 0.5, 0.25, 0.25])
    assert hash(plan) == hash(replace(plan, lr_drops=(2, 4)))


def test_padding_is_not_negative():
    with pytest.raises(UserError, match=r"plan.crop_padding is expected .* of at least 0, but got -1"):
        LocalPlan(crop_padding=-1)
    with pytest.raises(UserError, match=r"plan.lr_drops is expected to be a whole number of at least 1, but got 0"):
        LocalPlan(lr_drops=[0])
    with pytest.raises(UserError, match=r"plan.lr_drop_factor is expected in \(0, 1\], but got 0"):
        LocalPlan(lr_drop_factor=0)
    with pytest.raises(UserError, match=r"plan.lr_drops is expected to be a list"):
        LocalPlan(lr_drops=3)  # type: ignore[arg-type]
