"""Originals are found in guesses turned, cut or in pieces; a public image that is near is no guess at an update."""

import pytest
import torch
from torch.nn import functional

from fl_privacy.data import load_data
from fl_privacy.measure import evaluate_all
from fl_privacy.measure.distractors import Distractors
from fl_privacy.measure.identification import PublicImages, aligned, control, identify
from fl_privacy.measure.outcome import LEAD, Outcome
from fl_privacy.measure.turning import Gallery, Turning
from fl_privacy.types import Batch, Reconstruction, VictimId


@pytest.fixture(scope="module")
def digits():
    """Three originals and 150 candidates of 28 x 28, and others of the same classes."""
    train = load_data("mnist_mini").train
    return train.batch(torch.arange(800, 3200, 800)), train.batch(torch.arange(5, 4000, 26)[:150])


@pytest.fixture(scope="module")
def public(digits):
    return PublicImages(images=digits[1].inputs, labels=digits[1].labels)


def judged(guesses, truths, candidates):
    """Judge each guess at one image."""
    made = [
        Reconstruction(id=VictimId(0, 0, k), batch=Batch(guess[None], torch.zeros(1).long()))
        for k, guess in enumerate(guesses)
    ]
    scores = evaluate_all(
        made, [Batch(truth[None], torch.zeros(1).long()) for truth in truths], others=Distractors(candidates=candidates)
    )
    return [i.outcome for score in scores for i in score.images]


