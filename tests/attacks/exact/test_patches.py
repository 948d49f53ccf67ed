"""A vision transformer's image is solved for, and never called proven where it is another one."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fl_privacy.attacks import AutoAttack
from fl_privacy.attacks.exact import ExactInversion
from fl_privacy.models import ViT
from fl_privacy.types import Certainty, LocalPlan, Observation
from tests.attacks.exact.test_exact import batch, clipped, noise, pruned, rounded, victims, worst
from tests.attacks.victims import CLASSES, observe

POSITION, WEIGHT = "network.encoder.pos_embedding", "network.conv_proj.weight"


def vit(seed: int = 0, *, patch: int = 4, width: int = 12, normalized: bool = True) -> nn.Module:
    torch.manual_seed(seed)
    scaled = {"mean": [0.5], "std": [0.25]} if normalized else {}
    shape = {"patch_size": patch, "depth": 2, "token_width": width, "heads": 2, "mlp_width": 16}
    return ViT(in_channels=2, image_size=8, num_classes=CLASSES, **shape, **scaled).eval()


def with_tensors(seen: Observation, tensors: dict[str, Tensor]) -> Observation:
    return replace(seen, upload=replace(seen.upload, tensors=tensors))


def test_one_image_is_solved_for_and_proven():
    seen, truths = victims(vit(), 1, 3)
    for found, truth in zip(ExactInversion()(seen, seed=0), truths, strict=True):
        assert found.certainty is Certainty.PROVEN
        assert worst(found, truth) < 1e-3
    assert {one.member for one in AutoAttack(evaluations=10**9)(seen, seed=0)} == {"exact"}


def test_more_patches_than_the_token_is_wide_are_not_proven():
    (seen,), _ = victims(vit(patch=2), 1, 1)
    (found,) = ExactInversion()([seen], seed=0)
    assert found.batch is not None and found.certainty is Certainty.APPROXIMATE


def test_what_a_transformer_does_not_give_away_is_refused_with_the_reason():
    model = vit()
    (pair,), _ = victims(model, 2, 1)
    (single,), _ = victims(model, 1, 1)
    hidden = with_tensors(single, {n: t for n, t in single.upload.tensors.items() if n != POSITION})
    several, withheld = ExactInversion()([pair, hidden], seed=0)
    assert several.batch is None and "fully connected" in several.failure
    assert withheld.failure == f"{POSITION} is expected, but was withheld; use attack=auto."


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_batch_norm_in_front_is_undone_where_its_statistics_are_those_sent(mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    model[0].running_mean.uniform_(0.3, 0.7)
    model[0].running_var.uniform_(0.05, 0.1)
    seen, truths = victims(model, 3, 2, plan=LocalPlan(batch_norm=mode))
    found = ExactInversion()(seen, seed=0)
    if mode == "train":
        assert all("BatchNorm" in one.failure for one in found)
        return
    assert {one.certainty for one in found} == {Certainty.PROVEN}
    assert max(worst(one, truth) for one, truth in zip(found, truths, strict=True)) < 1e-3


def columns_gone(tensors: dict[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
    kept = torch.rand(tensors[WEIGHT].shape[1:], generator=rng) > 0.2
    return {**tensors, WEIGHT: tensors[WEIGHT] * kept}


def channels_gone(tensors: dict[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
    """Of the tokens, which leaves a system that is consistent."""
    kept = torch.rand(len(tensors[WEIGHT]), generator=rng) > 0.3
    return {**tensors, WEIGHT: tensors[WEIGHT] * kept[:, None, None, None], POSITION: tensors[POSITION] * kept}


def patch_changed(tensors: dict[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
    """As if another patch had entered: consistent with every equation of the layer."""
    position = tensors[POSITION][0, 1]
    other = torch.rand(tensors[WEIGHT].shape[1:], generator=rng)
    return {**tensors, WEIGHT: tensors[WEIGHT] + torch.einsum("d,cij->dcij", position, other)}


CHANGES = {
    "clean": lambda tensors, rng: tensors,
    "rounding": noise(1e-8),
    "some noise": noise(1e-4),
    "much noise": noise(0.1),
    "slightly pruned": pruned(0.05),
    "pruned": pruned(0.9),
    "columns gone": columns_gone,
    "channels gone": channels_gone,
    "patch changed": patch_changed,
    "rounded": rounded,
    "clipped": clipped,
}


@pytest.mark.long
@pytest.mark.parametrize("victims_drawn", [33, pytest.param(44, marks=pytest.mark.fuzz)])
def test_proven_is_never_wrong(victims_drawn):
    models = [vit(seed, normalized=seed % 2 == 0) for seed in range(4)]
    verdicts: Counter[tuple[str, Certainty]] = Counter()
    for number in range(victims_drawn):
        rng = torch.Generator().manual_seed(number)
        kind = list(CHANGES)[number % len(CHANGES)]
        truth = batch(1, number)
        seen = observe(models[number % 4], truth)
        changed = with_tensors(seen, CHANGES[kind](dict(seen.upload.tensors), rng))
        (found,) = ExactInversion()([changed], seed=0)
        verdicts[kind, found.certainty] += 1
        if found.certainty is Certainty.PROVEN:
            assert worst(found, truth) < 1e-2, (number, kind)
    for kind in ("clean", "rounding", "clipped"):
        assert verdicts[kind, Certainty.PROVEN] > 2, verdicts
    for kind in ("some noise", "much noise", "pruned", "columns gone", "patch changed", "rounded"):
        assert verdicts[kind, Certainty.PROVEN] == 0, verdicts
