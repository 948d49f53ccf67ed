"""Images that stand for a client's own: made once, of the client's classes, and better than the ones they start as."""

import time

import pytest
import torch
import torch.nn.functional as F

from fl_privacy.defenses import ClientState, LocalData, dc, dm, dsa
from fl_privacy.defenses.dc_dsa_dm import (
    Classes,
    CondensationNet,
    class_gradients,
    exchanging,
    fresh_network,
    gradient_distance,
    mean_features,
    siamese,
    siamese_by_class,
)
from fl_privacy.effects import Part
from fl_privacy.errors import UserError
from fl_privacy.files import sharing
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, LocalPlan

from ..clients import defended_client, local_data, own_batch, sent

SMALL = {"images_per_class": 3, "width": 4, "real_batch": 8}
METHODS = {
    "dm": dm(**SMALL, iterations=3),
    "dc": dc(**SMALL, networks=1, outer_steps=2, inner_steps=1),
    "dsa": dsa(**SMALL, networks=1, outer_steps=2, inner_steps=1),
}

every_method = pytest.mark.parametrize("defense", METHODS.values(), ids=METHODS.keys())


@every_method
def test_as_many_images_of_each_class_as_asked_for(defense):
    (hook,) = defense.examples
    made = hook(own_batch(), local_data())
    assert made.inputs.shape == (15, 3, 16, 16)
    assert made.labels.tolist() == [c for c in range(5) for _ in range(3)]
    assert made.inputs.min() >= 0 <= made.inputs.max() <= 1


@every_method
def test_made_once_and_the_same_from_the_same_seed(defense):
    client, state = defended_client(defense), ClientState()
    first = client.update(sent(), state, round=1)
    kept = state.tensors[f"{defense.name}/images"]
    second = client.update(sent(), state, round=2)
    assert state.tensors[f"{defense.name}/images"] is kept
    assert second.seconds < first.seconds
    assert first.defense_seconds > second.defense_seconds
    other = ClientState()
    defended_client(defense).update(sent(), other, round=2)
    assert torch.equal(other.tensors[f"{defense.name}/images"], kept)
    stranger = ClientState()
    defended_client(defense, seed=1).update(sent(), stranger, round=1)
    assert not torch.equal(stranger.tensors[f"{defense.name}/images"], kept)


