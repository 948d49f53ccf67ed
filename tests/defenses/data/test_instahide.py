import math

import pytest
import torch
from PIL import Image

from fl_privacy.defenses import ClientState, LocalData, instahide
from fl_privacy.defenses._instahide import coefficients, distinct, read_pictures
from fl_privacy.errors import UserError
from fl_privacy.federation import Replay
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, LocalPlan, VictimId

from ..clients import defended_client, local_data, own_batch, sent


def mixed(defense, batch, seed=0):
    data = local_data()
    (examples_hook,), (data_hook,) = defense.examples, defense.data
    assert examples_hook(own_batch(), data) is not None
    return data_hook(batch, data.state, derive_generator(seed))


def prepare(input_shape, *, k, public):
    (hook,) = instahide(k=k, public=str(public)).prepare
    hook(input_shape)


def test_coefficients_are_shares_below_the_bound():
    shares = coefficients(2000, 4, 0.65, derive_generator(0))
    assert torch.allclose(shares.sum(1), torch.ones(2000))
    assert shares.min() >= 0
    assert 0.6 < shares.max() <= 0.65
    assert torch.allclose(shares.mean(0), torch.full((4,), 0.25), atol=0.02)


def test_coefficients_are_those_of_the_published_code():
    """|z| / sum |z|: of two, the first is below t where |z1| < s |z2| with s = t / (1 - t): chance 2/pi atan(s)."""
    first = coefficients(20_000, 2, 1.0, derive_generator(1))[:, 0]
    for bound in (0.05, 0.2, 0.5, 0.9):
        expected = 2 / math.pi * math.atan(bound / (1 - bound))
        assert float((first < bound).double().mean()) == pytest.approx(expected, abs=0.015)


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
    assert found.inputs.min() >= 0
    assert found.inputs.max() <= 1


def ladder(number):
    """Make examples i with the value i / 255 everywhere and the label i."""
    values = torch.arange(number) / 255
    return Batch(values.view(-1, 1, 1, 1).expand(-1, 3, 4, 4).contiguous(), torch.arange(number))


@pytest.mark.parametrize("k", [2, 3, 5])
def test_labels_are_mixed_by_the_shares_of_different_images(k):
    """The labels tell the images that were mixed, and how: each pixel is their sum, or its flip."""
    batch, defense = ladder(5), instahide(k=k)
    data = LocalData(num_classes=5, state=ClientState(), rng=derive_generator(0))
    (examples_hook,), (data_hook,) = defense.examples, defense.data
    examples_hook(batch, data)
    for step in range(20):
        found = data_hook(batch, data.state, derive_generator(step))
        assert torch.allclose(found.labels.sum(1), torch.ones(5))
        assert found.labels.max() <= 0.65 + 1e-6
        assert ((found.labels > 0).sum(1) == k).all()
        assert (found.labels.diagonal() > 0).all()
        expected = (found.labels @ batch.inputs.flatten(1)).view_as(found.inputs)
        flipped = (found.inputs - expected).abs() > 1e-5
        assert torch.allclose(torch.where(flipped, 1 - found.inputs, found.inputs), expected, atol=1e-5)
        assert 0.3 < flipped.double().mean() < 0.7


def test_partners_are_uniform_among_the_others():
    taken = torch.arange(6).repeat(5000).unsqueeze(1)
    found = distinct(taken, 2, 6, derive_generator(0))
    rows = torch.cat([taken, found], 1)
    assert (rows.sort(1).values.diff() > 0).all()
    of_zero = torch.bincount(found[taken[:, 0] == 0].flatten(), minlength=6) / 5000
    assert of_zero[0] == 0
    assert torch.allclose(of_zero[1:], torch.full((5,), 0.4), atol=0.03)


def test_a_client_with_too_few_examples_is_told():
    with pytest.raises(UserError, match="at least 4 examples"):
        instahide(k=4).examples[0](ladder(3), local_data())


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
    prepare((3, 16, 16), k=5, public=tmp_path)
    with pytest.raises(UserError, match="at least 4 pictures"):
        prepare((3, 16, 16), k=6, public=tmp_path)
    with pytest.raises(UserError, match="folder of pictures"):
        prepare((3, 16, 16), k=4, public=tmp_path / "nowhere")


def test_the_mixture_is_new_in_every_round_and_the_same_on_every_run():
    client, state = defended_client(instahide(k=4)), ClientState()
    one, two = (client.update(sent(), state, round=r).upload.tensors for r in (1, 2))
    again = defended_client(instahide(k=4)).update(sent(), ClientState(), round=2).upload.tensors
    assert any(not torch.equal(one[name], two[name]) for name in one)
    assert all(torch.equal(two[name], again[name]) for name in two)


def test_what_was_seen_is_repeated():
    client, state = defended_client(instahide(k=2), plan=LocalPlan()), ClientState()
    upload = {"victim": VictimId(3, client.id, 1), "sent": sent(), "batch_size": 4}
    seen = Replay(client=client, state=state, **upload).transformed
    again = Replay(client=defended_client(instahide(k=2)), state=ClientState(), **upload).transformed
    assert torch.equal(seen.inputs, again.inputs)
    assert not torch.equal(seen.inputs, client.victim_batch(1, 4).inputs)


@pytest.mark.parametrize(
    "settings", [{"k": 0}, {"largest": 0.2}, {"k": 2, "largest": 1.5}, {"k": 4, "largest": 0.2501}]
)
def test_wrong_settings_are_one_line(settings):
    with pytest.raises(UserError):
        instahide(**settings)


def test_public_pictures_of_16_bits_are_not_cut_off_at_8(tmp_path):
    ramp = (torch.arange(16).view(4, 4) * 4369).numpy().astype("uint16")
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    with pytest.warns(UserWarning, match="65535 for white"):
        (found,) = read_pictures(str(tmp_path), (1, 4, 4))
    assert torch.equal(found[0], (torch.arange(16).view(4, 4) * 17).to(found.dtype))
