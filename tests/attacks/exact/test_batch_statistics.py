"""Batch norm in front of the first layer is undone by the running statistics that a client sends back."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy import Observation, reconstruct
from fl_privacy.types import Certainty, LocalPlan


def rows(activation: type[nn.Module] = nn.ReLU, momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(14, momentum=momentum)
    nn.init.normal_(norm.bias)
    return nn.Sequential(norm, nn.Linear(14, 64), activation(), nn.Linear(64, 3))


def pictures() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def flat_pictures() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 3))


def step(net: nn.Module, examples: Tensor) -> Observation:
    before = copy.deepcopy(net)
    F.cross_entropy(net(examples), torch.arange(len(examples))).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    plan, shape = LocalPlan(lr=0.1, steps=1), tuple(examples.shape[1:])
    return Observation.of_update(before, net, plan, input_shape=shape, num_examples=len(examples))


def drawn(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("net", "examples"),
    [
        (rows(), drawn(2, 14)),
        (rows(nn.Tanh), drawn(2, 14)),
        (rows(momentum=None), drawn(2, 14)),
        (rows().double(), drawn(3, 14).double()),
        (pictures(), drawn(2, 1, 8, 8)),
        (flat_pictures().double(), drawn(2, 1, 8, 8).double()),
    ],
    ids=["rows", "without ReLU", "cumulative", "three rows", "images", "images, each value"],
)
def test_examples_are_read_through_batch_norm(net: nn.Module, examples: Tensor) -> None:
    found = reconstruct(step(net, examples), "exact")
    assert found.batch is not None and found.certainty is Certainty.PROVEN
    apart = (found.batch.inputs[:, None].double() - examples[None].double()).abs().flatten(2).amax(2)
    assert float(apart.amin(0).max()) < 1e-4
    assert sorted(found.batch.labels.tolist()) == list(range(len(examples)))


def test_a_single_image_is_read_by_the_statistics_of_its_pixels() -> None:
    found = reconstruct(step(pictures(), drawn(1, 1, 8, 8)), "exact")
    assert found.batch is not None and float((found.batch.inputs - drawn(1, 1, 8, 8)).abs().max()) < 1e-4


def test_without_the_statistics_it_is_said() -> None:
    seen = step(rows(), drawn(2, 14))
    held = Observation.of_update(rows(), list(seen.upload.tensors.values()), seen.plan, input_shape=14, num_examples=2)
    assert "BatchNorm1d" in (reconstruct(held, "exact").failure or "")


def test_two_examples_are_read_from_an_update_in_single_precision() -> None:
    """Where rounding hides whether the update is reproduced, signs and statistics still say what was there."""
    found = reconstruct(step(flat_pictures(), drawn(2, 1, 8, 8)), "exact")
    assert found.batch is not None
    apart = (found.batch.inputs[:, None] - drawn(2, 1, 8, 8)[None]).abs().flatten(2).median(2).values
    assert float(apart.amin(0).max()) < 1e-4
