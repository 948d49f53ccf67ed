import copy
from dataclasses import replace

import pytest
import torch
from skimage.restoration import denoise_tv_chambolle
from torch import nn

from fl_privacy.attacks.gradient_inversion import GradientInversion, Space
from fl_privacy.attacks.gradient_inversion.objectives import Cosine
from fl_privacy.attacks.gradient_inversion.priors import (
    BatchNormStatistics,
    ColorRange,
    GroupConsistency,
    Guess,
    ImageNorm,
    TotalVariation,
    batch_statistics,
    uploaded_statistics,
)
from fl_privacy.attacks.optimizers import Adam, StepDecay
from fl_privacy.types import LocalPlan, Observation

IMAGES = torch.rand((4, 2, 3, 5, 6), generator=torch.Generator().manual_seed(0)).double()


def _guess(images: torch.Tensor = IMAGES, attempts: int = 1, model: nn.Module | None = None) -> Guess:
    return Guess(images, attempts, lambda: batch_statistics(model or nn.Identity(), images))


def test_total_variation_is_the_mean_step_between_neighbors() -> None:
    image = IMAGES[1].numpy()
    expected = abs(image[..., :, 1:] - image[..., :, :-1]).mean() + abs(image[..., 1:, :] - image[..., :-1, :]).mean()
    assert TotalVariation(weight=0.3)(_guess())[1].item() == pytest.approx(0.3 * expected)


@pytest.mark.parametrize("isotropic", [False, True])
def test_total_variation_falls_when_an_image_is_denoised(isotropic: bool) -> None:
    prior = TotalVariation(weight=1, isotropic=isotropic)
    smooth = torch.from_numpy(denoise_tv_chambolle(IMAGES.numpy(), channel_axis=2))
    assert (prior(_guess(smooth)) < prior(_guess())).all()
    slope = torch.ones(1, 1, 1, 4, 4).cumsum(-1)
    assert prior(_guess(slope)).item() == pytest.approx(1)


@pytest.mark.parametrize("isotropic", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1)])
def test_images_of_one_row_or_column_have_a_total_variation(shape, isotropic) -> None:
    images = torch.rand(2, 3, 1, *shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = TotalVariation(weight=1.0, isotropic=isotropic)(Guess(images, 1, lambda: ()))
    expected = torch.zeros(2) if isotropic or shape == (1, 1) else images.flatten(3).diff().abs().mean((1, 2, 3))
    assert torch.allclose(found, expected)
    assert torch.autograd.grad(found.sum(), images)[0].isfinite().all()


def test_norm_and_color_range() -> None:
    expected = IMAGES[2].flatten(1).norm(dim=1).mean().item()
    assert ImageNorm(weight=2)(_guess())[2].item() == pytest.approx(2 * expected)
    assert ColorRange(weight=1)(_guess()).abs().max() == 0
    assert ColorRange(weight=1)(_guess(IMAGES + 1.5))[0].item() == pytest.approx(
        (IMAGES[0] + 0.5).square().mean().item()
    )


def step_in_training_mode(images: torch.Tensor, momentum: float | None) -> tuple[nn.Module, Observation]:
    """Observe one step of SGD on images (B, 3, H, W), with running statistics; return the model after it, too."""
    torch.manual_seed(0)
    size = images.shape[-2:].numel()
    before = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU()),
        *(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=momentum), nn.Flatten(), nn.Linear(4 * size, 2)),
    ).train()
    after = copy.deepcopy(before)
    nn.functional.cross_entropy(after(images), torch.tensor([0, 1])).backward()
    torch.optim.SGD(after.parameters(), lr=0.1).step()
    plan = LocalPlan(lr=0.1, steps=1, batch_size=2, batch_norm="train", mode="train")
    return before, Observation.of_update(before, after, plan, input_shape=images.shape[1:], num_examples=2)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_of_one_step_give_those_of_the_batch(momentum: float | None) -> None:
    images = IMAGES[0].float()
    model, seen = step_in_training_mode(images, momentum)
    found, inner = uploaded_statistics(seen), images
    for name, layer in model.named_children():
        if isinstance(layer, nn.BatchNorm2d):
            assert torch.allclose(found[f"{name}.running_mean"].float(), inner.mean((0, 2, 3)), atol=1e-4)
            assert torch.allclose(found[f"{name}.running_var"].float(), inner.var((0, 2, 3), correction=0), atol=1e-4)
        inner = layer(inner)
    own = {name: value.float().expand(2, -1) for name, value in found.items()}
    both = torch.stack([images, images.flip(0) / 2])
    own_images, others = BatchNormStatistics(weight=1.0)(
        Guess(both, 1, lambda: batch_statistics(model.eval(), both, own))
    ).tolist()
    assert own_images < 1e-3
    assert others > 0.1


