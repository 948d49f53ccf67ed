import pytest
import torch
from PIL import Image

from fl_privacy.defenses import ClientState, instahide
from fl_privacy.defenses.instahide import coefficients
from fl_privacy.errors import UserError
from fl_privacy.rng import derive_generator
from fl_privacy.types import LocalPlan

from .clients import client, local_data, own_batch, sent


def mixed(defense, batch, seed=0):
    data = local_data()
    (examples_hook,), (data_hook,) = defense.examples, defense.data
    assert examples_hook(own_batch(), data) is not None
    return data_hook(batch, data.state, derive_generator(seed))


def test_coefficients_are_shares_below_the_bound():
    shares = coefficients(2000, 4, 0.65, derive_generator(0))
    assert torch.allclose(shares.sum(1), torch.ones(2000))
    assert shares.min() > 0
    assert 0.5 < shares.max() <= 0.65
    assert torch.allclose(shares.mean(0), torch.full((4,), 0.25), atol=0.02)


def test_alone_an_image_keeps_its_distance_from_the_middle():
    batch = own_batch()
    found = mixed(instahide(k=1), batch)
    assert torch.allclose((found.inputs - 0.5).abs(), (batch.inputs - 0.5).abs(), atol=1e-6)
    flipped = torch.isclose(found.inputs, 1 - batch.inputs, atol=1e-6).double().mean()
    assert 0.48 < flipped < 0.56
    assert torch.equal(found.labels.argmax(1), batch.labels)


@pytest.mark.parametrize("k", [2, 4])
def test_a_mixture_is_one_of_own_images_up_to_signs(k):
    """Least squares on the unsigned mixture, which the two choices of each sign leave unknown, is out of reach; the
    labels tell the shares of the classes."""
    batch = own_batch()
    found = mixed(instahide(k=k), batch)
    assert found.labels.shape == (60, 5)
    assert torch.allclose(found.labels.sum(1), torch.ones(60))
    own = found.labels[torch.arange(60), batch.labels]
    assert own.min() > 0
    assert found.labels.max() < 1 or k == 2
    assert found.inputs.min() >= 0
    assert found.inputs.max() <= 1


def test_images_of_one_value_mix_to_that_value_or_its_flip():
    data = local_data()
    defense, batch = instahide(k=3), own_batch()
    plain = type(batch)(torch.full_like(batch.inputs, 51 / 255), batch.labels)
    (examples_hook,), (data_hook,) = defense.examples, defense.data
    examples_hook(plain, data)
    found = data_hook(plain, data.state, derive_generator(0)).inputs
    assert torch.allclose((found - 0.5).abs(), torch.full_like(found, 0.3), atol=1e-6)


def test_public_pictures_bring_no_label(tmp_path):
    for number in range(3):
        Image.new("L", (9, 7), 255).save(tmp_path / f"{number}.png")
    batch = own_batch()
    found = mixed(instahide(k=4, public=str(tmp_path)), batch)
    assert torch.allclose(found.labels.sum(1), torch.ones(60))
    assert ((found.labels > 0).sum(1) <= 2).all()
    with pytest.raises(UserError, match="folder of pictures"):
        mixed(instahide(k=4, public=str(tmp_path / "nowhere")), batch)


def test_the_mixture_is_new_in_every_round_and_the_same_on_every_run():
    participant, state = client(instahide(k=4)), ClientState()
    one, two = (participant.update(sent(), state, round=r).upload.tensors for r in (1, 2))
    again = client(instahide(k=4)).update(sent(), ClientState(), round=2).upload.tensors
    assert any(not torch.equal(one[name], two[name]) for name in one)
    assert all(torch.equal(two[name], again[name]) for name in two)


def test_what_was_seen_is_repeated():
    participant, state = client(instahide(k=2), plan=LocalPlan()), ClientState()
    seen = participant.transformed_victim(sent(), state, round=3, victim=1, batch_size=4)
    again = client(instahide(k=2)).transformed_victim(sent(), ClientState(), round=3, victim=1, batch_size=4)
    assert torch.equal(seen.inputs, again.inputs)
    assert not torch.equal(seen.inputs, participant.victim_batch(1, 4).inputs)


@pytest.mark.parametrize("settings", [{"k": 0}, {"largest": 0.2}, {"k": 2, "largest": 1.5}])
def test_wrong_settings_are_one_line(settings):
    with pytest.raises(UserError):
        instahide(**settings)