def rotated(images, degrees):
    angle = torch.tensor(degrees).deg2rad()
    rows = [[angle.cos(), -angle.sin(), 0], [angle.sin(), angle.cos(), 0]]
    grid = functional.affine_grid(torch.tensor(rows).expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


def cut(images, top, left, side):
    part = images[..., top : top + side, left : left + side]
    return functional.interpolate(part, size=images.shape[-2:], mode="bilinear", antialias=True)


def exchanged(images, number):
    side = images.shape[-1] // number
    found = images.clone()
    order = [divmod(k, number) for k in range(number**2)]
    for (down, right), (top, left) in zip(order, order[1:] + order[:1], strict=True):
        found[..., down * side : (down + 1) * side, right * side : (right + 1) * side] = images[
            ..., top * side : (top + 1) * side, left * side : (left + 1) * side
        ]
    return found


CHANGES = {
    "upside down": lambda x: x.flip(-2),
    "turned by 90": lambda x: x.rot90(1, (-2, -1)),
    "turned by 180, negative": lambda x: 1 - x.rot90(2, (-2, -1)),
    "turned by 270, mirrored": lambda x: x.rot90(3, (-2, -1)).flip(-1),
    "turned by 90, noise": lambda x: (
        x.mT + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    ).clamp(0, 1),
    "rotated by 12": lambda x: rotated(x, 12.0),
    "rotated by -7": lambda x: rotated(x, -7.0),
    "cut": lambda x: cut(x, 3, 1, 22),
    "mosaic of 3": lambda x: functional.interpolate(functional.avg_pool2d(x, 3, ceil_mode=True), scale_factor=3)[
        ..., :28, :28
    ],
    "mosaic of 4": lambda x: functional.interpolate(functional.avg_pool2d(x, 4), scale_factor=4),
    "tiles 2 x 2": lambda x: exchanged(x, 2),
    "tiles 3 x 3": lambda x: exchanged(x, 3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_original_is_identified_whatever_hides_nothing(digits, public, change):
    assert judged(CHANGES[change](digits[0].inputs), digits[0].inputs, public) == [Outcome.IDENTIFIED] * 3


def test_channels_that_are_exchanged_and_turned_hide_nothing():
    images = torch.rand(120, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    found = judged(images[:2].flip(1).rot90(1, (-2, -1)), images[:2], PublicImages(images=images[2:]))
    assert found == [Outcome.IDENTIFIED] * 2


@pytest.mark.parametrize("change", ["turned by 90", "cut", "tiles 2 x 2", "rotated by -7"])
def test_another_of_its_class_is_no_more_the_original_for_being_changed(digits, public, change):
    train = load_data("mnist_mini").train
    others = train.batch(torch.arange(1000, 3400, 800)).inputs
    assert judged(CHANGES[change](others), digits[0].inputs, public) == [Outcome.NOTHING] * 3


@pytest.mark.parametrize("change", ["turned by 90", "cut", "tiles 3 x 3"])
def test_a_candidate_gets_the_tries_of_an_original(digits, public, change):
    which = 17
    guess = CHANGES[change](public.images[which : which + 1])
    turning = Turning(
        guess=guess,
        others=public.gallery,
        rivals=torch.arange(150),
        usual=torch.arange(0, 150, 3),
    )
    ways = list(turning.ways(Gallery(public.images[which : which + 1])))
    ways += [near for way in ways if (near := way.closer()) is not None]
    assert len(ways) >= 2
    for way in ways:
        assert way.own.item() == pytest.approx(way.rest[way.rivals == which].item(), abs=1e-5)
    assert identify(guess, digits[0].inputs[:1], public).lead.item() < 0


def test_nothing_is_turned_that_is_too_small():
    images = torch.rand(130, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    assert identify(images[:1].flip(-2), images[:1], PublicImages(images=images[1:])).lead is not None


def test_upright_or_not_pixels_are_compared_in_place(digits):
    original = digits[0].inputs[1]
    assert aligned(1 - original.rot90(1, (-2, -1)), original)[0] > 40
    assert judged([original.flip(-2)], [original], None) == [Outcome.RECOGNIZABLE]


@pytest.fixture(scope="module")
def scenes():
    """Frames of three scenes, a pixel apart, noisy each in its own way, and 120 other pictures: four (3, 1, 32, 32)."""
    rng = torch.Generator().manual_seed(0)
    rough = torch.rand(123, 1, 10, 10, generator=rng)
    wide = functional.interpolate(rough, size=(40, 40), mode="bicubic").clamp(0, 1)
    frames = [
        wide[:3, :, 4 + down : 36 + down, 4 + right : 36 + right] for down, right in ((0, 0), (0, 1), (1, 0), (-1, 1))
    ]
    noisy = [(frame + 0.02 * torch.randn(frame.shape, generator=rng)).clamp(0, 1) for frame in frames]
    return noisy, wide[3:, :, 4:36, 4:36]


@pytest.mark.long
def test_a_frame_of_the_same_scene_that_saw_no_update_is_nothing(scenes):
    (truth, frame, near, other), rest = scenes
    for there in ([frame], [near, other]):
        assert judged(frame, truth, PublicImages(images=torch.cat([rest, *there]))) == [Outcome.NOTHING] * 3
    pool = PublicImages(images=rest, more=(255 * torch.cat([rest, near])).round().byte())
    assert judged(frame, truth, pool) == [Outcome.NOTHING] * 3
    few = PublicImages(images=torch.cat([rest[:20], near]))
    assert judged(frame, truth, few) == [Outcome.NOTHING] * 3


def test_an_original_is_identified_beside_frames_of_its_scene_if_the_guess_is_closer(scenes):
    (truth, _, near, _), rest = scenes
    guess = truth + 0.004 * torch.randn(truth.shape, generator=torch.Generator().manual_seed(1))
    assert judged(guess.clamp(0, 1), truth, PublicImages(images=torch.cat([rest, near]))) == [Outcome.IDENTIFIED] * 3


def test_the_nearest_public_image_is_a_control_and_not_the_original_itself(scenes):
    (truth, _, near, _), rest = scenes
    there = PublicImages(images=torch.cat([rest, near, truth]))
    nearest, alike = there.nearest(truth[2])
    assert torch.equal(nearest, near[2]) and any(torch.equal(each, near[2]) for each in alike)
    assert control(truth[2], None, there)[0] > control(truth[2], None, PublicImages(images=rest))[0] + LEAD
