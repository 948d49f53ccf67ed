"""Batches in which an example occurs more than once: read as their different examples, each as often as it occurs."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy import Observation, reconstruct
from fl_privacy.attacks.exact.certificate import as_one
from fl_privacy.models.losses import loss_of
from fl_privacy.types import Certainty

SHAPE, CLASSES = (1, 6, 6), 10


def network(activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 96), activation(), nn.Linear(96, CLASSES))


def rows_of(labels: Tensor) -> Tensor:
    return F.one_hot(labels, CLASSES).float()


def focal(outputs: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(outputs, labels, reduction="none")
    return ((1 - (-each).exp()).square() * each).mean()


LOSSES = {
    "bce": (lambda outputs, labels: F.binary_cross_entropy_with_logits(outputs, rows_of(labels)), "bce"),
    "mse": (lambda outputs, labels: F.mse_loss(outputs, rows_of(labels)), "mse"),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1),) * 2,
    "weighted": (nn.CrossEntropyLoss(weight=torch.linspace(1, 2, CLASSES)),) * 2,
    "focal": (focal, focal),
}
"""Loss of the client, and what the attacker is given of it."""


def seen(
    net: nn.Module, order: list[int], labels: list[int] | None = None, loss=F.cross_entropy, **told
) -> tuple[Observation, Tensor]:
    different = torch.rand(1 + max(order), *SHAPE, generator=torch.Generator().manual_seed(0))
    value = loss(net(different[order]), torch.tensor(order if labels is None else labels))
    gradients = torch.autograd.grad(value, list(net.parameters()))
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


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_equal_examples_are_counted_under_other_losses(name: str, stated: bool) -> None:
    loss, told = LOSSES[name]
    order = [0, 1, 2, 3, 2, 2]
    observation, truth = seen(network(), order, loss=loss, batch_size=6 if stated else None)
    observation = replace(observation, loss=loss_of(told, CLASSES, torch.zeros(1)))
    found = reconstruct(observation, "exact")
    assert found.batch is not None and found.certainty is Certainty.PROVEN
    expect_same(found.batch.inputs, truth)
    assert any("6 examples but has 4 different ones, which occur 3, 1, 1 and 1 times" in note for note in found.notes)
    labels = found.batch.labels.argmax(1) if found.batch.labels.is_floating_point() else found.batch.labels
    assert sorted(labels.tolist()) == sorted(order)


def test_of_any_numbers_as_targets_it_is_said_that_occurrences_are_unknown() -> None:
    targets = torch.rand(4, CLASSES, generator=torch.Generator().manual_seed(1))

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets[labels])

    observation, truth = seen(network(), [0, 1, 2, 2], loss=loss, batch_size=4)
    found = reconstruct(replace(observation, loss=loss_of("mse", CLASSES, torch.zeros(1))), "exact")
    assert found.batch is not None and found.certainty is Certainty.PROVEN
    apart = (found.batch.inputs[:, None].float() - truth[None]).abs().flatten(2).amax(2)
    assert bool((apart.amin(0) < 1e-3).all())
    assert any("how often each occurs the update does not show" in note for note in found.notes)


@pytest.mark.parametrize("name", ["cross entropy", "bce", "mse"])
def test_equal_images_behind_convolutions_are_solved_for_as_one(name: str) -> None:
    loss, told = LOSSES.get(name, (F.cross_entropy, "cross_entropy"))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(432, CLASSES))
    observation, truth = seen(net, [3, 3, 3], loss=loss, batch_size=3)
    found = reconstruct(replace(observation, loss=loss_of(told, CLASSES, torch.zeros(1))), "exact")
    assert found.batch is not None and found.certainty is Certainty.CONSISTENT
    expect_same(found.batch.inputs, truth)
    assert found.batch.labels.tolist() == [3, 3, 3] or found.batch.labels.argmax(1).tolist() == [3, 3, 3]
    assert "All 3 examples of the batch are the same." in found.notes


def test_different_images_of_two_classes_are_not_taken_for_the_same() -> None:
    """The gradient of a layer with two outputs always has rank one under a softmax."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(432, 2))
    observation, _ = seen(net, [0, 1], batch_size=2)
    assert as_one(observation) is None


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
