"""What InstaHide's mixtures of the same image have in common, beside the same made of another image's mixtures."""

from dataclasses import replace

import pytest
import torch

from fl_privacy.attacks import AutoAttack, inverting_gradients
from fl_privacy.attacks.gradient_inversion.grouping import as_mixture, unmixed
from fl_privacy.effects import Mixed, OtherImages, Part, Transformed, from_plain, mixing, to_plain
from fl_privacy.measure.identification import PublicImages, identify
from fl_privacy.measure.images import psnr
from fl_privacy.measure.outcome import LEAD
from fl_privacy.types import Batch, Certainty
from tests.attacks.likelihood.test_reading import uploads

QUICK = AutoAttack(evaluations=80)


@pytest.mark.fuzz
@pytest.mark.parametrize("k", [2, 4])
def test_ten_mixtures_show_the_image_that_one_hides(k):
    seen, truth = uploads("defense=instahide", f"defense.k={k}", victims=4, rounds=10)
    found = QUICK(seen, seed=0)
    together, each = found[-4:], QUICK([o.given(defense=()) for o in seen[-4:]], seed=0)
    guesses = torch.cat([one.batch.inputs for one in together])
    own, control = psnr(guesses, truth), psnr(guesses.roll(1, 0), truth)
    assert own.mean() > 16 and control.mean() < 11.5
    assert psnr(torch.cat([one.batch.inputs for one in each]), truth).max() < 8
    public = seen[0].knowledge
    others = PublicImages(images=public.public_images, labels=public.public_labels)
    leads = [identify(*pair, others).lead.item() for pair in zip(guesses.split(1), truth.split(1), strict=True)]
    assert sum(lead > LEAD for lead in leads) >= 3
    assert {one.member for one in together} == {"unmixed"}
    assert {one.certainty for one in together} == {Certainty.APPROXIMATE}
    assert "10 mixtures with the same image" in together[0].countermeasures[-1]


@pytest.mark.long
def test_who_knows_no_public_images_or_not_the_defense_keeps_mixtures():
    seen, _ = uploads("defense=instahide", "defense.k=2", victims=1)
    short = replace(inverting_gradients(), iterations=2)
    plain = seen[0].given(defense=None)
    alone = seen[0].given(public_images=None, public_labels=None)
    for observation in (plain, alone):
        (found,) = short([observation], seed=0)
        assert found.member != "unmixed"
    (found,) = short([seen[0]], seed=0)
    assert found.member == "unmixed" and "undoes the signs of a mixture" in found.countermeasures[-1]


@pytest.mark.long
def test_signs_alone_are_undone():
    """With one image in a mixture nothing is hidden but signs: a pixel is nearer to its class or its negative is."""
    seen, truth = uploads("defense=instahide", "defense.k=1", victims=4)
    (found, *_) = results = QUICK(seen, seed=0)
    guesses = torch.cat([one.batch.inputs for one in results])
    assert psnr(guesses, truth).mean() > 14 and found.member == "unmixed"


def test_failed_uploads_and_batches_are_left_out():
    seen, _ = uploads("defense=instahide", "defense.k=2", victims=1, rounds=2)
    (first, last) = [QUICK([as_mixture(o)], seed=0)[0] for o in seen]
    broken = replace(first, batch=None, failure="No guess.")
    kept, made = unmixed(seen, [broken, last])
    assert kept is broken and "a mixture" in made.countermeasures[-1]
    two = replace(seen[1], upload=replace(seen[1].upload, num_examples=2))
    assert unmixed([two], [last]) == [last]


def test_labels_of_one_class_tell_no_shares():
    seen, truth = uploads("defense=instahide", "defense.k=2", victims=1)
    (mixture,) = QUICK([as_mixture(seen[0])], seed=0)
    hard = replace(mixture, batch=Batch(mixture.batch.inputs, mixture.batch.labels.reshape(1, -1).argmax(1)))
    (found,) = unmixed(seen, [hard])
    assert found.batch.inputs.shape == truth.shape and bool(found.batch.inputs.isfinite().all())


def test_only_a_single_mixing_of_images_is_undone():
    mixed, other = Part("a", effect=Mixed(images=4, labeled=2)), Part("b", effect=OtherImages())
    assert mixing((mixed,)) == mixed.effect == mixing(from_plain(to_plain((mixed,))))
    assert mixing((mixed, mixed)) is None
    assert mixing((mixed, other)) is None
    assert mixing((mixed, Part("c", effect=Transformed(policies=None)))) is None
    assert mixing((other,)) is mixing(None) is None
