"""Images that a first layer has mixed are told apart where nothing is silent."""

import pytest
import torch

from fl_privacy.attacks import CocktailParty
from fl_privacy.attacks.exact.independence import independent_directions
from fl_privacy.errors import UserError
from fl_privacy.metrics import evaluate_all
from fl_privacy.models import MLP, LeNet
from fl_privacy.types import Batch, Certainty, VictimId
from tests.attacks.victims import CLASSES, observe


def mlp(activation="sigmoid", width=64):
    torch.manual_seed(0)
    shape = {"in_channels": 2, "image_size": 24, "num_classes": CLASSES}
    return MLP(**shape, widths=(width, 32), activation=activation, mean=[0.5], std=[0.25])


def patched(count, seed):
    """Images of flat patches with sharp edges, none like another."""
    rng = torch.Generator().manual_seed(seed)
    images = torch.full((count, 2, 24, 24), 0.5)
    for image in images:
        for _ in range(8):
            top, left, height, width = torch.randint(2, 20, (4,), generator=rng).tolist()
            image[:, top : top + height, left : left + width] = torch.rand(2, 1, 1, generator=rng)
    return Batch(images, torch.randint(CLASSES, (count,), generator=rng))


@pytest.mark.parametrize("activation", ["sigmoid", "relu"])
def test_batches_are_read_in_front_of_any_activation(activation):
    truths = [patched(4, seed) for seed in range(2)]
    seen = [observe(mlp(activation), truth, id=VictimId(0, 0, k)) for k, truth in enumerate(truths)]
    found = CocktailParty()(seen, seed=0)
    assert {one.certainty for one in found} == {Certainty.APPROXIMATE}
    for score in evaluate_all(found, truths):
        assert min(image.values["psnr"] for image in score.images) > 20
    for alone, one in zip([CocktailParty()([each], seed=0)[0] for each in seen], found, strict=True):
        assert torch.allclose(alone.batch.inputs, one.batch.inputs, atol=1e-4)


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
    with pytest.raises(UserError, match=r"attack\.iterations"):
        CocktailParty(iterations=0)
