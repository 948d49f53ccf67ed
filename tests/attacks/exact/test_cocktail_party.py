"""Images that a first layer has mixed are told apart where nothing is silent."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fl_privacy.attacks import AutoAttack, CocktailParty
from fl_privacy.attacks.exact.cocktail_party import independent_directions, unlikeliness, unmixed_by_silence
from fl_privacy.attacks.exact.unmixing import Behind, metric_of_changes, misfit, mixture_of, unmixed_by_network
from fl_privacy.errors import UserError
from fl_privacy.measure import evaluate_all
from fl_privacy.models import MLP, LeNet
from fl_privacy.types import Batch, Certainty, Observation, VictimId
from tests.attacks.victims import CLASSES, observe


def mlp(activation="sigmoid", width=64):
    torch.manual_seed(0)
    shape = {"in_channels": 2, "image_size": 24, "num_classes": CLASSES}
    return MLP(**shape, widths=(width, 32), activation=activation, mean=[0.5], std=[0.25])


def patched(count, seed):
    """Images of flat patches with sharp edges, none like another."""
    rng = torch.Generator().manual_seed(seed)
    images = torch.full((count, 2, 24, 24), 0.4)
    for image in images:
        for _ in range(8):
            top, left, height, width = torch.randint(2, 20, (4,), generator=rng).tolist()
            image[:, top : top + height, left : left + width] = torch.rand(2, 1, 1, generator=rng)
    return Batch(images, torch.randint(CLASSES, (count,), generator=rng))


SURE = {"sigmoid": Certainty.CONSISTENT, "tanh": Certainty.CONSISTENT, "relu": Certainty.PROVEN}


def worst(found, truths):
    """PSNR in dB of the worst image."""
    return min(image.values["psnr"] for score in evaluate_all(found, truths) for image in score.images)


def victims(activation, number=2, count=4):
    truths = [patched(count, seed) for seed in range(number)]
    return [observe(mlp(activation), truth, id=VictimId(0, 0, k)) for k, truth in enumerate(truths)], truths


def noisy(seen, share):
    """With noise of so much of the root mean square of the first layer's gradient."""
    rng, weight = torch.Generator().manual_seed(0), next(iter(seen.upload.tensors.values()))
    std = share * weight.square().mean().sqrt()
    tensors = {name: v + std * torch.randn(v.shape, generator=rng) for name, v in seen.upload.tensors.items()}
    return replace(seen, upload=replace(seen.upload, tensors=tensors))


@pytest.mark.parametrize("activation", SURE)
def test_batches_are_read_exactly_in_front_of_any_activation(activation):
    seen, truths = victims(activation)
    components, found = CocktailParty(steps=0)(seen, seed=0), CocktailParty()(seen, seed=0)
    assert {one.certainty for one in components} == {Certainty.APPROXIMATE}
    assert {one.certainty for one in found} == {SURE[activation]}
    assert 20 < worst(components, truths) < 60 < worst(found, truths)
    for one, truth in zip(found, truths, strict=True):
        assert sorted(one.batch.labels.tolist()) == sorted(truth.labels.tolist())
    for alone, one in zip([CocktailParty()([each], seed=0)[0] for each in seen], found, strict=True):
        assert torch.allclose(alone.batch.inputs, one.batch.inputs, atol=1e-4)


def test_a_factor_of_the_whole_update_does_not_matter():
    (seen,), truths = victims("tanh", number=1)
    scaled = {name: 1e-3 * value for name, value in seen.upload.tensors.items()}
    found = CocktailParty()([replace(seen, upload=replace(seen.upload, tensors=scaled))], seed=0)
    assert found[0].certainty is Certainty.CONSISTENT
    assert worst(found, truths) > 60


def test_noise_is_not_taken_for_images():
    (seen,), truths = victims("tanh", number=1)
    for share in (0.001, 0.03):
        changed = [noisy(seen, share)]
        components, found = CocktailParty(steps=0)(changed, seed=0), CocktailParty()(changed, seed=0)
        assert found[0].certainty is Certainty.APPROXIMATE
        assert worst(found, truths) > worst(components, truths)


def test_silent_outputs_tell_images_apart_behind_noise():
    """Where no element of the gradient is zero any more."""
    seen, truths = victims("relu")
    for share, gain in ((0.001, 20), (0.03, 2)):
        changed = [noisy(each, share) for each in seen]
        components, found = CocktailParty(steps=0)(changed, seed=0), CocktailParty()(changed, seed=0)
        assert {one.certainty for one in found} == {Certainty.APPROXIMATE}
        assert worst(found, truths) > worst(components, truths) + gain


def test_silence_leads_from_a_guess_to_the_images():
    rng = torch.Generator().manual_seed(0)
    images, weight = torch.randn(6, 40, generator=rng).double(), torch.randn(200, 40, generator=rng).double()
    shift = 0.1 * torch.randn(200, generator=rng).double()
    signals = torch.randn(6, 200, generator=rng).double() * (images @ weight.T + shift > 0)
    basis = torch.linalg.qr(images.T)[0].T
    mixing, columns = images @ basis.T, signals.T @ images @ basis.T
    guess = (torch.eye(6) + 0.05 * torch.randn(6, 6, generator=rng)).double() @ mixing
    found = unmixed_by_silence(columns, signals.sum(0), guess, basis @ weight.T, shift)
    assert torch.allclose(found, mixing, atol=1e-8)
    assert unmixed_by_silence(columns, 0 * signals.sum(0), guess, basis @ weight.T, shift) is None


