"""Batches in which an example occurs more than once: read as their different examples, each as often as it occurs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy import Observation, reconstruct
from fl_privacy.types import Certainty

SHAPE, CLASSES = (1, 6, 6), 10


def network(activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 96), activation(), nn.Linear(96, CLASSES))


def seen(net: nn.Module, order: list[int], labels: list[int] | None = None, **told) -> tuple[Observation, Tensor]:
    different = torch.rand(1 + max(order), *SHAPE, generator=torch.Generator().manual_seed(0))
    loss = F.cross_entropy(net(different[order]), torch.tensor(order if labels is None else labels))
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    return Observation.of_gradients(net, gradients, input_shape=SHAPE, **told), different[order]


def expect_same(found: Tensor, truth: Tensor) -> None:
    """Compare images in any order, each as often as it occurs."""
    apart = (found[:, None].float() - truth[None]).abs().flatten(2).amax(2) < 1e-3
    assert len(found) == len(truth) and torch.equal(apart.sum(1).sort().values, apart.sum(0).sort().values)
    assert bool(apart.any(0).all()) and bool(apart.any(1).all())


@pytest.mark.parametrize("attack", ["exact", "auto"])
@pytest.mark.parametrize(
    ("order", "times"),
    [
        ([0, 1, 2, 0], "2, 1 and 1"),
        ([0, 1, 2, 0, 3, 0], "3, 1, 1 and 1"),
        ([0, 0], "All 2 examples of the batch are the same"),
    ],
)
def test_equal_examples_are_read_as_often_as_they_occur(attack: str, order: list[int], times: str) -> None:
    observation, truth = seen(network(), order, batch_size=len(order))
    found = reconstruct(observation, attack)
    assert found.batch is not None and found.certainty is Certainty.PROVEN
    expect_same(found.batch.inputs, truth)
    assert sorted(found.batch.labels.tolist()) == sorted(order)
    assert any(times in note for note in found.notes)


def test_a_batch_whose_size_nobody_stated_may_be_larger_than_its_rank() -> None:
    observation, truth = seen(network(), [0, 1, 2, 0])
    assert observation.upload.num_examples == 3
    found = reconstruct(observation, "exact")
    assert found.batch is not None and found.certainty is Certainty.PROVEN
    expect_same(found.batch.inputs, truth)


def test_an_image_with_two_labels_has_both() -> None:
    observation, truth = seen(network(), [0, 1, 2, 0], [0, 1, 2, 5], batch_size=4)
    found = reconstruct(observation, "exact")
    assert found.batch is not None and found.certainty is Certainty.PROVEN
    expect_same(found.batch.inputs, truth)
    assert found.batch.labels.sum(0).round().tolist() == [1, 1, 1, 0, 0, 1, 0, 0, 0, 0]


def test_equal_images_are_read_behind_any_activation() -> None:
    observation, truth = seen(network(nn.Sigmoid), [0, 0, 0], batch_size=3)
    found = reconstruct(observation, "exact")
    assert found.batch is not None
    expect_same(found.batch.inputs, truth)


def test_an_example_that_sends_nothing_back_is_not_taken_for_a_second_of_another() -> None:
    """Two examples, of which one reaches no neuron: the rank is one, and nothing is called proven of both."""
    net = network()
    with torch.no_grad():
        net[1].weight.abs_()
        net[1].bias.fill_(-0.1)
    images = torch.stack([torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)), torch.zeros(SHAPE)])
    loss = F.cross_entropy(net(images), torch.tensor([1, 2]))
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    observation = Observation.of_gradients(net, gradients, input_shape=SHAPE, batch_size=2)
    found = reconstruct(observation, "exact")
    assert found.certainty is Certainty.APPROXIMATE
