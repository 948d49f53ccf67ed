"""One image behind batch norm in training mode is solved for by the running statistics that its client uploads."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy import Observation, reconstruct
from fl_privacy.attacks.attack import within
from fl_privacy.attacks.exact.attack import BLOCKS
from fl_privacy.attacks.exact.batch_norm import known_by_statistics
from fl_privacy.attacks.exact.residual import Known, Residual, find_residual
from fl_privacy.attacks.gradient_inversion.targets import as_gradient, stack
from fl_privacy.measure.images import psnr
from fl_privacy.types import LocalPlan

RATE = 0.1


class Block(nn.Module):
    """Norm and ReLU in front of two convolutions, with a shortcut."""

    def __init__(self, inner: int, outer: int, *, bias: bool) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *(nn.BatchNorm2d(inner), nn.ReLU(), nn.Conv2d(inner, outer, 3, 2, 1, bias=bias)),
            *(nn.BatchNorm2d(outer), nn.ReLU(), nn.Conv2d(outer, outer, 3, 1, 1, bias=bias)),
        )
        self.shortcut = nn.Conv2d(inner, outer, 1, 2, bias=bias)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.shortcut(inputs) + self.residual(inputs)


def preactivated(*, bias: bool = False, momentum: float | None = 0.1) -> nn.Module:
    """Build a residual network for images (3, 24, 24) whose norms have weights of both signs."""
    torch.manual_seed(0)
    blocks = nn.Conv2d(3, 16, 3, padding=1), Block(16, 40, bias=bias), Block(40, 48, bias=bias)
    model = nn.Sequential(
        *blocks, nn.BatchNorm2d(48), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 5)
    )
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = momentum
            nn.init.uniform_(module.weight, 0.5, 1.5)
            module.weight.data[::3] *= -1
            nn.init.normal_(module.bias, 0, 0.1)
    return model.train()


def picture(seed: int) -> Tensor:
    small = torch.rand(1, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
    return F.interpolate(small, size=24, mode="bicubic", align_corners=True).clamp(0, 1)


def step(model: nn.Module, images: Tensor, *labels: int) -> Observation:
    """Observe a client that sends weights and running statistics after one step, of label 1 unless given."""
    before, after = copy.deepcopy(model), copy.deepcopy(model)
    F.cross_entropy(after(images), torch.tensor(labels or [1])).backward()
    torch.optim.SGD(after.parameters(), lr=RATE).step()
    plan = LocalPlan(shares="delta", lr=RATE, steps=1, batch_size=len(images), batch_norm="train", mode="train")
    return Observation.of_update(before, after, plan, input_shape=images.shape[1:], num_examples=len(images))


def solved(seen: Observation) -> tuple[Residual, Known]:
    network = find_residual(seen)
    assert network is not None
    network.use([seen])
    gradients = stack([as_gradient(seen)], list(network.names), network.device, torch.float64)
    return network, known_by_statistics(network, gradients)


@pytest.mark.parametrize(("bias", "momentum"), [(False, 0.1), (True, 0.1), (False, None)])
@pytest.mark.parametrize("labels", [(1,), (1, 3)])
def test_activations_in_front_of_a_norm_are_those_of_each_image(
    bias: bool, momentum: float | None, labels: tuple[int, ...]
) -> None:
    images = torch.cat([picture(seed) for seed in (1, 2)][: len(labels)])
    network, known = solved(step(preactivated(bias=bias, momentum=momentum), images, *labels))
    assert known.found.all() and known.left.max() < 1e-2
    ((node, values),) = known.values.items()
    assert values.shape == (len(labels), 40, 12, 12), "inputs of the block's first convolution"
    true = network.graph.run({network.graph.image: images.double()}, node)
    apart = torch.cdist(values.flatten(1), true.flatten(1)) / true.flatten(1).norm(dim=1)
    assert apart.amin(0).max() < 1e-3


def test_a_weight_of_zero_hides_only_its_own_channel() -> None:
    model = preactivated()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data[5], module.bias.data[5] = 0, 0.3
    network, known = solved(step(model, picture(2)))
    ((node, values),) = known.values.items()
    assert known.left.max() < 1e-4 and values.shape == (1, 40, 12, 12)
    true = network.graph.run({network.graph.image: picture(2).double()}, node)
    assert (values - true).norm() < 1e-3 * true.norm()


def test_a_first_convolution_with_too_many_pixels_is_not_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, own = list[int](), torch.linalg.eigh

    def recorded(matrix: Tensor) -> tuple[Tensor, Tensor]:
        sizes.append(len(matrix))
        return own(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", recorded)
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 32, 8, 8), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, 1, 1), nn.BatchNorm2d(32)
    model = nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)).train()
    _, known = solved(step(model, torch.rand(1, 3, 40, 40)))
    ((_, values),) = known.values.items()
    assert known.found.all() and values.shape == (1, 32, 5, 5)
    assert max(sizes, default=0) <= 1200


def test_a_time_limit_stops_equations() -> None:
    with within(0.0) as limit:
        _, known = solved(step(preactivated(), picture(1)))
    assert limit.cut and known.left[0] > 1e-3, "one round"


@pytest.mark.long
def test_statistics_of_another_image_solve_nothing_before_a_norm() -> None:
    seen, other = (step(preactivated(), picture(seed)) for seed in (2, 3))
    _, known = solved(replace(seen, upload=replace(seen.upload, buffers=other.upload.buffers)))
    ((_, values),) = known.values.items()
    assert known.left.min() > 1e-2 and values.shape == (1, 48, 6, 6), "inputs of the block's last convolution"


def test_without_statistics_or_with_several_images_no_network_is_solved() -> None:
    seen = step(preactivated(), picture(0))
    assert find_residual(replace(seen, upload=replace(seen.upload, buffers={}))) is None
    assert find_residual(replace(seen, upload=replace(seen.upload, num_examples=4))) is None, (
        "more than its rank allows"
    )
    plain = preactivated()
    plain[3] = nn.BatchNorm2d(48, affine=False)
    assert find_residual(step(plain, picture(0))) is None, "a norm without parameters shows no scale"


@pytest.mark.long
def test_the_image_is_reconstructed_and_another_is_not() -> None:
    seen, truth = step(preactivated(), picture(2)), picture(2)
    found = reconstruct(seen, "exact", evaluations=400)
    assert found.batch is not None and found.member == BLOCKS
    assert found.batch.labels.tolist() == [1]
    assert float(psnr(found.batch.inputs, truth)) > 30
    assert float(psnr(found.batch.inputs, picture(1))) < 15