@every_method
def test_the_originals_are_in_no_gradient(defense):
    """The upload is the gradient of the condensed images, whatever becomes of the originals afterwards."""
    client, state = defended_client(defense), ClientState()
    client.update(sent(), state, round=1)
    images = state.tensors[f"{defense.name}/images"].clone()
    state.tensors[f"{defense.name}/images"] = torch.zeros_like(images)
    black = client.update(sent(), state, round=2).upload.tensors
    model = client.model
    logits = model(torch.zeros(15, 3, 16, 16))
    loss = F.cross_entropy(logits, state.tensors[f"{defense.name}/labels"])
    for name, expected in zip(black, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        assert torch.allclose(black[name], expected, atol=1e-6)


@every_method
def test_a_client_without_some_classes(defense):
    some = own_batch()
    rows = some.labels < 2
    (hook,) = defense.examples
    made = hook(type(some)(some.inputs[rows], some.labels[rows]), local_data())
    assert made.labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_probes_are_of_the_condensed_images():
    client, state = defended_client(METHODS["dm"]), ClientState()
    victim = client.victim_batch(2, 1, state)
    made = state.tensors["dm/images"].float() / 255
    assert (made == victim.inputs).flatten(1).all(1).any()
    assert not (own_batch().inputs == victim.inputs).flatten(1).all(1).any()
    with pytest.raises(UserError, match="has 15"):
        client.victim_batch(15, 1, state)


def test_examples_are_drawn_by_class_uniformly():
    classes = Classes.of(own_batch())
    drawn = classes.draw(400, derive_generator(0))
    assert drawn.shape == (5, 400, 3, 16, 16)
    for label, images in zip(classes.present, drawn, strict=True):
        own = classes.images[own_batch().labels == label]
        same = (images[:, None] == own[None]).flatten(2).all(2)
        assert (same.sum(1) == 1).all()
        assert same.sum(0).min() > 10


def network():
    return fresh_network(CondensationNet, torch.zeros(1, 3, 16, 16), 5, derive_generator(0), width=4)


def test_gradients_by_class_equal_a_loop():
    net, classes = network(), Classes.of(own_batch())
    images = classes.draw(6, derive_generator(1))
    found = class_gradients(net, images, classes.present)
    for number, label in enumerate(classes.present):
        loss = F.cross_entropy(net(images[number]), label.repeat(6))
        expected = torch.autograd.grad(loss, list(net.parameters()))
        for (name, _), value in zip(net.named_parameters(), expected, strict=True):
            assert torch.allclose(found[name][number], value, atol=1e-5)


def test_distance_equals_a_loop_over_output_units():
    rng = derive_generator(0)
    one, two = ({"w": torch.randn(2, 4, 3, 5, generator=rng), "b": torch.randn(2, 4, generator=rng)} for _ in range(2))
    expected = sum(
        1 - F.cosine_similarity(one["w"][c, o].flatten(), two["w"][c, o].flatten(), dim=0)
        for c in range(2)
        for o in range(4)
    )
    assert torch.allclose(gradient_distance(one, two), expected)


def test_instance_norm_is_that_of_pytorch():
    net = CondensationNet(in_channels=3, image_size=16, num_classes=2, width=4)
    images = torch.randn(5, 4, 8, 8)
    assert torch.allclose(net.features[1](images), F.instance_norm(images), atol=1e-5)


def test_distribution_matching_brings_the_features_closer():
    (hook,) = dm(images_per_class=3, iterations=60, width=8, real_batch=12, augment=False).examples
    (start_hook,) = dm(images_per_class=3, iterations=0).examples
    start, made = start_hook(own_batch(), local_data()), hook(own_batch(), local_data())
    classes = Classes.of(own_batch())
    gaps = {"start": 0.0, "made": 0.0}
    for seed in range(10):
        net = fresh_network(CondensationNet, start.inputs, 5, derive_generator(seed, "judge"), width=8)
        wanted = mean_features(net, classes.images[classes.order].reshape(5, 12, 3, 16, 16))
        for name, batch in (("start", start), ("made", made)):
            found = mean_features(net, ((batch.inputs - 0.5) / 0.25).reshape(5, 3, 3, 16, 16))
            gaps[name] += float((found - wanted).detach().square().sum())
    assert gaps["made"] < 0.7 * gaps["start"]


@pytest.mark.long
def test_gradient_matching_brings_the_gradients_closer():
    settings = {"images_per_class": 2, "width": 8, "real_batch": 12, "outer_steps": 1, "inner_steps": 1, "lr": 0.1}
    (start_hook,), (hook,) = dc(**settings, networks=0).examples, dc(**settings, networks=40).examples
    start, made = start_hook(own_batch(), local_data()), hook(own_batch(), local_data())
    classes = Classes.of(own_batch())
    gaps = {"start": 0.0, "made": 0.0}
    for seed in range(5):
        net = fresh_network(CondensationNet, start.inputs, 5, derive_generator(seed, "judge"), width=8)
        everything = classes.images[classes.order].reshape(5, 12, 3, 16, 16)
        wanted = class_gradients(net, everything, classes.present)
        for name, batch in (("start", start), ("made", made)):
            images = ((batch.inputs - 0.5) / 0.25).reshape(5, 2, 3, 16, 16)
            gaps[name] += float(gradient_distance(class_gradients(net, images, classes.present), wanted).detach())
    assert gaps["made"] < 0.95 * gaps["start"]


def test_siamese_augmentation_does_the_same_to_both_and_has_a_slope():
    images = torch.rand(2, 3, 3, 16, 16, requires_grad=True)
    outcomes = set()
    for seed in range(30):
        change = siamese(derive_generator(seed))
        changed = change(images)
        assert changed.shape == images.shape
        assert torch.equal(change(images[1]), changed[1])
        (slope,) = torch.autograd.grad(changed.sum(), images)
        assert slope.isfinite().all()
        outcomes.add(round(float(changed.detach().sum()), 3))
    assert len(outcomes) > 15


def test_local_training_visits_the_condensed_images_only():
    client = defended_client(METHODS["dm"], plan=LocalPlan(shares="delta", epochs=1, batch_size=4))
    assert client.update(sent(), ClientState(), round=1).upload.num_examples == 15


@pytest.mark.parametrize("settings", [{"images_per_class": 0}, {"lr": 0}, {"width": 0}])
def test_wrong_settings_are_one_line(settings):
    for make in (dm, dc, dsa):
        with pytest.raises(UserError):
            make(**settings)


def test_they_start_as_published_noise_for_dc_and_own_images_for_dsa_and_dm():
    assert [METHODS[name].parts[0].settings["start"] for name in ("dc", "dsa", "dm")] == ["noise", "real", "real"]


@pytest.mark.parametrize("make", [dc, dsa, dm])
def test_own_images_show_through_few_updates_and_noise_shows_none(make):
    few = {"iterations": 3} if make is dm else {"networks": 1, "outer_steps": 2, "inner_steps": 1}
    own = own_batch()
    nearest = {}
    for start in ("noise", "real"):
        (hook,) = make(**SMALL, **few, start=start).examples
        made = hook(own, local_data())
        squares = (made.inputs[:, None] - own.inputs).square().flatten(2).mean(2)
        nearest[start] = squares.masked_fill(made.labels[:, None] != own.labels, torch.inf).amin(1)
    noise = torch.randn(20, 3, 16, 16, generator=derive_generator(1)) * 0.25 + 0.5
    strangers = (noise.clamp(0, 1)[:, None] - own.inputs).square().flatten(2).mean(2).amin(1)
    assert nearest["real"].max() < 0.2 * nearest["noise"].min()
    assert nearest["noise"].mean() > 0.7 * strangers.mean()


def test_each_class_is_augmented_by_a_draw_of_its_own():
    images = torch.rand(1, 2, 3, 16, 16).expand(6, -1, -1, -1, -1)
    changed = siamese_by_class(6, derive_generator(0))(images)
    assert changed.shape == images.shape
    assert len({round(float(of_class.sum()), 3) for of_class in changed}) > 3


@pytest.mark.parametrize("make", [dc, dsa, dm])
def test_an_unknown_start_is_one_line(make):
    with pytest.raises(UserError, match=r"start.*noise, real"):
        make(start="zeros")


def test_jobs_of_a_command_make_equal_substitutes_once():
    made = []

    def make(batch, data):
        made.append(batch)
        time.sleep(0.02)
        return Classes.of(batch).finished(torch.randn(5, 1, 3, 16, 16, generator=data.rng))

    def trained(seed=0, settings=0):
        state = ClientState()
        defense = exchanging(Part("copied", {"settings": settings}), make, images_per_class=1)
        return defended_client(defense, seed=seed).update(sent(), state, round=1), state.tensors["copied/images"]

    with sharing():
        (first, images), (second, same) = trained(), trained()
        assert len(made) == 1 and torch.equal(images, same)
        assert min(first.defense_seconds, second.defense_seconds) >= 0.02, "what the defense costs a client"
        trained(seed=1)
        assert not torch.equal(trained(seed=1)[1], images) and len(made) == 2
        trained(settings=1)
        assert len(made) == 3
    assert torch.equal(trained()[1], images) and len(made) == 4


def test_what_is_drawn_after_shared_substitutes_is_as_without_sharing():
    def make(batch, data):
        return Classes.of(batch).finished(torch.randn(5, 1, 3, 16, 16, generator=data.rng))

    (hook,) = exchanging(Part("copied", {}), make, images_per_class=1).examples
    batch = Batch(torch.rand(5, 3, 16, 16), torch.arange(5))

    def next_draw():
        data = LocalData(num_classes=5, state=ClientState(), rng=torch.Generator().manual_seed(0))
        hook(batch, data)
        return float(torch.rand((), generator=data.rng))

    with sharing():
        assert next_draw() == next_draw()
        shared = next_draw()
    assert shared == next_draw()