def test_the_likelier_mixture_is_that_of_the_sources():
    rng = torch.Generator().manual_seed(0)
    sources, mixing = torch.randn(3, 4000, generator=rng).double() ** 3, torch.randn(3, 3, generator=rng).double()
    truth = torch.linalg.inv(mixing)
    own = unlikeliness(mixing @ sources, truth)
    assert own < unlikeliness(mixing @ sources, torch.eye(3).double())
    assert torch.allclose(own, unlikeliness(mixing @ sources, 7 * truth))


def test_what_was_found_before_counts_in_shares_that_images_have_of_each_other():
    first, shares = torch.randn(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    change = shares @ first
    assert torch.allclose((change @ metric_of_changes(first) * change).sum(), shares.square().sum())


def test_auto_takes_what_it_reads():
    """As it is where the update is reproduced, as a start that it holds on to where noise was added."""
    (seen,), truths = victims("tanh", number=1)
    (found,) = AutoAttack(evaluations=10**9)([seen], seed=0)
    assert (found.member, found.certainty) == ("cocktail party", Certainty.CONSISTENT)
    changed = [noisy(seen, 0.01)]
    party, found = CocktailParty()(changed, seed=0), AutoAttack(evaluations=60)(changed, seed=0)
    assert found[0].member.startswith("cocktail party, then ")
    assert worst(found, truths) > worst(party, truths) - 3


def test_heavy_tails_are_unmixed():
    rng = torch.Generator().manual_seed(0)
    sources = torch.randn(1, 3, 4000, generator=rng).double() ** 3
    mixing = torch.randn(3, 3, generator=rng).double()
    found = independent_directions(mixing @ sources, torch.eye(3).double()[None], iterations=40)[0] @ mixing
    share = found.abs() / found.abs().amax(1, keepdim=True)
    assert sorted(share.argmax(1).tolist()) == [0, 1, 2]
    assert (share.sum(1) < 1.1).all()


def test_what_can_not_be_unmixed_says_why():
    narrow, convolutional = mlp(width=3), LeNet(in_channels=2, image_size=24, num_classes=CLASSES)
    four, twice = patched(4, 0), patched(2, 0)
    alike = Batch(twice.inputs.repeat(2, 1, 1, 1), twice.labels.repeat(2))
    cases = ((narrow, four, "4 outputs"), (convolutional, four, "fully connected"), (mlp(), alike, "of rank 4"))
    for model, truth, line in cases:
        (found,) = CocktailParty()([observe(model, truth)], seed=0)
        assert found.batch is None and line in found.failure
    for wrong in ({"iterations": 0}, {"steps": -1}):
        with pytest.raises(UserError, match=rf"attack\.{next(iter(wrong))}"):
            CocktailParty(**wrong)


@pytest.mark.parametrize(
    ("shape", "count", "line"),
    [
        ((1, 1, 1), 1, "neighboring"),
        ((3, 1, 1), 2, "neighboring"),
        ((1, 1, 2), 2, "neighboring"),
        ((1, 2, 2), 8, "8 inputs"),
    ],
)
def test_images_of_few_pixels_are_left_to_others(shape, count, line):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 16), nn.Sigmoid(), nn.Linear(16, 4))
    gradients = torch.autograd.grad(
        F.cross_entropy(net(torch.rand(count, *shape)), torch.arange(count) % 4), net.parameters()
    )
    seen = Observation.of_gradients(net, gradients, input_shape=shape, batch_size=count)
    (found,) = CocktailParty()([seen], seed=0)
    assert found.batch is None and line in found.failure


def test_no_step_is_taken_where_the_network_says_nothing():
    rng = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 4)).double()
    weight = torch.rand(64, 36, generator=rng).double()
    net.load_state_dict({**net.state_dict(), "1.weight": weight, "1.bias": torch.zeros(64)})
    images, labels = torch.rand(3, 36, generator=rng).double(), torch.arange(3)
    behind, basis = Behind(net, "1", (1, 6, 6)), torch.linalg.qr(images.T)[0].T
    signal = behind.signal((images @ weight.T).requires_grad_(), labels).detach()
    mixture = mixture_of(signal.T @ images, signal.sum(0), (weight, torch.zeros(64)), basis, behind)
    silent = -images @ basis.T
    assert torch.equal(unmixed_by_network(mixture, silent, labels, steps=3), silent)


def test_a_guess_at_which_the_network_says_nothing_is_not_taken(monkeypatch):
    (seen,), truths = victims("relu", number=1)
    changed = [noisy(seen, 0.1)]
    party = "fl_privacy.attacks.exact.cocktail_party"
    monkeypatch.setattr(f"{party}.unmixed_by_silence", lambda *given: given[2].flip(1))
    first = []

    def nothing(mixture, mixing, labels):
        first.append(mixing)
        return misfit(mixture, mixing, labels) if mixing is first[0] else math.nan

    monkeypatch.setattr(f"{party}.misfit", nothing)
    found, alone = CocktailParty()(changed, seed=0), CocktailParty(steps=0)(changed, seed=0)
    assert worst(found, truths) == worst(alone, truths) > 15
