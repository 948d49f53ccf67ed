"""MobileNetV2 and ViT: the networks of torchvision, fit to be trained in a federation and attacked."""

from functools import partial

import pytest
import torch

from fl_privacy.attacks import inverting_gradients
from fl_privacy.errors import UserError
from fl_privacy.models import MobileNetV2, ViT
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.types import Batch, LocalPlan, ModelState, Observation, Upload, VictimId

TINY_VIT = {"patch_size": 4, "depth": 1, "token_width": 12, "mlp_width": 16}


@pytest.mark.parametrize(("channels", "size", "classes"), [(1, 28, 10), (3, 32, 100), (3, 96, 2)])
def test_any_image_size_and_channels(channels, size, classes):
    shape = {"in_channels": channels, "image_size": size, "num_classes": classes}
    for model in (MobileNetV2(**shape, width_multiplier=0.25), ViT(**shape, **TINY_VIT)):
        assert model(torch.rand(2, channels, size, size)).shape == (2, classes)


def test_published_parameter_counts():
    with torch.device("meta"):  # draws none of them
        mobilenet = MobileNetV2(in_channels=3, image_size=224, num_classes=1000)
        vit = ViT(
            in_channels=3, image_size=224, num_classes=1000, patch_size=16, depth=12, token_width=768, heads=12,
            mlp_width=3072,
        )  # fmt: skip
    assert sum(p.numel() for p in mobilenet.parameters()) == 3_504_872
    assert sum(p.numel() for p in vit.parameters()) == 86_567_656


@pytest.mark.parametrize(("size", "side"), [(32, 4), (64, 8), (224, 7)])
def test_small_images_are_not_shrunk_away(size, side):
    model = MobileNetV2(in_channels=1, image_size=size, num_classes=2, width_multiplier=0.1).eval()
    assert model.network.features(torch.zeros(1, 1, size, size)).shape[-1] == side


def test_state_can_be_averaged():
    state = ModelState.of(MobileNetV2(in_channels=1, image_size=16, num_classes=2, width_multiplier=0.1))
    assert all(b.is_floating_point() for b in state.buffers.values())


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [partial(MobileNetV2, width_multiplier=0.1), partial(ViT, **TINY_VIT)],
    ids=["mobilenet", "vit"],
)
@pytest.mark.filterwarnings("error")
def test_trains_and_can_be_attacked_many_victims_at_once(make):
    torch.manual_seed(0)
    model = make(in_channels=1, image_size=8, num_classes=3)
    state, plan = ModelState.of(model), LocalPlan(batch_norm="eval")
    observations = []
    for victim in range(2):
        batch = Batch(torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(victim)), torch.tensor([victim]))
        gradients = loss_gradients(model, state, batch, batch_norm="eval").gradients
        assert all(g.isfinite().all() for g in gradients.values())
        assert sum(float(g.abs().sum()) > 0 for g in gradients.values()) > len(gradients) / 2
        upload = Upload(tensors=gradients, num_examples=1)
        observations.append(
            Observation(
                id=VictimId(0, 0, victim),
                model=model,
                sent=state,
                upload=upload,
                plan=plan,
                input_shape=(1, 8, 8),
                num_classes=3,
            )
        )
    attack = inverting_gradients(iterations=2, lr=0.01, dtype="float64")
    for victim, (together, observation) in enumerate(zip(attack(observations, seed=0), observations, strict=True)):
        alone = attack([observation], seed=0)[0]
        assert together.failure is None
        assert together.batch.labels.tolist() == [victim]
        assert together.history == pytest.approx(alone.history, rel=1e-6)
        assert len(set(together.history)) > 1


@pytest.mark.parametrize(
    ("factory", "options", "words"),
    [
        (MobileNetV2, {"width_multiplier": 0.0}, "above 0"),
        (MobileNetV2, {"dropout": 1.0}, "dropout"),
        (ViT, {"patch_size": 5}, "divide"),
        (ViT, {"token_width": 10, "heads": 3}, "multiple"),
        (ViT, {"depth": 0}, "depth"),
    ],
)
def test_wrong_options_are_named(factory, options, words):
    with pytest.raises(UserError, match=words):
        factory(in_channels=1, image_size=16, num_classes=2, **options)
