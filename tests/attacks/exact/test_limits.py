"""What is proven is what entered the first layer; if that is another than the client's example, a note says so."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fl_privacy import Observation, reconstruct
from fl_privacy.attacks.exact.certificate import CHANGED_BEFORE
from fl_privacy.auditing.instrument.watch import TrainingWatch
from fl_privacy.auditing.scenario_problem import gradient_plan, read_problem
from fl_privacy.types import Certainty, Reconstruction

SHAPE = (1, 6, 6)
LABELS = torch.tensor([1, 3, 0])


def network(*front: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*front, nn.Flatten(), nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 5))


def images(count: int) -> Tensor:
    return torch.rand((count, *SHAPE), generator=torch.Generator().manual_seed(0))


def found(net: nn.Module, inputs: Tensor, labels: Tensor) -> Reconstruction:
    gradients = torch.autograd.grad(F.cross_entropy(net(inputs), labels), list(net.parameters()))
    return reconstruct(Observation.of_gradients(net, gradients, input_shape=SHAPE, batch_size=len(inputs)), "exact")


@pytest.mark.parametrize("count", [1, 3])
def test_behind_dropout_it_is_said_that_the_example_is_another(count: int) -> None:
    result = found(network(nn.Dropout(0.3)), images(count), LABELS[:count])
    assert result.batch is not None and result.certainty is Certainty.PROVEN
    assert float((result.batch.inputs[:, None] - images(count)).abs().flatten(2).amax(2).min()) > 0.3
    assert any("draws of the model's own, such as dropout" in note for note in result.notes)


@pytest.mark.parametrize("count", [1, 3])
def test_behind_mixup_it_is_said_that_examples_may_be_parts(count: int) -> None:
    mixed = 0.7 * images(count) + 0.3 * images(count + 1)[1:]
    labels = 0.7 * F.one_hot(LABELS[:count], 5).float() + 0.3 * F.one_hot((LABELS[:count] + 1) % 5, 5)
    result = found(network(), mixed, labels)
    assert result.certainty is Certainty.PROVEN
    assert any("mixed labels, as after mixup" in note for note in result.notes)


def test_plain_and_smoothed_labels_are_not_said_to_be_mixed() -> None:
    for labels in (LABELS, 0.9 * F.one_hot(LABELS[:1], 5).float() + 0.02):
        result = found(network(), images(len(labels)), labels)
        assert result.certainty is Certainty.PROVEN
        assert not any("What is proven" in note for note in result.notes)


class Pictures(Dataset):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self._change = change

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self._change(images(3)[number]), LABELS[number]


def cropped(image: Tensor) -> Tensor:
    return image.roll(int(torch.randint(6, ())), -1)


def flipped(image: Tensor) -> Tensor:
    return image.flip(-1) if random.random() < 0.5 else image


def shifted(batch: Tensor) -> Tensor:
    return batch.roll(int(np.random.randint(1, 6)), -1)


def same(batch: Tensor) -> Tensor:
    return batch


@pytest.mark.parametrize(
    ("loading", "between", "drawn"),
    [(cropped, same, True), (flipped, same, True), (same, shifted, True), (same, same, False)],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_random_changes_in_front_of_the_network_are_seen_and_said(loading, between, drawn: bool, shuffle: bool) -> None:
    net, watch = network(), TrainingWatch(program=True)
    with watch.looking() as seen:
        for inputs, labels in DataLoader(Pictures(loading), batch_size=3, shuffle=shuffle):
            F.cross_entropy(net(between(inputs)), labels).backward()
        torch.optim.SGD(net.parameters(), 0.1).step()
    assert seen.drawn is drawn
    problem = read_problem(seen, [images(3)])
    assert (CHANGED_BEFORE in problem.notes) is drawn
    result = reconstruct(problem.observed(0, seen.gradients, gradient_plan(seen)), "exact")
    assert result.certainty is Certainty.PROVEN and (CHANGED_BEFORE in result.notes) is drawn
    assert result.batch is not None
    apart = (result.batch.inputs[:, None] - problem.truth[None]).abs().flatten(2).amax(2)
    assert float(apart.amin(0).max()) < 1e-3, "what entered the network"