@pytest.mark.parametrize("momentum", [0.0, 1e-6, 0.001])
def test_statistics_that_rounding_hides_are_left_out(momentum: float) -> None:
    _, seen = step_in_training_mode(IMAGES[0].float(), momentum)
    sent, upload = replace(seen.sent, buffers=dict(seen.sent.buffers)), seen.upload
    name = "1.running_var"
    sent.buffers[name] = torch.full((4,), 0.7)
    dead = sent.buffers[name] * (1 - momentum)
    shifted = [dead.nextafter(torch.zeros(4)), dead]
    for value in shifted:
        buffers = {**upload.buffers, name: value}
        found = uploaded_statistics(replace(seen, sent=sent, upload=replace(upload, buffers=buffers)))
        assert bool(found) == (momentum == 0.001)
        assert all(bool(value.isfinite().all()) for value in found.values())
        assert not found or float(found[name].min()) >= 0


@pytest.mark.parametrize("change", ["evaluation", "withheld", "steps"])
def test_there_are_no_statistics_of_the_batch_otherwise(change: str) -> None:
    _, seen = step_in_training_mode(IMAGES[0].float(), 0.1)
    plan, upload = seen.plan, seen.upload
    if change == "withheld":
        upload = replace(upload, buffers={})
    else:
        plan = replace(plan, batch_norm="eval") if change == "evaluation" else replace(plan, steps=2)
    assert not uploaded_statistics(replace(seen, plan=plan, upload=upload))


@pytest.mark.long
def test_uploaded_statistics_bring_a_reconstruction_nearer() -> None:
    """Behind batch norm in training mode, the gradient hardly depends on color and contrast; the statistics do."""
    smooth = nn.functional.interpolate(IMAGES[0, :, :, :3, :3].float(), (8, 8), mode="bilinear") * 0.6 + 0.1
    _, seen = step_in_training_mode(smooth, 0.1)
    bare = replace(seen, upload=replace(seen.upload, buffers={}))
    attack = GradientInversion(
        objective=Cosine(),
        optimizer=Adam(lr=0.1, sign="hard", schedule=StepDecay()),
        space=Space(mean=0.5, std=0.25),
        priors=(BatchNormStatistics(weight=0.1),),
        iterations=150,
        compile="off",
    )
    found = [attack([one], seed=0)[0].batch for one in (seen, bare)]
    near, far = (float((one.inputs - smooth).square().mean()) for one in found if one is not None)
    assert near < far / 2


def test_batch_norm_statistics_are_compared_victim_by_victim() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4, momentum=None)).double()
    model(IMAGES.flatten(0, 1))
    model.eval()
    first = model[0](IMAGES[3])
    second = model[2](model[1](first))
    distance = []
    for values, layer in ((first, model[1]), (second, model[3])):
        channels = values.transpose(0, 1).flatten(1)
        distance.append((channels.mean(1) - layer.running_mean).norm() + (channels.var(1, correction=0) - layer.running_var).norm())  # noqa: E501 # fmt: skip
    penalty = BatchNormStatistics(weight=0.5, first=10)(_guess(model=model))
    assert penalty.shape == (4,)
    assert penalty[3].item() == pytest.approx(0.5 * (10 * distance[0] + distance[1]).item())


def test_group_consistency_compares_attempts_at_the_same_victim_only() -> None:
    penalty = GroupConsistency(weight=1)(_guess(attempts=2))
    half = (IMAGES[0] - IMAGES[1]).norm().item() / 2
    assert penalty[:2].tolist() == pytest.approx([half, half])
    assert GroupConsistency(weight=1)(_guess(IMAGES[:1].expand(4, -1, -1, -1, -1), attempts=4)).max() < 1e-5
