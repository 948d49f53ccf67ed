"""What the likeliest images and blind deconvolution read, beside the same prior with another client's update."""

from dataclasses import replace

import pytest
import torch

from fl_privacy.attacks import AutoAttack, BlindDeconvolution, MaximumAPosteriori
from fl_privacy.attacks.attack import no_progress, timely, within
from fl_privacy.attacks.gradient_inversion.grouping import Groups
from fl_privacy.attacks.gradient_inversion.labels import output_layer
from fl_privacy.attacks.gradient_inversion.preparation import prepare
from fl_privacy.attacks.likelihood.attack import likelihood_of_victims
from fl_privacy.attacks.pixel_prior import learn_prior, prior_of_photographs
from fl_privacy.data import load_data
from fl_privacy.effects import Clipped, Gaussian, Part
from fl_privacy.measure.images import psnr
from fl_privacy.runs.config.compose import compose_run
from fl_privacy.runs.setup import build_untrained

SHORT = MaximumAPosteriori(iterations=60, attempts=1)


def uploads(*overrides, victims=2, rounds=1, public=2000):
    """Return the observations of all rounds by who knows the defense and public images, and the last round's truth."""
    setup = build_untrained(compose_run(["data=mnist_mini", "model=lenet", f"victims={victims}", *overrides]))
    truth = setup.ground_truth()
    images = setup.unattacked.batch(torch.linspace(0, len(setup.unattacked) - 1, public).long()) if public else None
    known = replace(setup.knowledge(truth), public=images, defense=setup.defense.parts or None)
    seen = [
        known.of_adaptive(known.of_plain(o)) for r in range(rounds) for o in setup.observe(setup.server.state, round=r)
    ]
    return seen, torch.cat([truth.batch(o.id).inputs for o in seen[-victims:]])


def errors(attack, seen, truth):
    """Return PSNR of each victim, and of the guess at the other one's update."""
    found = attack(seen, seed=0)[-len(truth) :]
    guesses = torch.cat([each.batch.inputs for each in found])
    return psnr(guesses, truth), psnr(guesses.roll(1, 0), truth), found


@pytest.mark.fuzz
def test_one_bit_is_read_from_one_upload_and_better_from_more():
    once, truth = uploads("defense=quantization", "defense.bits=1")
    own, control, _ = errors(SHORT, once, truth)
    assert own.min() > 15 and control.max() < 12
    more, _ = uploads("defense=quantization", "defense.bits=1", rounds=4)
    together, _, found = errors(SHORT, more, truth)
    assert together.mean() > own.mean() + 1
    assert any("4 updates of the same examples" in sentence for sentence in found[0].countermeasures)


@pytest.mark.long
def test_an_image_is_found_without_the_output_layer():
    """A client may keep its own output layer, from which the class is inferred otherwise."""
    seen, truth = uploads("defense=dp_noise", "defense.clip_norm=1", "defense.scale=1e-3")
    layer = output_layer(seen[0].model, seen[0].num_classes)
    bare = [
        replace(o, upload=replace(o.upload, tensors={n: v for n, v in o.upload.tensors.items() if n not in layer}))
        for o in seen
    ]
    own, control, _ = errors(SHORT, bare, truth)
    assert (own > control + 3).all()


def test_a_victim_does_not_depend_on_others():
    seen, _ = uploads("defense=dp_noise", "defense.clip_norm=1", "defense.scale=0.03")
    short = MaximumAPosteriori(iterations=5, attempts=1)
    both, alone = short(seen, seed=0)[0], short(seen[:1], seed=0)[0]
    assert torch.allclose(both.batch.inputs, alone.batch.inputs, atol=1e-4)


def test_updates_behind_noise_of_different_sizes_are_not_joined():
    seen, truth = uploads("defense=dp_noise", "defense.clip_norm=1", "defense.scale=0.03", victims=1, rounds=3)
    loud = Part("noise", effect=Gaussian(std=3.0, clip=Clipped(norm=1.0)))
    seen = [seen[0].given(defense=(loud,)), *seen[1:]]

    def likelihood(observations):
        (group,) = Groups(observations, progress=no_progress)
        prepared = prepare(SHORT._settings, group, 0)
        return likelihood_of_victims(prepared, prepared.victims)

    together = likelihood(seen)
    assert sorted([one.uploads for one in channels] for _, channels in together.states) == [[1], [2]]
    (rows,), labels = truth[None, None], torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        apart = sum(float((own := likelihood([one]))(rows, labels) - own(1 - rows, labels)) for one in seen)
        assert float(together(rows, labels) - together(1 - rows, labels)) == pytest.approx(apart, rel=1e-2)


@pytest.mark.long
def test_a_private_first_layer_is_read_blindly():
    seen, truth = uploads("defense=split_fed")
    own, control, found = errors(BlindDeconvolution(turns=40, starts=2), seen, truth)
    assert own.mean() > 16 and control.mean() < 12
    assert {each.member for each in found} == {"blind deconvolution"}


