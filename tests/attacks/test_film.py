"""Films show how a guess came about, of whom it was asked, and change no bit of it."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from fl_privacy.attacks import ggl, gifd, reconstruct
from fl_privacy.types import Observation
from fl_privacy.types.film import FRAMES, LARGEST, Frame, frame, joined, shortened, viewed_by
from tests.attacks.gradient_inversion.test_generated import made, net, victims
from tests.generator.makers import generator_file

ATTACKS = {
    "inverting_gradients": {"iterations": 60, "restarts": 2},
    "adam_dlg": {"iterations": 40},
    "auto": {"evaluations": 100},
}


@pytest.fixture(scope="module")
def observations():
    torch.manual_seed(0)
    net = torch.nn.Sequential(  # no equations of layers give an image through these
        torch.nn.Conv2d(1, 6, 3), torch.nn.GELU(), torch.nn.Flatten(), torch.nn.Linear(6 * 36, 10)
    )
    found = []
    for number in range(3):
        loss = cross_entropy(net(torch.rand(1, 1, 8, 8)), torch.tensor([number]))
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        found.append(Observation.of_gradients(net, gradients, input_shape=(1, 8, 8), number=number))
    return found


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_filmed_attack_ends_in_the_same_bits(observations, attack):
    plain = reconstruct(observations, attack, **ATTACKS[attack])
    filmed = reconstruct([replace(o, filmed=k < 2) for k, o in enumerate(observations)], attack, **ATTACKS[attack])
    for one, other in zip(plain, filmed, strict=True):
        assert torch.equal(one.batch.inputs, other.batch.inputs) and torch.equal(one.batch.labels, other.batch.labels)
        assert (one.loss, one.history, one.member) == (other.loss, other.history, other.member)
        assert not one.film
    assert [bool(one.film) for one in filmed] == [True, True, False]
    for one in filmed[:2]:
        places = [each.at for each in one.film]
        assert places == sorted(set(places)) and places[0] == 0 and places[-1] < len(one.history)
        assert 3 <= len(places) <= FRAMES
        result = (one.batch.inputs[0].clamp(0, 1) * 255).round()
        apart = [(each.image - result).abs().mean().item() for each in one.film]
        assert apart[-1] < 1 and apart[0] > 3, "from noise to what was found"


def test_who_looks_on_sees_what_is_filmed_as_it_comes_about(observations):
    seen = []
    with viewed_by(seen.append):
        reconstruct(observations, "adam_dlg", iterations=20)
        assert not seen, "of nobody who is not filmed"
        found = reconstruct([replace(o, filmed=k < 2) for k, o in enumerate(observations)], "adam_dlg", iterations=20)
    assert len(seen) > 5 and {len(frames) for frames in seen} == {2}
    for k, one in enumerate(found[:2]):
        assert all(torch.equal(a[k].image, b.image) for a, b in zip(seen[:3], one.film[:3], strict=True))
    reconstruct([replace(observations[0], filmed=True)], "adam_dlg", iterations=5)
    assert len(seen) < 30, "of nothing after that"


@pytest.mark.parametrize("kind", ["latents", "features stage by stage", "evolution"])
def test_what_comes_out_of_a_generator_is_filmed_as_images(kind):
    settings = {"generator": generator_file(), "iterations": 12, "dtype": "float64"}
    if kind == "evolution":
        pytest.importorskip("cma", reason="the extra cma is not installed")
        settings |= {"optimizer": "cma", "population": 6}
    attack = gifd(**settings) if kind.startswith("features") else ggl(**settings)
    asked = [replace(one, filmed=True) for one in victims(made(2), net())]
    for one, plain in zip(attack(asked, seed=0), attack(victims(made(2), net()), seed=0), strict=True):
        places = [each.at for each in one.film]
        assert one.history == plain.history and torch.equal(one.batch.inputs, plain.batch.inputs)
        assert places == sorted(set(places)) and places[-1] < len(one.history) and len(places) > 3
        assert {each.image.shape for each in one.film} == {(3, 8, 8)}


def test_large_images_are_small_in_a_film_and_others_as_they_are():
    images = torch.rand(2, 3, 100, 200)
    assert frame(0, images).image.shape == (3, 32, LARGEST)
    assert torch.equal(frame(0, images[..., :60, :60]).image, (images[0, :, :60, :60] * 255).round().byte())


def test_films_are_put_together_and_cut():
    def film(places):
        return tuple(Frame(at, torch.full((1, 1, 1), at)) for at in places)

    both = joined(film(range(30)), 30, film(range(40)))
    assert [each.at for each in both] == list(range(70))
    places = [each.at for each in shortened(both)]
    assert len(places) == FRAMES and places[0] == 0 and places[-1] == 69 and places == sorted(places)
    assert places[1] - places[0] < places[-1] - places[-2], "close together first"
    again = shortened((*film([0, 1, 5, 5]),))
    assert [each.at for each in again] == [0, 1, 5]