def test_a_private_layer_is_solved_once_for_all_who_know_as_much_but_for_the_defense(monkeypatch):
    solved = []
    monkeypatch.setattr(BlindDeconvolution, "_solve", lambda self, group, seed, report: solved.append(group) or {})
    seen, _ = uploads("defense=split_fed", public=60)

    def attack(observations, turns=1, seed=0):
        (group,) = Groups(observations, progress=no_progress, rounds="last")
        BlindDeconvolution(turns=turns).solve(group, seed, lambda share: None)
        return len(solved)

    assert attack(seen) == 1
    assert attack([o.given(defense=None, same_data=None) for o in seen]) == 1
    assert attack([o.given(public_images=o.knowledge.public_images.clone()) for o in seen]) == 2
    assert attack(seen, seed=1) == 3
    assert attack(seen, turns=2, seed=1) == 4
    assert attack([replace(o, upload=replace(o.upload)) for o in seen], seed=1) == 5
    assert attack([seen[0], replace(seen[1], upload=replace(seen[1].upload))], seed=1) == 6
    assert attack(seen[:1], seed=1) == 7


def test_results_that_a_time_limit_cut_are_not_kept(monkeypatch):
    monkeypatch.setattr(BlindDeconvolution, "_solve", lambda *_: dict.fromkeys(timely(range(9))))
    seen, _ = uploads("defense=split_fed", public=60)
    (group,) = Groups(seen, progress=no_progress, rounds="last")
    for _ in range(2):
        with within(0.0) as limit:
            assert len(BlindDeconvolution().solve(group, 0, lambda share: None)) == 1
        assert limit.cut
    assert len(BlindDeconvolution().solve(group, 0, lambda share: None)) == 9


def test_several_images_behind_a_private_layer_are_refused_in_a_line():
    seen, _ = uploads("defense=split_fed", "batch_size=2", victims=1)
    (found,) = BlindDeconvolution()(seen, seed=0)
    assert found.failure == "Updates of one image each are expected, but got larger batches; use attack=auto."


@pytest.mark.long
def test_auto_takes_what_is_likelier():
    seen, truth = uploads("defense=quantization", "defense.bits=1", victims=1)
    (found,) = AutoAttack(evaluations=300)(seen, seed=0)
    assert found.member == "maximum a posteriori"
    assert psnr(found.batch.inputs, truth).item() > 14


def test_a_prior_is_that_of_the_public_images():
    public = load_data("mnist_mini").train.batch(torch.arange(0, 4000, 3))
    prior = learn_prior(public.inputs, public.labels, 10)
    labels = torch.tensor([[3], [7]])
    own = torch.stack([public.inputs[public.labels == int(label)][:1].flatten(1) for label in labels])
    noise = torch.rand(own.shape, generator=torch.Generator().manual_seed(0))
    assert (prior.surprise(own, labels) < prior.surprise(noise, labels)).all()
    middle = prior.images_of(torch.zeros(2, 1, prior.components), labels)
    expected = torch.stack([public.inputs[public.labels == int(label)].flatten(1).mean(0) for label in labels])
    assert torch.allclose(middle[:, 0], expected, atol=1e-4)
    assert learn_prior(public.inputs, public.labels, 10) is prior


def test_a_prior_of_the_same_images_is_learned_once():
    public = load_data("mnist_mini").train.batch(torch.arange(0, 4000, 40))
    prior = learn_prior(public.inputs, None, 10)
    assert learn_prior(public.inputs.clone(), None, 10) is prior
    other = learn_prior(public.inputs.flip(-1), None, 10)
    assert other is not prior and torch.equal(other.means[0].view(28, 28), public.inputs.flip(-1).mean((0, 1)))


def test_a_prior_is_learned_anew_with_other_labels():
    public = load_data("mnist_mini").train.batch(torch.arange(0, 4000, 40))
    without = learn_prior(public.inputs, None, 10)
    assert (len(without.means), len(learn_prior(public.inputs, public.labels, 10).means)) == (1, 10)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_photographs_are_smooth(shape):
    prior = prior_of_photographs(shape)
    drawn = prior.images_of(
        torch.randn(64, 1, prior.components, generator=torch.Generator().manual_seed(0)),
        torch.zeros(64, 1, dtype=torch.long),
    ).view(64, *shape)
    near = (drawn[..., 1:] - drawn[..., :-1]).square().mean()
    assert 0.15 < drawn.std() < 0.35
    assert near < 0.5 * drawn.var()


@pytest.mark.fuzz
def test_images_are_read_through_the_transformations_of_ats():
    seen, truth = uploads("defense=ats", "defense.policies=3-43-15")
    own, control, found = errors(MaximumAPosteriori(iterations=50, attempts=1), seen, truth)
    assert own.min() > 14 and control.max() < 12
    assert {each.member for each in found} == {"maximum a posteriori"}


def test_rounds_of_ats_are_no_single_transformation():
    seen, _ = uploads("defense=ats", "defense.policies=3-43-15", victims=1, rounds=2)
    found = MaximumAPosteriori(iterations=2, attempts=1)(seen, seed=0)[-1]
    assert found.batch is not None and not any("2 updates" in sentence for sentence in found.countermeasures)
